"""A model and example inputs become one flat FX graph, under the user's parameter names.

Routes, in this order:

    torch.export       not strict; reads nearly every model. Caches are left out (`use_cache=False`).
    torch.fx           where export fails; sketched layers and those of torch.nn stay whole.
    torch.fx, guided   with `boundaries=["blocks.0", ...]`: the named modules stay whole too, so that what
                       no graph can show may happen inside them.

The graph is that of the example's shapes: one microbatch on one device. Its parameters and buffers are the
model's own tensors, not copies, and nothing of the model is changed.
"""

import inspect
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from operator import getitem
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from panther_compile.errors import CaptureError, first_line
from panther_compile.models.batches import hides_tensors
from panther_compile.models.surroundings import unwritten
from panther_compile.names import attribute
from panther_compile.partition.graph.functions import functions_kept
from panther_compile.partition.graph.recomputed import checkpoints_marked, checkpoints_refused
from panther_compile.planning.trace import SketchTracer

_CHECKS = ("_assert", "_guards_fn", "sym_constrain", "_check")
_TRANSFORMS = "torch._functorch.predispatch"  # the module of what begins and ends a vmap or jvp in a graph
# Arguments that batch norms in train mode write, and do not say so.
_STATISTICS = ("running_mean", "running_var")
_NOISY = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._export",
    "torch._subclasses.fake_tensor",
    "torch.export",
)


