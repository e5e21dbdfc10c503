"""Find what can be sketched in an ONNX graph, and say of everything else why it is left alone.

A site is a constant that nodes read as their weight, of the operators that kinds of layers compute
(`Kind.onnx`); several nodes, in subgraphs too, may read it. To the kind it is the weight of a layer:

    right   y = x M      M (I, O) is the constant, transposed or not         Linear weight Mᵀ
    left    y = M x      M (O, I)                                            Linear weight M
    conv    Conv(x, W)   W (O, I/G, kh, kw)                                  Conv2d weight W
    table   Gather(W, x) W (V, D), whose rows x names                       Embedding weight W
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.values import check_values
from panther_compile.kinds.base import Kind, OnnxForm
from panther_compile.kinds.registry import find_onnx_kinds, onnx_operators
from panther_compile.onnx.files import WEIGHTS_APART
from panther_compile.onnx.patterns import (
    RUNTIME,
    factored_weights,
    feeds_output,
    fixed_tensor,
    holds_graph,
    is_onnx,
)
from panther_compile.planning.selection import (
    HEAD,
    Selectable,
    check_selectors,
    is_picked,
    why_not_selected,
    why_too_small,
)
from panther_compile.planning.sites import Found
from panther_compile.records import LayerPlan, Site

RECURRENT = ("LSTM", "GRU", "RNN")
QUANTIZED = (
    *("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "MatMulNBits", "QGemm", "MatMulBnb4"),
    *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QAttention"),
)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Use:
    """One node that reads a weight.

    Attributes:
        node: of an operator that a kind computes.
        index: which of its inputs the weight is: 0 left, 1 right.
        transposed: whether M is the constant's transpose, by a Transpose node or by transA, transB.
    """

    node: ir.Node
    index: int
    transposed: bool

    @property
    def is_conv(self) -> bool:
        """Whether the weight is a kernel."""
        return self.node.op_type in onnx_operators(flat=False)

    @property
    def is_table(self) -> bool:
        """Whether rows of the weight are looked up."""
        return self.node.op_type in onnx_operators(tables=True)

    @property
    def linear_is_transposed(self) -> bool:
        """Whether the weight of the linear layer, (O, I), is the transpose of the constant."""
        return not self.is_conv and self.transposed == (self.index == 0)


@dataclass(frozen=True, slots=True)
class OnnxWeight:
    """A constant and the nodes that read it as a weight."""

    name: str
    value: ir.Value
    tensor: ir.TensorProtocol
    uses: tuple[Use, ...]

    @property
    def kind(self) -> str:
        """What reads it, as the report shows it."""
        return self.uses[0].node.op_type

    @property
    def names(self) -> tuple[str, ...]:
        """All that a selector may match: the constant, the layer it belongs to, and the nodes."""
        nodes = (use.node.name for use in self.uses if use.node.name)
        return tuple(
            dict.fromkeys((self.name, self.name.removesuffix(".weight"), self.value.name or "", *nodes))
        )


@dataclass(frozen=True, slots=True)
class OnnxFound:
    """The sites of a graph as `make_plan` takes them, and the weight behind each, by name."""

    found: Found
    weights: Mapping[str, OnnxWeight]


def find_onnx_sites(model: ir.Model, config: SketchConfig) -> OnnxFound:
    """Match every node of the graph that a kind computes, subgraphs included.

    Raises:
        SelectorError: a selector matches no weight that could be sketched.
        WeightError: a weight holds NaN or Inf.
    """
    weights = list(constant_weights(model))
    check_selectors(config, [_selectable(one) for one in weights], "weights")
    head, factored = _output_head(weights), factored_weights(model)
    sites: list[tuple[Site, Kind]] = []
    skipped: list[LayerPlan] = []
    for weight in weights:
        owner = _owner(weight)
        reason = why_not_selected(_selectable(weight), config) or _unsafe(weight, model) or _unusual(weight)
        if reason is None and not is_picked(config.include, _selectable(weight)):
            if weight is head:
                reason = HEAD
            elif owner.unless_included is not None:
                reason = owner.unless_included
            elif weight.value in factored:
                reason = "already factored: its product feeds another one, and is narrower than both ends"
        module: nn.Module | str = reason or _as_module(weight, _form(owner))
        if isinstance(module, nn.Module):
            reason = owner.why_not(module) or why_too_small(weight.tensor.size, config)
        else:
            reason = module
        if isinstance(module, str) or reason:
            skipped.append(_stays_dense(weight.name, weight.kind, weight.tensor, reason or ""))
        else:
            sites.append((Site(weight.name, module, weight.kind, (), weight.names[1:]), owner))
    skipped.extend(_other_lines(model))
    order = tuple(weight.name for weight in weights) + tuple(line.name for line in skipped)
    by_name = {weight.name: weight for weight in weights}
    return OnnxFound(Found(tuple(sites), tuple(skipped), tuple(dict.fromkeys(order))), by_name)


def torch_dtype(tensor: ir.TensorProtocol) -> torch.dtype:
    """What torch calls the type of an ONNX tensor."""
    return ir.tensor_adapters.to_torch_dtype(ir.DataType(tensor.dtype))


def to_torch(tensor: ir.TensorProtocol) -> Tensor:
    """A copy of an ONNX tensor, any dtype that torch has."""
    dtype = torch_dtype(tensor)
    if 0 in _shape(tensor):
        return torch.empty(_shape(tensor), dtype=dtype)
    return torch.frombuffer(bytearray(tensor.tobytes()), dtype=dtype).reshape(_shape(tensor))


def multiplies_by_matrix(node: ir.Node) -> bool:
    """Whether a MatMul or Gemm multiplies rows of its input by a constant matrix."""
    tensor = fixed_tensor(node.inputs[1])
    return tensor is not None and len(tensor.shape) == 2 and node.attributes.get_int("transA", 0) == 0


def matrix_of(node: ir.Node) -> Tensor:
    """A copy of the matrix (I, O) of such a node."""
    value = node.inputs[1]
    assert value is not None
    matrix = to_torch(ir.convenience.get_const_tensor(value))  # type: ignore[arg-type]
    return matrix.t() if node.attributes.get_int("transB", 0) else matrix


def constant_weights(model: ir.Model) -> Iterator[OnnxWeight]:
    """Every constant that is a weight somewhere: of products, then tables, each in the order of first use."""
    uses: dict[ir.Value, list[Use]] = {}
    for node in model.graph.all_nodes():
        if is_onnx(node, *onnx_operators()):
            for value, use in _constant_operands(node):
                uses.setdefault(value, []).append(use)
    for node in model.graph.all_nodes():
        if is_onnx(node, *onnx_operators(tables=True)) and _is_look_up(node):
            use, table = Use(node, 0, False), node.inputs[0]
            assert table is not None
            others = uses.setdefault(table, [])
            if all(one.is_table for one in others):  # else it is of a product that may not take it away
                others.append(use)
    names: set[str] = set()
    for value, found in uses.items():
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        name = unique_name(_name(value, found[0].node), names)  # two branches of an If may use one name
        yield OnnxWeight(name, value, tensor, tuple(found))


def _name(value: ir.Value, node: ir.Node) -> str:
    """The constant's own name; where torch folded a parameter into a nameless one, the parameter's."""
    name = value.name or "weight"
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes is None or not name.startswith("val_"):
        return name
    _, *modules, _ = ast.literal_eval(scopes)  # the model itself, modules within modules, the operation
    return f"{modules[-1]}.weight" if modules else name


def unique_name(name: str, taken: set[str]) -> str:
    """The name, or with the first number that makes it unique; adds it to those taken."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def _is_look_up(node: ir.Node) -> bool:
    """Whether a node gathers rows of a constant matrix of fractions by what is computed."""
    table, rows = node.inputs[:2]
    tensor = None if table is None else ir.convenience.get_const_tensor(table)
    if tensor is None or tensor.dtype not in _FLOATS or len(_shape(tensor)) != 2:
        return False
    return node.attributes.get_int("axis", 0) in (0, -2) and _is_computed(rows)


