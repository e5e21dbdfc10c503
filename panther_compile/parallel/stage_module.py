"""A stage of a partition, fit to be one of a pipeline: exact, under the user's parameter names.

What the graph of a stage leaves open:

    gradients    of its inputs may come out strided (of a transpose, an expand), and gloo sends only
                 contiguous tensors: an identity on the inputs makes their gradients contiguous.
    weights      zero-bubble schedules find the gradients of weights from where the paths of weights meet
                 those of inputs. A weight that only reaches an output of its own (a second embedding) meets
                 none and would get no gradient: an identity joins the outputs, and there all paths meet.
    mode         torch.export writes train or eval into the graph, as arguments of dropout and batch norm:
                 they are set again when the mode changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from panther_compile.errors import ParallelError

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
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        if schema.name == "aten::add_" and "num_batches_tracked" in str(node.args[0]):
            yield _ModeArgument(node, 1, node.args[1], 0)
        if schema.name == "aten::instance_norm" and node.args[3] is None:
            continue  # without running statistics it is the same in train and eval
        for place, argument in enumerate(schema.arguments):
            if argument.name not in _MODE_ARGUMENTS:
                continue
            if place < len(node.args):
                yield _ModeArgument(node, place, node.args[place], _MODE_ARGUMENTS[argument.name])
            elif argument.name in node.kwargs:
                value = node.kwargs[argument.name]
                yield _ModeArgument(node, argument.name, value, _MODE_ARGUMENTS[argument.name])


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
        graph: the stage as the partition made it, which holds the parameters.
    """

    def __init__(self, graph: fx.GraphModule, mode: bool | None) -> None:
        """Take the stage in the mode of `find_graph_mode`."""
        super().__init__()
        self.graph = graph
        self._mode = mode
        self._mode_arguments = tuple(_find_mode_arguments(graph.graph))
        super().train(mode is not False)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph."""
        return contiguous_gradients(self.graph(*contiguous_gradients(inputs)))

    def train(self, mode: bool = True) -> "StageModule":
        """Set dropout and batch norms, in the graph too."""
        if mode and self._mode is False:
            raise ParallelError(
                "the model cannot be set to train mode: the partition read it in eval mode, with no dropout "
                "and no statistics of batches in its graph; call model.train() before partition_model"
            )
        if mode != self.training and self._mode_arguments:
            for found in self._mode_arguments:
                found.set(mode)
            self.graph.recompile()
        return super().train(mode)
