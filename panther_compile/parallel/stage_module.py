"""A stage of a partition, fit to be one of a pipeline: exact, under the user's parameter names.

What the graph of a stage leaves open:

    gradients    of its inputs may come out strided (of a transpose, an expand), and gloo sends only
                 contiguous tensors: an identity on the inputs makes their gradients contiguous.
    weights      zero-bubble schedules find the gradients of weights from where the paths of weights meet
                 those of inputs. A weight that only reaches an output of its own (a second embedding) meets
                 none and would get no gradient: an identity joins the outputs, and there all paths meet.
    mode         torch.export writes train or eval into the graph, as arguments of dropout and batch norm:
                 they are set again when the mode changes.
    no gradient  where one process leaves a parameter without, as only detached tensors depend on it, what
                 stands between stages and units would hand zeros on: such a parameter is read detached.
    outputs      the next stage receives into buffers of the shapes and dtypes that were planned: a tensor
                 of another is refused by its name, before it is sent and read as something else. Of what
                 shows a buffer a copy goes there: the next microbatch may have written to it when it is sent.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm

from panther_compile.errors import ParallelError
from panther_compile.parallel.agreement import describe_tensor
from panther_compile.parallel.batch_norms import BATCH_NORM, synchronized_batch_norm
from panther_compile.parallel.graph_units import divide_graph, graphs_within, unit_names
from panther_compile.partition import TensorSpec
from panther_compile.partition.graph.narrowing import storages

_Held = TypeVar("_Held")

# Arguments of torch's operators that train and eval differ in -> their value in eval.
_MODE_ARGUMENTS = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}


class _ContiguousGradients(torch.autograd.Function):
    """The identity; gradients come out contiguous, and of all tensors at once.

    What comes out is no view: torch's schedules detach the outputs of a stage in place.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)


