"""The backend of `torch.compile(model, backend="panther")`; docs/compile.md says what it does for the user.

    inference:  lift weights out of the inputs; layers become module calls
        sketched model  ──►  merge, fuse                                    ──┐
        dense model     ──►  fold batch norms, sketch, merge, fuse          ──┼──►  inner backend ("inductor")
    training:                                                                 │
        sketched model  ──►  the user's passes                              ──┘
        dense model     ──►  BackendError

torch finds `panther` through the entry point `torch_dynamo_backends`, without an import by the user.
"""

import functools
import logging
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeAlias

import torch
from torch import SymInt, Tensor, fx, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses import FakeTensor

from panther_compile.api import plan_sketch, sketchify
from panther_compile.backend.factor_cache import FactorCache, Snapshot, origins
from panther_compile.calibration.closeness import compare_outputs
from panther_compile.calibration.verdict import keep_verdict
from panther_compile.config import SketchConfig, selectors
from panther_compile.errors import BackendError, NoTargetError, SelectorError
from panther_compile.kinds.registry import find_kind
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.models.batches import Call
from panther_compile.models.surroundings import undisturbed
from panther_compile.passes.default import CLEAN_UP, NORMALIZE, improve
from panther_compile.passes.lift_parameters import lift_parameters, liftable
from panther_compile.passes.runner import GraphPass, PassResult, run_passes
from panther_compile.passes.sketched_calls import layout_of
from panther_compile.planning.trace import clone_structure

_log = logging.getLogger(__name__)

Compiled: TypeAlias = Callable[..., Any]
# Dynamo calls a backend anew for each graph and each recompilation: what they share can stand nowhere else.
_FACTORS = FactorCache()
# Arguments of sketchify that have no meaning for a graph, or ask for work that a compiler should not do.
_OF_SKETCHIFY = ("data", "inplace", "example_inputs", "resume", "max_drop", "evaluate", "refine")
# Calls in a graph after which gradients are on, by their argument.
_TURN_GRADIENTS_ON: Mapping[Any, bool] = {
    torch._C._set_grad_enabled: True,
    torch.autograd.grad_mode._enter_inference_mode: False,
}


