"""What each node of a graph does: operations, bytes, what it keeps for the backward, what it writes.

The graph runs once on fake tensors, so that nothing is computed and a model without data (meta device) will
do; for real where a module kept whole looks at values. Every operation below a node is seen as it is
dispatched.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from panther_compile.errors import CaptureError, first_line
from panther_compile.factorization.cost import Product
from panther_compile.models.outputs import tensors_in
from panther_compile.partition.graph.capture import Captured, quiet
from panther_compile.partition.graph.measure import NodeByNode, buffers_kept
from panther_compile.partition.graph.narrowing import (
    is_narrowing,
    is_same_again,
    storage,
    storages,
    written_storages,
)
from panther_compile.partition.graph.reached import mark_unreached

T = TypeVar("T")

_SHAPE_READS = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "size",
    "dim",
    "numel",
    "ndimension",
    "element_size",
    "stride",
}
# Kinds of operations that take their time in different ways; "other" are sums, norms, copies and the like.
KINDS = (
    "product",
    "convolution",
    "grouped convolution",
    "attention",
    "pointwise",
    "random",
    "other",
    "view",
)
ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
# Of one dtype alone, which fake tensors do not mind.
_MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a node, as it was dispatched.

    Attributes:
        kind: of `KINDS`.
        macs: multiply-adds.
        bytes: read and written; 0 of a view.
        kept: bytes of its result, where selective checkpointing keeps it; None where it runs again.
        weight_bytes: of the bytes, those of parameters and buffers.
        result_bytes: of its result, where checkpointing within a budget may keep it.
    """

    kind: str
    macs: float
    bytes: float
    kept: int | None = None
    weight_bytes: float = 0.0
    result_bytes: int = 0


@dataclass
class Observed:
    """One node.

    Attributes:
        value: what it returned, a fake tensor or anything else.
        products: its operations without views; activations and weights in bytes.
        operations: the same with views, by kind.
        backward: operations of its backward; only of `observe_backward`.
        saved_bytes: kept for the backward, if no node before keeps it already.
        saves: storages kept for the backward -> bytes, also where a node before keeps them.
        gradients: inputs that a gradient flows to, vectors not counted; 0 if nothing is to differentiate.
        writes: storages that it writes in place.
        touches: storages of its inputs and outputs.
        fixed: whether it is a number that the example's shapes alone decide.
        share: devices that divide its work along a sequence; counted in all above but its value.
        result_share: devices that divide its value along a sequence.
        gathered_bytes: of keys and values that attention gathers from these devices.
        fp8: whether it is a product that runs in eight bits (`fp8.py`).
        keeps_fp8: whether what that reads is kept in eight bits.
    """

    value: Any = None
    products: list[Product] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    saved_bytes: int = 0
    saves: dict[int, int] = field(default_factory=dict)
    gradients: int = 0
    writes: frozenset[int] = frozenset()
    touches: frozenset[int] = frozenset()
    fixed: bool = False
    share: int = 1
    result_share: int = 1
    gathered_bytes: int = 0
    fp8: bool = False
    keeps_fp8: bool = False


def observe(captured: Captured) -> dict[fx.Node, Observed]:
    """Run the graph once and take notes."""

    def run(fake: FakeTensorMode | None) -> dict[fx.Node, Observed]:
        observer = _Observer(captured.graph_module, fake)
        keep = saved_tensors_hooks(observer.keep, lambda tensor: tensor)
        around = fake or nullcontext()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), around, keep, _Operations(observer):
            observer.run(*_inputs(captured, fake))
        mark_unreached(captured, {node: note.value for node, note in observer.notes.items()})
        return observer.notes

    return _run_on_fakes(captured, run, "the graph")


def _inputs(captured: Captured, fake: FakeTensorMode | None) -> list[Tensor]:
    return [value if fake is None else fake.from_tensor(value) for value in captured.example]


