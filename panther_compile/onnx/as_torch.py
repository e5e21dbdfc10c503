"""An ONNX graph as a module of torch, whose weights that are to be sketched are layers.

So data make of a file what they make of a model in torch: gradients tell what its outputs mind, and layers
are fitted in lockstep. A graph is run by torch if all its operators are known (`torch_ops.py`), and it gives
what ONNX Runtime gives. Half types are float32 here, in which gradients neither vanish nor take their time.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.onnx.branches import seen_graphs
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.lowering import bias_of
from panther_compile.onnx.output_parts import in_parts, parts_of
from panther_compile.onnx.patterns import RUNTIME, is_onnx
from panther_compile.onnx.sites import OnnxWeight, to_torch
from panther_compile.onnx.torch_cells import UnknownOperatorError
from panther_compile.onnx.torch_ops import OPERATORS, Operator, widened, with_added
from panther_compile.onnx.torch_runtime import RUNTIME_OPERATORS
from panther_compile.onnx.torch_windows import cropped, window_pads
from panther_compile.onnx.verify import MASK

_TYPES = {
    *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.BOOL),
    *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8),
}
_SAME_NUMBERS = ("Reshape", "Cast", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Flatten")
_TOLERANCE = 1e-3  # of an output, over its largest magnitude
_TOLERANCE_IN_HALVES = 2e-2
_FEWEST = 16  # samples that tell the mean of an output
_ROUNDING = 5e-7  # of functions into [0, 1], in float32
_HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ERRORS = (UnknownOperatorError, RuntimeError, ValueError, IndexError, TypeError, KeyError)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node that is run.

    Attributes:
        node: of the graph, or of a branch.
        given: its attributes, and how many outputs it has.
        freed: what it or a node before it made, and nothing reads any more.
    """

    node: ir.Node
    given: Mapping[str, Any]
    freed: list[ir.Value]


def _steps(graph: ir.Graph) -> list[_Step]:
    """The nodes of a graph, or of a branch, in their order."""
    nodes = [node for node in graph if not is_onnx(node, "Constant")]
    last = {value: place for place, node in enumerate(nodes) for value in node.outputs}
    last |= {value: place for place, node in enumerate(nodes) for value in _read(node)}
    steps = [_Step(node, _given(node), []) for node in nodes]
    own, kept = set(nodes), set(graph.outputs)
    for value, place in last.items():
        if value.producer() in own and value not in kept:
            steps[place].freed.append(value)
    return steps


def _given(node: ir.Node) -> dict[str, Any]:
    return {name: one.value for name, one in node.attributes.items()} | {"outputs": len(node.outputs)}


class _Program:
    """What is run, in which order; copies of a module share it.

    Attributes:
        graph: of the model.
        opset: its version.
        steps: of the graph, and of each branch in it.
        uses: which of the layers, and which use of its weight, a node is.
        held: names of the parameters that hold constants.
        shown: what is told of a run, by name: the outputs, and what those that are choices were chosen by.
        parts: of the outputs that have several; a module gives these in place of the whole.
        has_halves: whether ONNX Runtime computes some of it in a half type.
    """

    def __init__(self, model: ir.Model, weights: Sequence[OnnxWeight]) -> None:
        self.graph, self.opset = model.graph, model.opset_imports.get("", 1)
        self.steps = {graph: _steps(graph) for graph in seen_graphs(model)}
        self.uses = {use.node: (place, use) for place, one in enumerate(weights) for use in one.uses}
        self.held: dict[ir.Value, str] = {}
        self.shown = {str(one.name): one for one in model.graph.outputs}
        chosen = ((one, _chosen_by(one)) for one in model.graph.outputs)
        self.shown |= {f"{one.name}/by": by for one, by in chosen if by is not None}
        self.parts = parts_of(model)
        types = [one.dtype for one in model.graph.inputs] + [one.tensor.dtype for one in weights]
        self.has_halves = any(one in _HALF_TYPES for one in types)
        for graph, steps in self.steps.items():
            for node in (step.node for step in steps):
                if _operator(node) is None and not is_onnx(node, "If"):
                    raise UnknownOperatorError(f"{node.domain or 'ONNX'} {node.op_type} is not known here")
                layers = self.uses.get(node)
                for index, value in enumerate(node.inputs):
                    if value is not None and (layers is None or index != layers[1].index):
                        self._hold(value)
            for value in graph.outputs:
                self._hold(value)
        for step in self.steps[self.graph]:
            step.freed[:] = [value for value in step.freed if value not in self.shown.values()]

    def __deepcopy__(self, memo: Any) -> "_Program":
        return self

    def _hold(self, value: ir.Value) -> None:
        tensor = None if value in self.held else ir.convenience.get_const_tensor(value)
        if tensor is not None:
            self.held[value] = f"held_{len(self.held)}"
            self.has_halves |= tensor.dtype in _HALF_TYPES