def panther(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one graph of Dynamo; torch calls this.

    Args:
        graph_module: the graph, with its weights among the inputs.
        example_inputs: real or fake, one for each input.
        options: "inner" (backend that compiles the result), "passes" (a sequence of `GraphPass`), and the
            fields of `SketchConfig` but `inplace` and `refine`.
        mode: not supported.

    Raises:
        BackendError: an option is unknown, or of `sketchify` alone; or the model is dense and to be trained.
        ConfigError, ConfigTypeError: an option is not what is wanted.
    """
    if mode is not None:
        raise BackendError(f"{mode=}: the panther backend has no modes, give it options={{'inner': ...}}")
    settings = Settings.read(options or {})
    # One of several graphs of a sketched model may hold no sketched layer.
    sketched = _holds_sketched_layers(graph_module.graph) or _is_called_by_sketched_model()
    weights = [node is not None for node in liftable(graph_module, example_inputs)]
    if (torch.is_grad_enabled() or _turns_gradients_on(graph_module)) and any(
        value.requires_grad for value, lifted in zip(example_inputs, weights, strict=True) if lifted
    ):
        if not sketched:
            _refuse_dense_training(graph_module, example_inputs, settings)
        ready = run_passes(graph_module, settings.passes).graph_module
        return settings.compile(ready, example_inputs)
    compiled = _CompiledGraph(graph_module, example_inputs, settings, sketch=not sketched)
    return compiled if compiled.improved else settings.compile(graph_module, example_inputs)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked.

    Attributes:
        inner: name of the backend that compiles the result, or the backend itself.
        passes: the user's own.
        sketch: the options of `sketchify`.
    """

    inner: str | Callable[..., Any] = "inductor"
    passes: tuple[GraphPass, ...] = ()
    sketch: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Check the options of `torch.compile`."""
        own = {"inner", "passes"}
        known = own | {one.name for one in fields(SketchConfig)} - {"inplace", "refine"}
        alone = [name for name in _OF_SKETCHIFY if name in options]
        if alone:
            raise BackendError(
                f"{', '.join(alone)}: for sketchify alone, not for a backend; call "
                f"panther_compile.sketchify(model, {alone[0]}=...) first and compile its result"
            )
        unknown = sorted(set(options) - known)
        if unknown:
            raise BackendError(
                f"unknown option {', '.join(unknown)}; the options of the panther backend are "
                f"{', '.join(sorted(known))}"
            )
        sketch = {"progress": False} | {name: value for name, value in options.items() if name not in own}
        SketchConfig(**sketch)  # checks them
        inner = options.get("inner", "inductor")
        if isinstance(inner, str) and inner not in torch._dynamo.list_backends(exclude_tags=()):
            names = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
            raise BackendError(f"{inner=}, wanted a backend of torch.compile: {names}")
        if inner == "panther" or not (isinstance(inner, str) or callable(inner)):
            raise BackendError(f"{inner=}, wanted another backend, by name or itself")
        given = options.get("passes", ())
        if not isinstance(given, Sequence):
            raise BackendError(f"passes={given!r}, wanted a sequence of GraphPass")
        passes = tuple(given)
        wrong = next((one for one in passes if not isinstance(one, GraphPass)), None)
        if wrong is not None:
            raise BackendError(f"passes: {wrong!r} is a {type(wrong).__name__}, wanted a GraphPass")
        return cls(inner, passes, sketch)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Compile by the inner backend."""
        inner: Any = lookup_backend(self.inner)
        compiled: Compiled = inner(graph_module, example_inputs)
        return compiled


class _CompiledGraph:
    """A graph compiled with its weights inside it, factorized; brought up to date where one has changed."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        settings: Settings,
        *,
        sketch: bool,
    ) -> None:
        self._settings, self._sketch = settings, sketch
        self._template = _without_meta(graph_module)
        nodes = {place: node for place, node in enumerate(liftable(graph_module, example_inputs)) if node}
        self._lifted = list(nodes)
        # One of several layers of a weight may be folded or sketched, and another use the weight as it is.
        self._shared = {place for place, node in nodes.items() if sketch and len(node.users) > 1}
        ready, self.improved = self._prepare(graph_module, example_inputs)
        if self.improved:
            self._current = self._variant(ready, example_inputs)
            self._current.run = settings.compile(ready, self._current.others(example_inputs))
            self._variants = [self._current]

    def __call__(self, *inputs: Any) -> Any:
        weights = self._weights(inputs)
        if not self._current.snapshot.matches(weights):
            self._current = self._variant_for(weights, inputs)
        return self._current.run(*self._current.others(inputs))

    def _weights(self, inputs: Sequence[Any]) -> list[Tensor]:
        return [inputs[place] for place in self._lifted]

    def _prepare(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, bool]:
        """The graph to compile, and whether it is more than another form of the one given."""
        lift = GraphPass(functools.partial(lift_parameters, example_inputs=inputs), exact=True)
        sketch = GraphPass(self._sketch_pass(inputs), exact=False) if self._sketch else None
        passes = improve(sketch=sketch, extra=self._settings.passes)
        with torch.inference_mode(False), torch.no_grad():
            normal = run_passes(graph_module, (lift, *NORMALIZE)).graph_module
            improved = run_passes(normal, passes)
            return run_passes(improved.graph_module, CLEAN_UP).graph_module, improved.changed > 0

    def _sketch_pass(self, inputs: Sequence[Any]) -> Callable[[fx.GraphModule], PassResult]:
        others = [value for place, value in enumerate(inputs) if place not in self._lifted]
        return functools.partial(
            sketch_dense, settings=self._settings, weights=self._weights(inputs), inputs=others
        )

    def _variant(self, ready: fx.GraphModule, inputs: Sequence[Any]) -> "_Variant":
        shared = {id(inputs[place]) for place in self._shared}
        used = [tensor for tensor in _tensors(ready) if id(tensor) not in shared]
        return _Variant.of(ready, self._template, Snapshot(self._weights(inputs), used))

    def _variant_for(self, weights: list[Tensor], inputs: Sequence[Any]) -> "_Variant":
        """What is compiled for these weights as they are now: known, brought up to date, or made."""
        self._variants = [variant for variant in self._variants if variant.snapshot.is_alive]
        for variant in self._variants:
            if variant.snapshot.matches(weights):
                return variant
        _log.info("weights have changed: factorizing again")
        ready, _ = self._prepare(self._template, inputs)
        new = self._variant(ready, inputs)
        for variant in self._variants:
            if variant.snapshot.is_of(weights) and variant.adopt(new):
                return variant
        # Outside Dynamo nothing would guard the shapes that the inner backend takes for granted.
        new.run = torch.compile(ready, backend=self._settings.inner)
        self._variants.append(new)
        return new


@dataclass(slots=True)
class _Variant:
    """The compiled form for one set of weights; `kept` are the inputs that it takes."""

    snapshot: Snapshot
    graph_module: fx.GraphModule
    kept: list[int]
    run: Compiled

    @classmethod
    def of(cls, ready: fx.GraphModule, template: fx.GraphModule, snapshot: Snapshot) -> Self:
        left = {node.target for node in ready.graph.nodes if node.op == "placeholder"}
        inputs = [node.target for node in template.graph.nodes if node.op == "placeholder"]
        kept = [place for place, name in enumerate(inputs) if name in left]
        return cls(snapshot, ready, kept, ready.forward)

    def others(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs that are not held."""
        return [inputs[place] for place in self.kept]

    def adopt(self, new: "_Variant") -> bool:
        """Take over the numbers of a variant; False where that has another structure."""
        if torch._inductor.config.freezing or _structure(self.graph_module) != _structure(new.graph_module):
            return False
        with torch.inference_mode(False), torch.no_grad():
            for old_tensor, new_tensor in zip(
                _tensors(self.graph_module), _tensors(new.graph_module), strict=True
            ):
                if old_tensor is not new_tensor:  # the user's own is held by both
                    old_tensor.copy_(new_tensor)
        self.snapshot = new.snapshot
        return True


def _structure(graph_module: fx.GraphModule) -> list[Any]:
    modules = list(graph_module.named_modules())
    specs = [(name, m.sketch_spec()) for name, m in modules if isinstance(m, SketchedLayer)]
    return [graph_module.code, specs, [(tuple(t.shape), t.dtype, t.device) for t in _tensors(graph_module)]]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def sketch_dense(
    graph_module: fx.GraphModule, *, settings: Settings, weights: list[Tensor], inputs: Sequence[Any]
) -> PassResult:
    """Replace dense layers in place; approximate. Counts the layers.

    Args:
        graph_module: a normalized graph.
        settings: how.
        weights: that it holds.
        inputs: one for each placeholder, on which layers are timed where that is asked for.
    """
    dense = {name: module for name, module in graph_module.named_modules() if find_kind(module) is not None}
    numbers = origins([tensor for module in dense.values() for tensor in _tensors(module)], weights)
    named = [(name, repr(module)) for name, module in dense.items()]
    key = (named, numbers, _heads(graph_module), settings.sketch)
    layers = _FACTORS.find(weights, key)
    if layers is None:
        layers = _sketched_layers(graph_module, settings, inputs)
        _FACTORS.keep(weights, key, layers)
    for name, layer in layers.items():
        graph_module.set_submodule(name, layer)
    return PassResult(graph_module, len(layers))


def _sketched_layers(
    graph_module: fx.GraphModule, settings: Settings, inputs: Sequence[Any]
) -> dict[str, nn.Module]:
    example = _example(inputs) if settings.sketch.get("objective") == "latency" else None
    # Nothing is made up while compiling: the inputs of the call are there to compare outputs on.
    options = _without_head(graph_module, settings.sketch) | {"synthetic": False}
    dense = clone_structure(graph_module)
    try:
        sketchify(graph_module, inplace=True, example_inputs=example, **options)
    except (NoTargetError, SelectorError) as error:
        # A selector may well match nothing in one of several graphs of a model.
        _log.log(logging.WARNING if isinstance(error, SelectorError) else logging.INFO, "%s", error)
        return {}
    layers = set(outermost(graph_module))
    named = graph_module.named_modules(remove_duplicate=False)
    found = {name: module for name, module in named if module in layers}
    if not any(isinstance(value, FakeTensor) for value in inputs):
        new = {dense.get_submodule(name): layer for name, layer in found.items()}
        closeness = compare_outputs(
            dense, new, [_QuietCall(_example(inputs), {})], logits=None, inputs="the call being compiled"
        )
        _log.info("%s", closeness)
        keep_verdict(graph_module, closeness, fitted_to="weights", output="")
    return found


class _QuietCall(Call):
    """A call that is run while the user's code is compiled."""

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        with undisturbed():
            return super().run(model)


def _example(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a graph to run it on: sizes that may vary are those of the call being compiled."""
    if any(isinstance(value, FakeTensor) for value in inputs):
        fake = ", ".join(str(tuple(value.shape)) for value in inputs if isinstance(value, FakeTensor))
        raise BackendError(
            "objective='latency' times layers on the inputs of the call, wanted tensors with numbers: those "
            f"of {fake} are fake"
        )
    return tuple(value.node.hint if isinstance(value, SymInt) else value for value in inputs)


def _without_head(graph_module: fx.GraphModule, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the layers excluded that make an output of the graph, unless `include` is given.

    `sketchify` knows a head by its place among the other layers, and a graph may show none of them.
    """
    if options.get("include") is not None:
        return dict(options)
    heads, excluded = _heads(graph_module), selectors(options.get("exclude"))
    return {**options, "exclude": (*excluded, lambda _, name: name in heads) if heads else excluded}


def _heads(graph_module: fx.GraphModule) -> set[str]:
    """Names of the layers that make an output of the graph and change the number of features."""
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    last = (_before_bias(node) for node in output.all_input_nodes)
    made = {str(node.target) for node in last if node.op == "call_module"}
    return {name for name in made if _changes_width(graph_module.get_submodule(name))}


def _before_bias(node: fx.Node) -> fx.Node:
    """What a tensor that the graph holds or is given, or a cast of one, is added to; else the node itself."""
    if node.op != "call_function" or node.target not in (operator.add, torch.add):
        return node
    computed = [one for one in node.all_input_nodes if not _is_given(one)]
    return computed[0] if len(computed) == 1 else node


def _is_given(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "to":
        return all(_is_given(one) for one in node.all_input_nodes)
    return node.op in ("placeholder", "get_attr")


def _changes_width(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features != module.out_features


def _refuse_dense_training(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> None:
    """Raise if a layer of this graph would be sketched: its weight could not be trained."""
    with torch.inference_mode(False), torch.no_grad():
        lifted = lift_parameters(graph_module, example_inputs).graph_module
        try:
            normal = run_passes(lifted, NORMALIZE).graph_module
            options = dict(settings.sketch) | {"objective": "size"}  # nothing need be timed to tell
            plan = plan_sketch(normal, **_without_head(normal, options))
        except (NoTargetError, SelectorError):
            return
    if plan.sketched:
        name, more = plan.sketched[0].name or "its layer", len(plan.sketched) - 1
        raise BackendError(
            f"the model is dense and gradients are on, so that {name}{f' and {more} more' if more else ''} "
            "cannot be sketched while it is compiled: to train, call panther_compile.sketchify(model) first "
            "and compile its result; to infer, call the compiled model under torch.no_grad(), with nothing "
            "inside that turns gradients on"
        )


def _turns_gradients_on(graph_module: fx.GraphModule) -> bool:
    """Whether the model does so itself, under the `no_grad` of its caller."""
    return any(
        node.op == "call_function"
        and node.target in _TURN_GRADIENTS_ON
        and node.args[0] is _TURN_GRADIENTS_ON[node.target]
        for node in graph_module.graph.nodes
    )


def _holds_sketched_layers(graph: fx.Graph) -> bool:
    """Whether a node was recorded inside the forward of a sketched layer."""
    return any(
        _is_sketched_kind(kind)
        for node in graph.nodes
        for _, kind in (node.meta.get("nn_module_stack") or {}).values()
    )


def _is_sketched_kind(kind: object) -> bool:
    """Whether a class, or the full name that `torch.export` notes of it, is that of a sketched layer."""
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and issubclass(kind, SketchedLayer)


def _is_sketched(model: nn.Module) -> bool:
    """Whether a model holds sketched layers, as modules or in the graph of a part that was exported."""
    graphs = (getattr(module, "graph", None) for module in model.modules())
    exported = any(isinstance(graph, fx.Graph) and _holds_sketched_layers(graph) for graph in graphs)
    return exported or any(outermost(model))


def _is_called_by_sketched_model() -> bool:
    """Whether the model given to `torch.compile`, whose call is being compiled now, holds sketched layers.

    Dynamo gives a backend the graph alone; the model is found among the callers.
    """
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, OptimizedModule):
            return _is_sketched(caller._orig_mod)
        if isinstance(caller, nn.Module) and caller._compiled_call_impl is not None:  # model.compile()
            return _is_sketched(caller)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _without_meta(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph, with layouts and origins; what else Dynamo noted keeps fake tensors and more alive."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        node.meta = {"layout": layout_of(node), "nn_module_stack": node.meta.get("nn_module_stack")}
    return fx.GraphModule(graph_module, graph)