def _run_on_fakes(captured: Captured, run: Callable[[FakeTensorMode | None], T], what: str) -> T:
    """What a run on fake tensors gives, or one on the example where modules kept whole ask for values."""
    try:
        with quiet():
            return run(FakeTensorMode(allow_non_fake_inputs=True))
    # Modules kept whole run the user's code, which may raise anything where values are asked for.
    except Exception as error:
        if any(value.device.type == "meta" for value in captured.example):
            raise CaptureError(f"{what} does not run on the meta device: {first_line(error)}") from error
    try:
        with buffers_kept(captured.graph_module):
            return run(None)
    # The model's code runs here, on what the user gave it, and may raise anything.
    except Exception as error:
        raise CaptureError(
            f"{what}, read by {captured.route}, does not run on example_inputs: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


class _Observer(fx.Interpreter):
    """Runs the graph node by node; the notes of the current one are open for those who watch."""

    def __init__(self, graph_module: fx.GraphModule, fake: FakeTensorMode | None) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.notes: dict[fx.Node, Observed] = {}
        self.current = Observed()
        self.parameters = set[int]()
        self._fake = fake
        self._fetched: dict[int, Tensor] = {}
        self._kept = set[int]()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self.current = self.notes[n] = Observed()
        inputs = [self.env[node] for node in n.all_input_nodes]
        used = tensors_in(inputs)
        before = [tensor._version for tensor in used]
        result = super().run_node(n)
        if n.target in ATTENTION:
            result = _laid_out_as(result, used[0])
        made = tensors_in(result)
        note = self.current
        note.value = result
        if isinstance(result, Tensor):
            n.meta["tensor"] = result
        note.touches = frozenset(storage(tensor) for tensor in (*used, *made))
        note.writes = frozenset(
            storage(tensor)
            for tensor, version in zip(used, before, strict=True)
            if tensor._version != version
        ) | _running_statistics(n, self.env)
        if n.op not in ("placeholder", "get_attr") and any(tensor.requires_grad for tensor in made):
            trains = n.op == "call_module" and any(
                parameter.requires_grad for parameter in self.submodules[str(n.target)].parameters()
            )
            matrices = sum(tensor.requires_grad and tensor.dim() > 1 for tensor in used)
            note.gradients = max(1, matrices + trains)
        note.fixed = not isinstance(result, Tensor) and self._is_fixed(n)
        if n.target in ATTENTION:
            # Whatever path torch takes here, a GPU runs one kernel: scores never reach memory.
            queries, keys = (self.env[one] for one in n.args[:2] if isinstance(one, fx.Node))
            macs = _attention_macs(queries, keys, made[0]) / (2 if _is_causal(n) else 1)
            note.products = [Product(macs, sum(map(tensor_size, (*used, *made))), 0)]
            kept = None if _drops_out(n) else sum(map(tensor_size, made))
            moved = note.products[0].activations
            note.operations = [Operation("attention", macs, moved, kept, result_bytes=kept or 0)]
            held = (*used[:3], *made) if note.gradients else ()
            note.saved_bytes = sum(map(tensor_size, held))
            note.saves = {storage(tensor): tensor_size(tensor) for tensor in held}
        return result

    def fetch_attr(self, target: str) -> Any:
        """A parameter or buffer, as a fake tensor, one for each real one."""
        real = super().fetch_attr(target)
        if not isinstance(real, Tensor) or self._fake is None:
            value = real
        else:
            if id(real) not in self._fetched:
                self._fetched[id(real)] = self._fake.from_tensor(real)
            value = self._fetched[id(real)]
        if isinstance(value, Tensor):
            self.parameters.add(storage(value))
        return value

    def keep(self, tensor: Tensor) -> Tensor:
        """Count what the current node saves for the backward; parameters are held anyway."""
        key = storage(tensor)
        if key in self.parameters or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.current.saves[key] = tensor.untyped_storage().nbytes()
        if key not in self._kept:
            self._kept.add(key)
            self.current.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _is_fixed(self, node: fx.Node) -> bool:
        if node.op == "call_function" and node.target is getattr:
            return node.args[1] in _SHAPE_READS
        if node.op == "call_method" and node.target in _SHAPE_READS:
            return True
        inputs = node.all_input_nodes
        return (
            node.op == "call_function" and bool(inputs) and all(self.notes[other].fixed for other in inputs)
        )


class _Operations(TorchDispatchMode):
    """Writes each dispatched operation into the notes of the current node; views are free."""

    def __init__(self, observer: "_Observer | _BackwardObserver") -> None:
        super().__init__()
        self._observer = observer
        self._kept = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        dtypes = dict.fromkeys(str(tensor.dtype) for tensor in inputs)
        if func.overloadpacket in _MATRIX_PRODUCTS and len(dtypes) > 1 and isinstance(inputs[0], FakeTensor):
            raise CaptureError(f"a product of {' and '.join(dtypes)}")
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        known = {storage(tensor) for tensor in inputs}
        is_view = bool(outputs) and all(storage(tensor) in known for tensor in outputs)
        note = self._observer.current
        if func.namespace in ("prim", "prims"):
            return result
        if is_view and not func._schema.is_mutable:
            note.operations.append(Operation("view", 0.0, 0.0))
        else:
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=result) if count else 0
            is_held = [
                isinstance(tensor, torch.nn.Parameter) or storage(tensor) in self._observer.parameters
                for tensor in inputs
            ]
            moved = [tensor_size(tensor) for tensor in inputs]
            weights = sum(size for size, held in zip(moved, is_held, strict=True) if held)
            activations = sum(moved) - weights + sum(tensor_size(tensor) for tensor in outputs)
            note.products.append(Product(flops / 2, activations, weights))
            kept = self._keep(func, args, kwargs, outputs)
            is_kept = outputs and not func._schema.is_mutable and is_same_again(func, args, kwargs)
            result_bytes = sum(map(tensor_size, outputs)) if is_kept else 0
            note.operations.append(
                Operation(_kind(func, args), flops / 2, activations + weights, kept, weights, result_bytes)
            )
        return result

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int | None:
        """Bytes that selective checkpointing keeps of a result: none of what is written into a kept one."""
        if is_narrowing(func, args, kwargs):
            self._kept |= storages(made)
            return sum(map(tensor_size, made))
        return 0 if written_storages(func, args, kwargs) & self._kept else None