def contiguous_gradients(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors, as results of one autograd node through which their gradients pass.

    Args:
        tensors: of any shape and dtype; those that need no gradient are handed on untouched.
    """
    places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    if not places or not torch.is_grad_enabled():
        return tuple(tensors)
    passed = list(tensors)
    for place, tensor in zip(places, _ContiguousGradients.apply(*(tensors[p] for p in places)), strict=True):
        passed[place] = tensor
    return tuple(passed)


def _no_view(tensor: Tensor) -> Tensor:
    """The same numbers; torch's zero-bubble schedules detach in place what needs no gradient, too."""
    return tensor.data if tensor._is_view() and not tensor.requires_grad else tensor


def copies_of_buffers(tensors: Iterable[Tensor], buffers: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, but copies of what shows a buffer: the next microbatch may write there.

    Args:
        tensors: results of a microbatch, which are sent or read when others have run.
        buffers: of what has run.
    """
    held = storages(list(buffers))
    return [tensor.clone() if storages(tensor) & held else tensor for tensor in tensors]


@dataclass(frozen=True, slots=True)
class _ModeArgument:
    """An argument of a node that train and eval differ in; what the graph has is that of train."""

    node: fx.Node
    place: int | str
    train: Any
    eval: Any

    def set(self, training: bool) -> None:
        value = self.train if training else self.eval
        if isinstance(self.place, str):
            self.node.update_kwarg(self.place, value)
        else:
            self.node.update_arg(self.place, value)


def _find_mode_arguments(graph: fx.Graph) -> Iterator[_ModeArgument]:
    for node in graph.nodes:
        target, given = _called(node)
        if target is torch.ops.aten.add_.Tensor and "num_batches_tracked" in str(node.args[0]):
            yield _ModeArgument(node, 1, node.args[1], 0)
        if "running_mean" in given and given["running_mean"] is None:
            continue  # without running statistics it is the same in train and eval
        for place, (name, value) in enumerate(given.items()):
            if name in _MODE_ARGUMENTS:
                where = place if place < len(node.args) else name
                yield _ModeArgument(node, where, value, _MODE_ARGUMENTS[name])


def _called(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """The function of torch that a node calls, and what it is given by name; nothing of other nodes."""
    target = BATCH_NORM if node.target is synchronized_batch_norm else node.target
    names = _argument_names(target) if node.op == "call_function" else ()
    given = dict(zip(names, node.args, strict=False))
    return target, given | {name: node.kwargs[name] for name in names if name in node.kwargs}


def _argument_names(target: Any) -> tuple[str, ...]:
    """Arguments of a function of torch, in their order: of an operator, or of `torch.nn.functional`."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    if target is F.scaled_dot_product_attention:  # which has no signature
        return ("query", "key", "value", "attn_mask", "dropout_p")
    if getattr(target, "__module__", None) != F.__name__:
        return ()
    return tuple(inspect.signature(target).parameters)


def find_row_mixing(graphs: Iterable[fx.GraphModule]) -> str | None:
    """A batch norm that takes statistics over the rows in train mode, by name; None if there is none.

    Args:
        graphs: all stages.
    """
    graphs = tuple(graphs)
    found = (
        argument.node.name
        for graph in graphs
        for argument in _find_mode_arguments(graph.graph)
        if "batch_norm" in str(argument.node.target) and argument.train
    )
    whole = (
        name
        for graph in graphs
        for name, module in graph.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    )
    return next(found, None) or next(whole, None)


def find_own_statistics(graphs: Iterable[fx.GraphModule]) -> str | None:
    """A batch norm without running statistics, by name, which takes those of the rows in either mode.

    Args:
        graphs: all stages.
    """
    for graph in graphs:
        for node in graph.graph.nodes:
            target, given = _called(node)
            if target in (BATCH_NORM, F.batch_norm) and given.get("running_mean") is None:
                return str(node.name)
        for name, module in graph.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is None:
                return name
    return None


def find_graph_mode(graphs: Iterable[fx.GraphModule]) -> bool | None:
    """The mode that a model's graph was read in: train, eval, or None where nothing depends on it.

    Args:
        graphs: all its stages.
    """
    found = [bool(argument.train) for graph in graphs for argument in _find_mode_arguments(graph.graph)]
    return any(found) if found else None


class StageModule(nn.Module):
    """One stage: tensors in, a tuple of tensors out.

    Attributes:
        graph: the stage as the partition made it, or of calls of its units, which hold the parameters.
        recomputed: units that the user's own model computes again in the backward.
        promised: outputs that other ranks wait for, with their shapes and dtypes; None for the last stage.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        mode: bool | None,
        index: int = 0,
        *,
        divide: bool = False,
        unreached: Collection[str] = (),
    ) -> None:
        """Take a stage.

        Args:
            graph: of the stage, flat.
            mode: of `find_graph_mode`.
            index: along the model.
            divide: into units, so that they can be gathered or computed again one at a time; what the user's
                own model computes again becomes units in any case.
            unreached: parameters that no gradient is to reach.
        """
        super().__init__()
        if unreached:
            _detach_reads(graph, unreached)
        self.graph, self.recomputed = divide_graph(graph, divide=divide)
        self.promised: tuple[TensorSpec, ...] | None = None
        self._index = index
        self._mode = mode
        self._graphs = tuple(graphs_within(self.graph))
        self._mode_arguments = [tuple(_find_mode_arguments(one.graph)) for one in self._graphs]
        super().train(mode is not False)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph.

        Raises:
            ParallelError: an output is not of the shape or dtype that the next stage waits for, or needs a
                gradient that it does not send.
        """
        outputs = self.graph(*contiguous_gradients(inputs))
        outputs = copies_of_buffers(outputs, (buffer for _, buffer in self.held_buffers()))
        if self.promised is not None:
            _check_outputs(self._index, self.promised, outputs)
            outputs = [
                # Of what is detached: the schedule will have a gradient for it.
                tensor.detach().requires_grad_(torch.is_grad_enabled())
                if spec.requires_grad and not tensor.requires_grad
                else tensor
                for spec, tensor in zip(self.promised, outputs, strict=True)
            ]
        return tuple(_no_view(tensor) for tensor in contiguous_gradients(outputs))

    def held_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the user's names."""
        for graph in self._graphs:
            yield from _held_by(graph, graph.named_parameters())

    def held_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers under the user's names."""
        for graph in self._graphs:
            yield from _held_by(graph, graph.named_buffers())

    def units(self) -> list[tuple[str, nn.Module]]:
        """Names and modules of the units, in their order; none if the stage is not divided."""
        return [(name, self.graph.get_submodule(name)) for name in unit_names(self.graph)]

    def train(self, mode: bool = True) -> "StageModule":
        """Set dropout and batch norms, in the graph too."""
        if mode and self._mode is False:
            raise ParallelError(
                "the model cannot be set to train mode: the partition read it in eval mode, with no dropout "
                "and no statistics of batches in its graph; call model.train() before partition_model"
            )
        if mode != self.training:
            for graph, found in zip(self._graphs, self._mode_arguments, strict=True):
                for argument in found:
                    argument.set(mode)
                if found:
                    _recompile(graph)
        return super().train(mode)


def _detach_reads(graph_module: fx.GraphModule, names: Collection[str]) -> None:
    graph = graph_module.graph
    for node in [one for one in graph.nodes if one.op == "get_attr" and one.target in names]:
        reader = next((other for other in graph.nodes if other in node.users), None)
        if reader is not None:
            with graph.inserting_before(reader):
                detached = graph.call_function(torch.ops.aten.detach.default, (node,))
            detached.meta["custom"] = reader.meta.get("custom", {})  # of the user's own checkpoint calls
            node.replace_all_uses_with(detached, lambda user, own=detached: user is not own)
    graph_module.recompile()


def _recompile(graph: fx.GraphModule) -> None:
    """Generate the code of a graph anew, under the class that it had before `fully_shard` changed it.

    On that of `fully_shard` torch.fx would put a call that calls itself.
    """
    sharded = type(graph)
    if isinstance(graph, FSDPModule):
        graph.__class__ = sharded.__mro__[2]  # behind its own class and FSDPModule
    graph.recompile()
    graph.__class__ = sharded


def _held_by(graph: fx.GraphModule, held: Iterable[tuple[str, _Held]]) -> Iterator[tuple[str, _Held]]:
    """Tensors without those that the units of a graph hold."""
    inside = tuple(f"{name}." for name in unit_names(graph))
    yield from ((name, tensor) for name, tensor in held if not name.startswith(inside))


def _check_outputs(index: int, promised: Sequence[TensorSpec], outputs: Sequence[Tensor]) -> None:
    for spec, tensor in zip(promised, outputs, strict=True):
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise ParallelError(
                f"stage {index} gives {spec.name} as {describe_tensor(tensor)}, and stage {index + 1} waits "
                f"for {spec.shape} {spec.dtype}: what the model computes depends on more than the example's "
                "shapes and the autocast that step() is called under"
            )
        if torch.is_grad_enabled() and tensor.requires_grad and not spec.requires_grad:
            raise ParallelError(
                f"stage {index} gives {spec.name} with a gradient to compute, and stage {index + 1} sends "
                "none back, as none was needed where the partition was read: give partition_model an example "
                "that requires one, or the model as it is trained, or give step() a detached input"
            )