class OnnxModule(nn.Module):
    """Runs a graph, and the branches in it that are taken; one without loops and functions.

    Args:
        model: is left as it is.
        layers: what computes the products with a weight, its bias being zero, by the weight.

    Raises:
        UnknownOperatorError: an operator is not known here.
    """

    def __init__(self, model: ir.Model, layers: Sequence[tuple[OnnxWeight, nn.Module]]) -> None:
        super().__init__()
        self._program = _Program(model, [weight for weight, _ in layers])
        self.layers = nn.ModuleList(layer for _, layer in layers)
        for value, name in self._program.held.items():
            tensor = ir.convenience.get_const_tensor(value)
            assert tensor is not None
            if tensor.dtype not in _TYPES:
                raise UnknownOperatorError(f"{value.name} is of dtype {tensor.dtype.name}, which torch lacks")
            # A parameter, not a buffer: copies of the module share parameters, and copy buffers.
            self.register_parameter(name, nn.Parameter(widened(to_torch(tensor)), requires_grad=False))
        self._centres: dict[str, str] = {}

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """See `_Program.shown`; chances as their logarithms, and outputs in their parts, see `centre`."""
        found = in_parts(self.whole(**inputs), self._program.parts)
        for name, held in self._centres.items():
            found[name] = found[name] - getattr(self, held)
        return found

    @property
    def has_halves(self) -> bool:
        """Whether ONNX Runtime computes some of it in a half type."""
        return self._program.has_halves

    def centre(self, feeds: Sequence[Feed]) -> None:
        """Have parts that are no chances given about their means, as boxes are mostly where they look.

        Those of too few samples to know the means of, or of sizes that differ, stay as they are.
        """
        for output, parts in self._program.parts.items():
            with torch.no_grad():
                wholes = [self.whole(**as_tensors(feed))[output] for feed in feeds]
            if len({one.shape[1:] for one in wholes}) > 1 or sum(map(len, wholes)) < _FEWEST:
                continue
            mean = torch.cat(wholes).mean(0, keepdim=True)
            for part in parts:
                if not part.is_chance and bool(mean.isfinite().all()):
                    name = part.name(output)
                    self._centres[name] = f"centre_{len(self._centres)}"
                    own = nn.Parameter(part.of(mean).clone(), requires_grad=False)
                    self.register_parameter(self._centres[name], own)

    def whole(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The same, each output whole."""
        program = self._program
        values: dict[ir.Value, Any] = {value: getattr(self, name) for value, name in program.held.items()}
        values |= {
            one: inputs[name] for one in program.graph.inputs if (name := _argument(one.name)) in inputs
        }
        self._run_all(program.graph, values)
        return {name: self.as_logits(one, values[one]) for name, one in program.shown.items()}

    def _run_all(self, graph: ir.Graph, values: dict[ir.Value, Any]) -> None:
        """Run the nodes of a graph, and put what they make beside what is known."""
        for step in self._program.steps[graph]:
            found = self._branch(step, values) if step.node.op_type == "If" else self._run(step, values)
            made = found if isinstance(found, tuple | list) else (found,)
            values.update(zip(step.node.outputs, made, strict=False))
            for value in step.freed:
                values.pop(value, None)

    def _branch(self, step: _Step, values: dict[ir.Value, Any]) -> list[Any]:
        """What the branch of an If gives that is taken."""
        (condition,) = step.node.inputs
        branch = step.given["then_branch" if bool(values[condition]) else "else_branch"]  # type: ignore[index]
        self._run_all(branch, values)
        return [values[one] for one in branch.outputs]

    def _run(self, step: _Step, values: Mapping[ir.Value, Any]) -> Any:
        node, attributes = step.node, step.given
        if node not in self._program.uses:
            inputs = [None if one is None else values[one] for one in node.inputs]
            operator = _operator(node)
            assert operator is not None
            return operator(inputs, attributes, self._program.opset)
        place, use = self._program.uses[node]
        layer, x = self.layers[place], values[node.inputs[1 - use.index]]  # type: ignore[index]
        if use.is_table:
            return layer(x)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        added = None if bias is None else values[bias]
        if not use.is_conv:
            flipped = bool(attributes.get("transA" if use.index else "transB", 0)) and node.op_type == "Gemm"
            x = x.transpose(-1, -2) if flipped == (use.index == 1) else x
            product = layer(x)
            product = product if use.index else product.transpose(-1, -2)
            return with_added(product, added, attributes)
        if node.op_type == "Conv":
            x = F.pad(x, window_pads(x, layer.kernel_size, attributes))  # type: ignore[arg-type]
        product = layer(x)
        if node.op_type == "ConvTranspose":
            product = cropped(product, x, attributes)
        return product if added is None else product + added.reshape(-1, *[1] * (x.dim() - 2))

    def as_logits(self, value: ir.Value, found: Any) -> Any:
        """An output as the module gives it: chances as their logarithms."""
        return found.clamp_min(torch.finfo(found.dtype).tiny).log() if _are_chances(value) else found


def _operator(node: ir.Node) -> Operator | None:
    """What a node does, if it is known here."""
    if node.domain == RUNTIME:
        return RUNTIME_OPERATORS.get(node.op_type)
    return OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def _are_chances(value: ir.Value) -> bool:
    maker = value.producer()
    return maker is not None and is_onnx(maker, "Softmax")


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, and what the branches in it do."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            branch = attribute.as_graph()
            yield from branch.outputs
            for inner in branch:
                yield from _read(inner)


def _chosen_by(value: ir.Value | None) -> ir.Value | None:
    """What an ArgMax behind a value chooses by, as of readers of text; None if there is none."""
    while value is not None and (node := value.producer()) is not None:
        if is_onnx(node, "ArgMax"):
            return node.inputs[0]
        value = node.inputs[0] if is_onnx(node, *_SAME_NUMBERS) else None
    return None


def layer_of(weight: OnnxWeight, dense: nn.Module) -> nn.Module:
    """A layer with a weight of the graph, and a bias of zeros if all nodes that read the weight have one.

    Args:
        weight: of the graph.
        dense: the layer that stands for it, without a bias.
    """
    layer = copy.copy(dense)
    layer._parameters = dict(dense._parameters)
    wide = widened(dense.weight)  # type: ignore[arg-type]
    if wide is not dense.weight:
        layer.weight = nn.Parameter(wide.detach(), requires_grad=False)
    if weight.uses[0].is_table:
        return layer
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(outputs, int)
    if all(bias_of(use, outputs) is not None for use in weight.uses):
        layer.bias = nn.Parameter(wide.new_zeros(outputs), requires_grad=False)  # type: ignore[operator]
    return layer


def as_tensors(feed: Feed) -> dict[str, Tensor]:
    """The arrays of a batch as the module takes them."""
    return {_argument(name): widened(torch.from_numpy(array)) for name, array in feed.items()}


def runs(module: OnnxModule, inputs: Mapping[str, Tensor]) -> bool:
    """Whether torch runs the graph on inputs, of sizes that the data do not have."""
    try:
        with torch.no_grad():
            module(**inputs)
    except _ERRORS:
        return False
    return True


def _argument(name: str | None) -> str:
    """What an input is called; of masks the one that says what counts in a file has its own name."""
    return MASK if name == MASK else f"input {name}"


def runs_alike(module: OnnxModule, model: ir.Model, dense: ObservedModel, feed: Feed) -> bool:
    """Whether torch runs a batch, and gives what ONNX Runtime does.

    Raises:
        UnknownOperatorError: a use of an operator is not known here.
    """
    wanted = next(dense.run([feed], dense.outputs))
    try:
        with torch.no_grad():
            found = module.whole(**as_tensors(feed))
    except UnknownOperatorError:
        raise
    except _ERRORS:  # of an operator that does something else here, whatever comes of that
        return False
    return all(
        _is_near(module, one, found[str(one.name)], torch.from_numpy(wanted[str(one.name)]))
        for one in model.graph.outputs
    )


def _is_near(module: OnnxModule, value: ir.Value, found: Tensor, wanted: Tensor) -> bool:
    if widened(wanted) is not wanted and _are_chances(value):
        found = found.exp()  # small chances are 0 there
    else:
        wanted = module.as_logits(value, wanted)
    wanted = widened(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    finite = wanted.isfinite()
    largest = float(wanted[finite].abs().max()) if bool(finite.any()) else 0.0
    share = _TOLERANCE_IN_HALVES if module.has_halves else _TOLERANCE
    maker = value.producer()
    # Where all chances are small, their rounding is that of 1.
    least = _ROUNDING if maker is not None and is_onnx(maker, "Sigmoid") else 0.0
    return bool(((found - wanted)[finite].abs() <= share * largest + least).all())