class _BackwardObserver(NodeByNode):
    """Takes notes of the backward of each node."""

    def __init__(self, graph_module: fx.GraphModule, notes: Mapping[fx.Node, Observed]) -> None:
        super().__init__(graph_module)
        self.current = Observed()
        self.parameters = frozenset[int]()
        self._notes = notes

    def backward_of(self, node: fx.Node, call: Callable[[], object]) -> None:
        """Take notes of what is dispatched."""
        self.current = Observed()
        with _Operations(self):
            call()
        note = self._notes[node]
        note.backward = self.current.operations
        if node.target in ATTENTION:
            # Scores are computed again, then two products for each of the forward's.
            note.backward = [Operation("attention", 2.5 * one.macs, 2 * one.bytes) for one in note.operations]


def observe_backward(captured: Captured, notes: Mapping[fx.Node, Observed]) -> None:
    """Run the backward of each node on its own and take notes of its operations.

    Args:
        captured: the model; its buffers stay as they are.
        notes: of `observe`; added to.
    """

    def run(fake: FakeTensorMode | None) -> None:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), fake or nullcontext():
            inputs = [
                given.detach().requires_grad_(value.requires_grad)
                for given, value in zip(_inputs(captured, fake), captured.example, strict=True)
            ]
            _BackwardObserver(captured.graph_module, notes).run(*inputs)

    _run_on_fakes(captured, run, "the backward")


def fold_shapes(captured: Captured, notes: Mapping[fx.Node, Observed]) -> None:
    """Write numbers that depend on shapes alone into their users, so that no cut has to send them."""
    graph = captured.graph_module.graph
    for node in reversed(list(graph.nodes)):
        note = notes[node]
        if not note.fixed or node.op == "output":
            continue
        value = tuple(note.value) if isinstance(note.value, torch.Size) else note.value
        for user in list(node.users):
            substitutes = {other: value if other is node else other for other in user.all_input_nodes}
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), substitutes.__getitem__)
        graph.erase_node(node)
    captured.graph_module.recompile()


def _laid_out_as(result: Tensor, queries: Tensor) -> Tensor:
    """Attention's result as fused kernels lay it out, heads behind positions where queries have them so.

    The unfused path, which torch takes without a device, puts heads first; what follows would copy it.
    """
    is_turned = queries.dim() == 4 and queries.transpose(1, 2).is_contiguous() and not queries.is_contiguous()
    if not is_turned or result.transpose(1, 2).is_contiguous():
        return result
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_macs(queries: Tensor, keys: Tensor, result: Tensor) -> float:
    """Multiply-adds of (..., L, E) by (..., S, E) for scores, and of these by values for (..., L, V)."""
    rows = result.numel() // result.shape[-1]
    return float(rows * keys.shape[-2] * (queries.shape[-1] + result.shape[-1]))


def _drops_out(node: fx.Node) -> bool:
    """Whether attention leaves out some of what it attends to at random."""
    return bool(node.kwargs.get("dropout_p", len(node.args) > 4 and node.args[4]))


def _is_causal(node: fx.Node) -> bool:
    """Whether attention leaves out the half of the scores that lies ahead."""
    return bool(node.kwargs.get("is_causal", len(node.args) > 5 and node.args[5]))


def _kind(func: Any, args: tuple[Any, ...]) -> str:
    """The one of `KINDS`, by what torch says of an operation."""
    name = str(func.overloadpacket)
    if func.overloadpacket in flop_registry:
        if "attention" in name:
            return "attention"
        if "convolution" not in name:
            return "product"
        return "convolution" if args[9 if "backward" in name else 8] == 1 else "grouped convolution"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    return "pointwise" if torch.Tag.pointwise in func.tags else "other"


def tensor_size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _running_statistics(node: fx.Node, env: Mapping[fx.Node, Any]) -> frozenset[int]:
    """A batch norm in training writes its running statistics without saying so in its schema."""
    if node.target is not torch.ops.aten.batch_norm.default or not node.args[5]:
        return frozenset()
    return frozenset(storage(env[other]) for other in node.args[3:5] if isinstance(other, fx.Node))
