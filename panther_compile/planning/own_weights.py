"""Weights that a module's own forward multiplies by, lifted to layers that can be sketched, and lowered back.

Before:
    experts: Llama4TextExperts      gate_up_proj: Parameter (E, H, 2 F)
    conv_in: WanCausalConv3d        weight: Parameter (O, I, 3, 3, 3), bias: Parameter (O,)
    embed: GemmaScaledWordEmbedding weight: Parameter (V, D)
    query: whisper.model.Linear     weight: Parameter (O, I), bias: Parameter (O,)
    lin: torch_geometric.nn.Linear  weight: Parameter (O, I), bias: Parameter (O,)
    pooled: OneOfYours              w: Parameter (I, O)
After, exact:
    experts: Llama4TextExperts      gate_up_proj: Matrices(Linear(H, 2 F), ...)
    conv_in: WanCausalConv3d        weight: Kernel(Conv3d(I, O, 3))
    embed: GemmaScaledWordEmbedding weight: Table(Embedding(V, D))
    query: whisper.model.Linear     weight: Matrix(Linear(I, O))
    lin: torch_geometric.nn.Linear  weight: Matrix(Linear(I, O))
    pooled: OneOfYours              w: Matrix(Linear(I, O))

The modules keep their class and their forward, whose text says what it does with the parameters
(`kinds/stack_uses.py`, `kinds/conv_uses.py`, `kinds/table_uses.py`); what is used otherwise stays as it is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx, nn
from torch.nn.utils import parametrize

from panther_compile.errors import ConfigTypeError
from panther_compile.kinds.conv_uses import convolution_called
from panther_compile.kinds.match import calls_linear, is_adapter, why_not_tensor
from panther_compile.kinds.registry import find_kind
from panther_compile.kinds.saving import saves_as_module
from panther_compile.kinds.stack_uses import matrices_of, stacks_of
from panther_compile.kinds.table_uses import reads_rows
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.own_weights import Kernel, Lifted, Matrices, Matrix, OwnWeight, Table
from panther_compile.models.substitute import copied
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.planning.trace import clone_structure

_INITIALIZED = "_is_hf_initialized"  # what transformers asks before it draws initial values


def lifted(model: nn.Module) -> nn.Module:
    """The model, or where there is something to lift a copy that shares its tensors.

    Of a graph functional calls are lifted, see `lift_functional`. Of another model that cannot be copied
    nothing is.

    Raises:
        ConfigTypeError: a graph cannot be copied.
    """
    if isinstance(model, fx.GraphModule):
        graph = copied(clone_structure, model)
        lift_functional(graph)  # type: ignore[arg-type]
        return graph
    if next(_own_weights(model), None) is None:
        return model
    try:
        clone = copied(clone_structure, model)
    except ConfigTypeError:  # then inplace=True is all that can be asked for, which needs no copy
        return model
    lift_own_weights(clone)
    return clone


def lift_in_place(model: nn.Module, layers: Iterable[str]) -> None:
    """Lift in the model itself what `lifted` lifts.

    Args:
        model: is changed.
        layers: names of those layers in `lifted(model)` that are to be replaced.
    """
    if isinstance(model, fx.GraphModule):
        lift_functional(model)
    else:
        lift_own_weights(model, {name.rpartition(".")[0] for name in layers})


def lift_own_weights(model: nn.Module, only: Iterable[str] | None = None) -> None:
    """Put layers in the place of parameters, in the model itself.

    Args:
        model: is changed.
        only: names of parameters; None for all that can be lifted.
    """
    wanted = None if only is None else set(only)
    orders: dict[nn.Module, tuple[str, ...]] = {}
    for module, prefix, name, layer in list(_own_weights(model)):
        if wanted is None or f"{prefix}{name}" in wanted:
            layer.order = orders.setdefault(module, _order(module))
            # Buffers that are not saved get their values where transformers draws initial ones.
            layer.marks = _INITIALIZED not in vars(module) and not module._non_persistent_buffers_set
            layer.train(module.training)
            del module._parameters[name]
            module._modules[name] = layer
            setattr(layer, _INITIALIZED, True)
            if layer.marks:
                setattr(module, _INITIALIZED, True)


def lifted_tensors(model: nn.Module) -> dict[str, Lifted]:
    """The tensors of layers that stand for parameters, by name, none of them sketched yet."""
    found: dict[str, Lifted] = {}
    for name, module in model.named_modules():
        if isinstance(module, OwnWeight):
            found |= module.tensors(name)
    return found


def lower_own_weights(model: nn.Module) -> None:
    """Put a parameter back, in the model itself, wherever none of its layers was sketched."""
    for module in list(model.modules()):
        for name, layer in list(module._modules.items()):
            if not isinstance(layer, OwnWeight):
                continue
            dense = layer.dense()
            if dense is None:
                layer.stay_in(module)
            else:
                del module._modules[name]
                own = module._parameters | {name: dense}
                module._parameters = {one: own[one] for one in (*layer.order, *own) if one in own}
                left = next((one for one in module._modules.values() if isinstance(one, OwnWeight)), None)
                if layer.marks and left is not None:
                    left.marks = True
                elif layer.marks:
                    del vars(module)[_INITIALIZED]


def _own_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, OwnWeight]]:
    """Modules with their name, and of each parameter that can be lifted its name and the layers for it."""
    held = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, SketchedLayer | OwnWeight) or is_adapter(module):
            inside.update(module.modules())
            continue
        base, linear, table = convolution_called(module), calls_linear(module), reads_rows(module)
        stacks, matrices = stacks_of(module), {} if linear else matrices_of(module)
        uses = base, linear, table, stacks, matrices
        if not any(uses) or _is_changed(module) or not _is_left_alone(module):
            continue
        prefix = f"{name}." if name else ""
        if base and not _makes_words(model, module) and _may_lift(module, ("weight", "bias"), held):
            yield module, prefix, "weight", Kernel(module, base)
        if linear and _may_lift(module, ("weight", "bias"), held):
            bias = None if module._parameters.get("bias") is None else "bias"
            yield module, prefix, "weight", Matrix(module, "weight", transposed=False, bias=bias)
        if table and _may_lift(module, ("weight",), None):  # a head may have the weight too
            yield module, prefix, "weight", Table(module)  # type: ignore[arg-type]
        for stack, rows_first in stacks.items():
            if _may_lift(module, (stack,), held):
                parameter = module._parameters[stack]
                assert parameter is not None
                yield module, prefix, stack, Matrices(parameter, transposed=rows_first)
        for matrix, (rows_first, added) in matrices.items():
            if _may_lift(module, (matrix,), held):
                bias = added if added is not None and _may_lift(module, (added,), held) else None
                yield module, prefix, matrix, Matrix(module, matrix, transposed=rows_first, bias=bias)


def _is_changed(module: nn.Module) -> bool:
    """Whether there is more to a call of a module, or to its parameters, than its class says.

    Or whether the class saves something else in their place.
    """
    called = type(module).__call__ is not nn.Module.__call__  # type: ignore[comparison-overlap]
    replaced = called or "forward" in vars(module) or parametrize.is_parametrized(module)
    return replaced or bool(module._forward_pre_hooks) or not saves_as_module(module)


def _order(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module, those among them for which layers stand already."""
    orders = [one.order for one in module._modules.values() if isinstance(one, OwnWeight)]
    return orders[0] if orders else tuple(module._parameters)


def _makes_words(model: nn.Module, module: nn.Module) -> bool:
    """Whether a convolution is a head of one tap, as of CTC: heads are left alone."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    return words is not None and module.out_channels == words and set(module.kernel_size) == {1}  # type: ignore[arg-type]


def _is_left_alone(module: nn.Module) -> bool:
    """Whether no kind of layer takes the module as it is."""
    kind = find_kind(module)
    return kind is None or kind.why_not(module) is not None


def _may_lift(module: nn.Module, names: Iterable[str], held: Counter[int] | None) -> bool:
    """Whether parameters are plain ones, which nothing else holds; or may hold, if `held` is None."""
    parameters = {name: module._parameters.get(name) for name in names}
    return all(
        one is None or ((held is None or held[id(one)] == 1) and why_not_tensor(name, one) is None)
        for name, one in parameters.items()
    )