@dataclass(frozen=True, slots=True)
class Precision:
    """State of autocast for one kind of device: shapes and dtypes in a graph are those under it.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: of products; None where autocast is off.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> "Precision":
        """The state that this thread is in."""
        if device_type == "meta" or not torch.is_autocast_enabled(device_type):
            return cls(device_type, None)
        return cls(device_type, torch.get_autocast_dtype(device_type))

    def context(self) -> AbstractContextManager[None]:
        """Autocast as it was."""
        if self.device_type == "meta":
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)


@dataclass(frozen=True)
class CallForm:
    """How the model is called, and how a graph with flat inputs and outputs stands in for it.

    Attributes:
        signature: of the model's forward.
        extra: keyword arguments that were added to the user's.
        in_spec: tree of (args, kwargs).
        in_leaves: its leaves; the tensors among them, whose places hold None here, are given to the graph.
        tensors: which of them those are.
        out_spec: tree of the result.
        out_leaves: its leaves; the tensors among them, whose places hold None here, come from the graph.
        out_tensors: which of them those are.
    """

    signature: inspect.Signature
    extra: Mapping[str, Any]
    in_spec: pytree.TreeSpec
    in_leaves: tuple[Any, ...]
    tensors: tuple[int, ...]
    out_spec: pytree.TreeSpec
    out_leaves: tuple[Any, ...]
    out_tensors: tuple[int, ...]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The graph's inputs, from a call as the user writes it."""
        leaves, spec = pytree.tree_flatten(_bind(self.signature, args, {**kwargs, **self.extra}))
        wanted = [Tensor if place in self.tensors else one for place, one in enumerate(self.in_leaves)]
        if spec != self.in_spec or not all(map(_fits, leaves, wanted)):
            raise CaptureError(
                f"called with {_described(leaves, spec)}, but partitioned for the example, "
                f"{_described(wanted, self.in_spec)}: give partition_model an example "
                "of this call; what is no tensor is part of the graph"
            )
        return [leaves[place] for place in self.tensors]

    def call(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's own arguments, from the graph's inputs; what is no tensor is as in the example."""
        leaves = list(self.in_leaves)
        for place, value in zip(self.tensors, inputs, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        return tuple(args), dict(kwargs)

    def unflatten(self, outputs: Sequence[Tensor]) -> Any:
        """The model's result, from the graph's outputs."""
        leaves = list(self.out_leaves)
        for place, output in zip(self.out_tensors, outputs, strict=True):
            leaves[place] = output
        return pytree.tree_unflatten(leaves, self.out_spec)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, NoneType)


def _fits(given: Any, wanted: Any) -> bool:
    """Whether an argument is what a graph was read with: a tensor, or a plain value that is the same."""
    if wanted is Tensor or isinstance(given, Tensor):
        return wanted is Tensor and isinstance(given, Tensor)
    return not isinstance(wanted, _PLAIN) or (isinstance(given, _PLAIN) and given == wanted)


def _described(leaves: Sequence[Any], spec: pytree.TreeSpec) -> str:
    """Arguments in words, tensors by the word."""
    words = [_Word("Tensor") if one is Tensor or isinstance(one, Tensor) else one for one in leaves]
    args, kwargs = pytree.tree_unflatten(words, spec)
    return (
        ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]) or "nothing"
    )


class _Word(str):
    """Text that is shown as it is."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        graph_module: flat: tensors in, a tuple of tensors out.
        example: one tensor for each input.
        form: how the model itself is called.
        route: how the graph was read, for the report.
        unused: parameters of the model that the graph does not read.
        precision: autocast that the graph was read and is to be weighed under.
        lost: what the model does in its backward, and the graph does not, in words.
    """

    graph_module: fx.GraphModule
    example: tuple[Tensor, ...]
    form: CallForm
    route: str
    unused: tuple[str, ...]
    precision: Precision = Precision("cpu", None)
    lost: tuple[str, ...] = ()


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], boundaries: Sequence[str] = ()
) -> Captured:
    """Read the graph of a model for one microbatch.

    Args:
        model: left as it is; its mode, train or eval, is the graph's.
        args: example inputs of one microbatch.
        kwargs: likewise.
        boundaries: names of modules to keep whole.

    Raises:
        CaptureError: no route reads it, the example does not fit, or hides tensors in objects.
    """
    names = dict(model.named_modules())
    unknown = [name for name in boundaries if name not in names]
    if unknown:
        raise CaptureError(f"boundaries name no modules of the model: {unknown}; it has {_some(names)}")
    signature = inspect.signature(model.forward)
    extra = _without_cache(model, signature, kwargs)
    try:
        bound = _bind(signature, args, {**kwargs, **extra})
    except TypeError as error:
        raise CaptureError(f"example_inputs do not fit {type(model).__name__}.forward: {error}") from error
    _check_shown(model, bound)
    bound = _apart(bound)
    with unwritten(model), functions_kept() as functions:
        if boundaries:
            graph_module, outputs, failure = _trace(model, signature, bound, boundaries)
            route = "torch.fx, boundaries kept whole"
            failures = {"torch.fx": failure}
        else:
            graph_module, outputs, failure = _export(model, bound)
            route, failures = "torch.export", {"torch.export": failure}
            if graph_module is None:
                graph_module, outputs, failures["torch.fx"] = _trace(model, signature, bound, ())
                route = "torch.fx"
    if graph_module is None:
        raise CaptureError(_explain(model, failures, boundaries))
    functions.put_into(graph_module)
    _clean(graph_module)
    _restore_names(graph_module, model)
    lost = sorted({*functions.lost, *_backward_hooks(model, graph_module)})
    captured = _captured(graph_module, outputs, model, signature, extra, bound, route)
    return replace(captured, lost=tuple(lost))


def example_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a mapping is keywords, a tuple or list positional, else one input."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _bind(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call in one form, however the caller divides it into positions and keywords."""
    bound = signature.bind(*args, **kwargs)
    return tuple(bound.args), dict(sorted(bound.kwargs.items()))


def _apart(bound: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The same arguments; of a tensor that is given twice, as labels that are the ids, a copy.

    An exporter takes both for one input, and every batch would be read there.
    """
    leaves, spec = pytree.tree_flatten(bound)
    seen: set[int] = set()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            leaves[place] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
    return pytree.tree_unflatten(leaves, spec)


def _without_cache(
    model: nn.Module, signature: inspect.Signature, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """`use_cache=False` for a Hugging Face model that would return a cache, which is no tensor."""
    config = getattr(model, "config", None)
    takes = "use_cache" in signature.parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    caches = bool(getattr(config, "use_cache", False))
    return {"use_cache": False} if takes and caches and "use_cache" not in kwargs else {}


def _export(
    model: nn.Module, bound: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[fx.GraphModule | None, Any, BaseException | None]:
    try:
        with quiet(), torch.enable_grad(), checkpoints_marked():
            program = torch.export.export(model, bound[0], bound[1], strict=False)
            graph_module = program.module()
    # The exporter runs the model's own code on fake tensors: it may raise anything.
    except Exception as error:
        return None, None, error
    assert isinstance(graph_module, fx.GraphModule)
    if any(getattr(node.target, "__module__", None) == _TRANSFORMS for node in graph_module.graph.nodes):
        # A node of these leaves torch in the middle of a transform, if what follows it does not run.
        return (
            None,
            None,
            CaptureError("it calls vmap or jvp of torch.func, the inside of which no cut may divide"),
        )
    return graph_module, program.call_spec.out_spec, None


def _check_shown(model: nn.Module, bound: Any) -> None:
    """Raise CaptureError if tensors are in objects: they would be part of the graph, and of every batch."""
    hiding = next((leaf for leaf in pytree.tree_leaves(bound) if hides_tensors(leaf)), None)
    if hiding is not None:
        kind = type(hiding).__name__
        raise CaptureError(
            f"{type(model).__name__} is given a {kind}, which holds tensors out of a graph's sight: give it "
            f"tensors, in tuples, lists or dictionaries, or show them by torch.export.register_dataclass"
        )


def _trace(
    model: nn.Module,
    signature: inspect.Signature,
    bound: tuple[tuple[Any, ...], dict[str, Any]],
    boundaries: Sequence[str],
) -> tuple[fx.GraphModule | None, Any, BaseException | None]:
    arguments = signature.bind(*bound[0], **bound[1]).arguments
    fixed = {
        name: arguments.get(name, parameter.default)
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not isinstance(arguments.get(name), Tensor)
    }
    tracer = _BoundaryTracer(frozenset(boundaries))
    try:
        with torch.random.fork_rng(devices=[]), checkpoints_refused():
            graph = tracer.trace(model, fixed)
        for node in list(graph.nodes):
            if node.op == "placeholder" and not isinstance(arguments.get(node.target), Tensor):
                node.replace_all_uses_with(None)
                graph.erase_node(node)
        return fx.GraphModule(tracer.root, graph), None, None
    # The tracer runs the model's own code on proxies: it may raise anything. A graph module has no room for
    # modules that are called as its own attributes are (`graph`, `code`).
    except Exception as error:
        return None, None, error


class _BoundaryTracer(SketchTracer):
    """Keeps the named modules whole, besides sketched layers and those of torch.nn."""

    def __init__(self, boundaries: frozenset[str]) -> None:
        super().__init__()
        self._boundaries = boundaries

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module is one node."""
        return module_qualified_name in self._boundaries or super().is_leaf_module(m, module_qualified_name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's own account of a failure, which the error repeats."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _clean(graph_module: fx.GraphModule) -> None:
    """Drop checks of the inputs, which say nothing to a stage that sees other values, and what nobody reads.

    A stage would be given a tensor, or hold a parameter, for nothing, and wait for their gradients.
    """
    for node in reversed(list(graph_module.graph.nodes)):
        if node.users or node.op not in ("call_function", "call_module"):
            continue
        if any(mark in str(node.target) for mark in _CHECKS) or _does_nothing_else(node):
            graph_module.graph.erase_node(node)


def _does_nothing_else(node: fx.Node) -> bool:
    """Whether an operation gives its result, and neither writes nor draws random numbers."""
    if node.target is getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    written = target._schema.is_mutable or any(one.name in _STATISTICS for one in target._schema.arguments)
    return not written and torch.Tag.nondeterministic_seeded not in target.tags


def _restore_names(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Let every read of a tensor use its first name in the model; tied ones become one."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    first |= {id(tensor): name for name, tensor in model.named_buffers()}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            node.target = first.get(id(attribute(graph_module, str(node.target))), node.target)


def _backward_hooks(model: nn.Module, graph_module: fx.GraphModule) -> Iterator[str]:
    """Modules with hooks that run in the backward, but for those that the graph calls."""
    whole = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    for name, module in model.named_modules():
        hooked = module._backward_hooks or module._backward_pre_hooks
        if hooked and not any(name == one or name.startswith(f"{one}.") for one in whole):
            yield f"the backward hooks of {name or type(module).__name__}"


def _captured(
    graph_module: fx.GraphModule,
    out_spec: pytree.TreeSpec | None,
    model: nn.Module,
    signature: inspect.Signature,
    extra: Mapping[str, Any],
    bound: tuple[tuple[Any, ...], dict[str, Any]],
    route: str,
) -> Captured:
    graph = graph_module.graph
    leaves, in_spec = pytree.tree_flatten(bound)
    tensors = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) == len(leaves):  # torch.export keeps a placeholder for each leaf
        for node, leaf in zip(placeholders, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                assert not node.users, f"{node} is no tensor and is used"
                graph.erase_node(node)
    elif len(placeholders) != len(tensors):
        raise CaptureError(
            f"{type(model).__name__} takes tensors inside of other arguments, as torch.fx cannot"
        )
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    outputs, found_spec = pytree.tree_flatten(_plain(output.args[0]))
    outputs = [_own_result(graph, output, leaf) for leaf in outputs]
    out_tensors = tuple(place for place, leaf in enumerate(outputs) if isinstance(leaf, fx.Node))
    output.args = (tuple(outputs[place] for place in out_tensors),)
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    # A new one, without the exporter's hooks, which check the user's way of calling.
    graph_module = fx.GraphModule(graph_module, graph)
    form = CallForm(
        signature=signature,
        extra=extra,
        in_spec=in_spec,
        in_leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        tensors=tensors,
        out_spec=out_spec or found_spec,
        out_leaves=tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in outputs),
        out_tensors=out_tensors,
    )
    # torch.export reads every parameter at the start, those that nothing uses too.
    used = [node for node in graph.nodes if node.users]
    reads = {str(node.target) for node in used if node.op in ("get_attr", "call_module")}
    unused = tuple(
        name
        for name, _ in model.named_parameters()
        if name not in reads and not any(name.startswith(f"{read}.") for read in reads)
    )
    example = tuple(leaves[place] for place in tensors)
    device_type = next((tensor.device.type for tensor in (*example, *model.parameters())), "cpu")
    return Captured(graph_module, example, form, route, unused, Precision.current(device_type))


def _own_result(graph: fx.Graph, output: fx.Node, leaf: Any) -> Any:
    """What is returned; a copy of a tensor that the model holds, which some stage makes."""
    held = leaf
    while isinstance(held, fx.Node) and getattr(getattr(held.target, "_schema", None), "is_mutable", False):
        held = held.args[0]  # what is written in place is the result
    if not isinstance(held, fx.Node) or held.op != "get_attr":
        return leaf
    with graph.inserting_before(output):
        return graph.call_function(torch.ops.aten.clone.default, (leaf,))


def _plain(tree: Any) -> Any:
    """The lists and dicts of torch.fx as ordinary ones."""
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _plain(item) for key, item in tree.items()}
    return type(tree)(map(_plain, tree)) if type(tree) is tuple else tree


def _explain(
    model: nn.Module, failures: Mapping[str, BaseException | None], boundaries: Sequence[str]
) -> str:
    """The construct that no route can read, and what to do about it."""
    asked = f" with boundaries={list(boundaries)}" if boundaries else ""
    lines = [f"no graph of {type(model).__name__} can be read{asked}:"]
    for route, error in failures.items():
        message = "" if error is None else first_line(error)
        lines.append(f"  {route}: {type(error).__name__}: {message[:200]}{_where(error)}")
    lines.append(
        "Move that construct into a submodule of its own and keep it whole with boundaries=[its name, ...], "
        "or rewrite it with torch operations (torch.where, torch.cond)."
    )
    return "\n".join(lines)


def _where(error: BaseException | None) -> str:
    """The last line of code outside of torch that an error passed through, or that its message names."""
    place, trace = "", error.__traceback__ if error else None
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if "/torch/" not in file and "panther_compile/partition" not in file:
            source = inspect.getframeinfo(trace).code_context
            place = f"\n    at {file}:{line}: {source[0].strip() if source else ''}"
        trace = trace.tb_next
    return place


def _some(names: Mapping[str, Any]) -> str:
    shown = [name for name in names if name][:8]
    return ", ".join(shown) + (", ..." if len(names) > 9 else "")