def _constant_operands(node: ir.Node) -> list[tuple[ir.Value, Use]]:
    """The weight of a node; none if both or neither of its operands are constants."""
    found = []
    for index in (1,) if node.op_type in onnx_operators(flat=False) else (0, 1):
        value, transposed = _through_transpose(node.inputs[index])
        if value is not None and ir.convenience.get_const_tensor(value) is not None:
            if node.op_type == "Gemm":
                transposed ^= bool(node.attributes.get_int("transB" if index else "transA", 0))
            found.append((value, Use(node, index, transposed)))
    return found if len(found) == 1 else []


def _through_transpose(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """What a value is the transpose of, and whether it is one."""
    transposed = False
    while value is not None and (node := value.producer()) is not None and is_onnx(node, "Transpose"):
        if list(node.attributes.get_ints("perm", [1, 0])) != [1, 0]:
            break
        value, transposed = node.inputs[0], not transposed
    return value, transposed


def _unsafe(weight: OnnxWeight, model: ir.Model) -> str | None:
    """Why the constant cannot be taken away, or None."""
    value = weight.value
    if value.is_graph_input():
        old = model.ir_version < WEIGHTS_APART
        return "IR version below 4: every weight is a graph input" if old else "its weight is a graph input"
    nodes = {use.node for use in weight.uses}
    for reader in (value, *_transposes_of(value)):
        if reader.is_graph_output():
            return "its weight is a graph output"
        for node, index in reader.uses():
            is_weight = any(use.node is node and use.index == index for use in weight.uses)
            if not is_weight and not (is_onnx(node, "Transpose") and _leads_to(node.outputs[0], nodes)):
                return f"its weight is also read by {node.op_type} {node.name or ''}".rstrip()
    if len({(use.is_conv, use.index, use.transposed, _geometry(use.node)) for use in weight.uses}) > 1:
        ways = "transposed, on the other side, by another operator, or with other strides"
        return f"its weight is used in several ways ({ways})"
    return None


def _transposes_of(value: ir.Value) -> Iterator[ir.Value]:
    for node in value.consumers():
        if is_onnx(node, "Transpose"):
            yield node.outputs[0]
            yield from _transposes_of(node.outputs[0])


def _leads_to(value: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether one of the nodes reads a value, or what Transpose nodes make of it."""
    return any(not nodes.isdisjoint(one.consumers()) for one in (value, *_transposes_of(value)))


def _geometry(node: ir.Node) -> tuple[object, ...]:
    """What the plan for a kernel depends on besides its weight."""
    if node.op_type not in onnx_operators(flat=False) or node.inputs[1] is None:
        return ()
    axes = len(node.inputs[1].shape or ()) - 2
    strides, dilations = (tuple(node.attributes.get_ints(n, [1] * axes)) for n in ("strides", "dilations"))
    return node.op_type, node.attributes.get_int("group", 1), strides, dilations


def _unusual(weight: OnnxWeight) -> str | None:
    """Why no layer of torch stands for the weight, or None."""
    tensor, use = weight.tensor, weight.uses[0]
    shape = _shape(tensor)
    if tensor.dtype not in _FLOATS:
        return f"its weight is {tensor.dtype.name}, wanted a floating dtype"
    if 0 in shape:
        return "empty: its weight holds no numbers"
    forms = [_form(kind) for kind in find_onnx_kinds(use.node.op_type)]
    if len(shape) not in [form.dims for form in forms]:
        wanted = " or ".join(form.wanted for form in forms)
        return f"its weight has {len(shape)} dimensions, wanted {wanted}"
    if use.node.op_type == "MatMul" and use.index == 0:
        data = use.node.inputs[1]
        if data is None or data.shape is None or len(data.shape) < 2:
            return "its weight is the left operand of a product with what may be a vector"
    return None


def _owner(weight: OnnxWeight) -> Kind:
    """The kind that computes the weight's nodes; of a weight of unknown dimensions the first one."""
    kinds, dims = find_onnx_kinds(weight.kind), len(_shape(weight.tensor))
    return next((kind for kind in kinds if _form(kind).dims == dims), kinds[0])


def _form(kind: Kind) -> OnnxForm:
    assert kind.onnx is not None
    return kind.onnx


def _as_module(weight: OnnxWeight, form: OnnxForm) -> nn.Module | str:
    tensor, use = to_torch(weight.tensor), weight.uses[0]
    check_values(tensor, weight.name)
    tensor = tensor.t() if use.linear_is_transposed else tensor
    return form.build(tensor, {name: attribute.value for name, attribute in use.node.attributes.items()})


def _selectable(weight: OnnxWeight) -> Selectable:
    return _example(_owner(weight)), weight.names


def _example(kind: Kind) -> nn.Module:
    """What a selector by type or function sees before the weight itself is read."""
    form = _form(kind)
    layer = form.build(torch.empty((1,) * form.dims, device="meta"), {})
    assert isinstance(layer, nn.Module)
    return layer


def _output_head(weights: list[OnnxWeight]) -> OnnxWeight | None:
    """The last matrix, if there are others, it is not square, and what it computes is an output."""
    matrices = [one for one in weights if not one.uses[0].is_conv and not one.uses[0].is_table]
    if len(matrices) < 2:
        return None
    last = matrices[-1]
    shape = _shape(last.tensor)
    is_output = any(feeds_output(use.node.outputs[0]) for use in last.uses)
    return last if is_output and len(shape) == 2 and shape[0] != shape[1] else None


def _other_lines(model: ir.Model) -> Iterator[LayerPlan]:
    """Products whose weight is no plain constant, and those inside functions."""
    for node in model.graph.all_nodes():
        name = node.name or (node.outputs[0].name if node.outputs else None) or node.op_type
        if node.op_type in RECURRENT:
            reason = "recurrent: its node takes matrices whole; sketchify in torch with include=, then export"
            yield LayerPlan(name, node.op_type, (), 0, None, reason)
        elif node.op_type in QUANTIZED:
            yield LayerPlan(name, node.op_type, (), 0, None, "quantized")
        elif (foreign := _foreign(node, model)) is not None and (held := _matrix_in(node)) is not None:
            yield _stays_dense(name, node.op_type, held, foreign)
        elif is_onnx(node, *onnx_operators()) and not _constant_operands(node):
            for value in node.inputs[:2]:
                maker = None if value is None else value.producer()
                several = _gathered_from(maker)
                if several is not None:
                    reason = "its matrices are gathered by row, as experts: sketch the model, then export it"
                    yield _stays_dense(name, node.op_type, several, reason)
                    break
                if maker is None or (makers := _makers_of_constants(value)) is None:
                    continue
                reason = f"its weight is made by {maker.op_type}"
                if any(is_onnx(one, "DequantizeLinear") for one in makers):
                    reason = "quantized: DequantizeLinear makes its weight"
                yield LayerPlan(name, node.op_type, (), 0, None, reason)
                break
    for function in model.functions.values():
        for node in function:
            if is_onnx(node, *onnx_operators()):
                name = f"{function.name}/{node.name or node.op_type}"
                reason = f"inside the function {function.name}: onnx.inliner takes it out of there"
                yield LayerPlan(name, node.op_type, (), 0, None, reason)


def _foreign(node: ir.Node, model: ir.Model) -> str | None:
    """Why no kind computes a node that may multiply by a matrix all the same; None of other nodes."""
    if is_onnx(node, "Einsum"):
        return "of an Einsum, wanted MatMul, Gemm or Conv"
    if node.domain in ("", "ai.onnx", "ai.onnx.ml") or node.op_identifier() in model.functions:
        return None
    reason = f"of an operator of {node.domain}, wanted those of ONNX"
    return f"{reason}: sketch the file it was made of" if node.domain.startswith(RUNTIME) else reason


def _matrix_in(node: ir.Node) -> ir.TensorProtocol | None:
    """The largest constant of fractions and of two dimensions or more that a node reads."""
    constants = [ir.convenience.get_const_tensor(one) for one in node.inputs if one is not None]
    held = [one for one in constants if one is not None and one.dtype in _FLOATS and len(_shape(one)) > 1]
    return max(held, key=lambda one: one.size, default=None)


def _makers_of_constants(value: ir.Value | None) -> set[ir.Node] | None:
    """The nodes that make a value, if they do it of constants alone; else None."""
    found: set[ir.Node] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if one is None or not _is_computed(one):
            continue
        maker = one.producer()
        if maker is None or not maker.inputs or holds_graph(maker):
            return None
        if maker not in found:
            found.add(maker)
            pending.extend(maker.inputs)
    return found


def _gathered_from(maker: ir.Node | None) -> ir.TensorProtocol | None:
    """The constant of several matrices that a node gathers some of; None of other nodes."""
    if maker is None or not is_onnx(maker, "Gather", "GatherND") or maker.inputs[0] is None:
        return None
    tensor = ir.convenience.get_const_tensor(maker.inputs[0])
    return tensor if tensor is not None and len(_shape(tensor)) == 3 else None


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is None


def _stays_dense(name: str, kind: str, tensor: ir.TensorProtocol, reason: str) -> LayerPlan:
    return LayerPlan(name, kind, _shape(tensor), tensor.size, None, reason)


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]
