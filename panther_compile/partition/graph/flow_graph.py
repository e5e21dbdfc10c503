"""A captured graph becomes the graph that is cut: seconds and memory on vertices, bytes on values.

A vertex is one node, or several where a cut between them would be wrong:

    a result that is no tensor (a tuple, a number)     stays with those who use it
    a tensor written in place, views of it included    stays with everything that touches it
    what would otherwise make a cycle                  stays together

Nodes that depend on no input and no parameter, as positions and causal masks, are computed by every stage
that uses them, and are no vertices. A parameter that several vertices use is held by each of their stages,
which then reduce its gradient; or its vertices are kept together (`together`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch
from torch import Tensor, fx

from panther_compile.config import check_type
from panther_compile.errors import ConfigError, check_choice
from panther_compile.factorization import cost
from panther_compile.names import attribute
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph, Holding, Result, Value, Work
from panther_compile.partition.graph.hardware import ALONE, Context, Hardware, Rate
from panther_compile.partition.graph.measure import Measured, needs_gradient
from panther_compile.partition.graph.observe import Observed, Operation, tensor_size

# Bytes of state that an optimizer keeps for each trained number, in float32.
OPTIMIZER_BYTES = {"adam": 8, "momentum": 4, "sgd": 0}
EIGHT_BITS = (None, "fp8")
_MASTER_BYTES = 4


@dataclass(frozen=True)
class Costs:
    """What a step is made of.

    Attributes:
        hardware: of one device.
        training: whether there is a backward.
        optimizer: a key of OPTIMIZER_BYTES.
        measured: seconds of nodes, in place of the estimates.
        parallel_loss: whether the devices of a stage divide what the loss keeps.
        master_weights: whether parameters of fewer bits have float32 copies, which the optimizer trains, and
            gradients in float32.
        compiled: whether what lies between products is fused (`fused.py`).
        context: devices that divide a sequence (`context.py`).
        products: "fp8" for products in eight bits (`fp8.py`); None for the model's dtype.
        keeps: likewise of what they read, for the backward.

    Raises:
        ConfigError, ConfigTypeError: an option of `partition_model` is none of what is wanted.
    """

    hardware: Hardware
    training: bool = True
    optimizer: str = "adam"
    measured: Measured | None = None
    master_weights: bool = False
    parallel_loss: bool = False
    compiled: bool = False
    context: Context = ALONE
    products: str | None = None
    keeps: str | None = None

    def __post_init__(self) -> None:
        for option in ("training", "master_weights", "compiled"):
            check_type(option, getattr(self, option), bool)
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZER_BYTES))
        for option in ("products", "keeps"):
            check_choice(option, getattr(self, option), EIGHT_BITS)
        if self.keeps is not None and self.products is None:
            raise ConfigError(
                f"keeps={self.keeps!r} is of products in eight bits; give products='fp8' with it"
            )


def build_flow_graph(
    captured: Captured,
    notes: Mapping[fx.Node, Observed],
    costs: Costs,
    *,
    together: Collection[str] = (),
) -> FlowGraph:
    """The graph to cut.

    Args:
        captured: the model.
        notes: of `observe`.
        costs: how seconds and bytes are counted.
        together: tied parameters whose users are not to be divided.
    """
    graph = captured.graph_module.graph
    nodes = [node for node in graph.nodes if node.op.startswith("call")]
    constants = find_constants(captured, notes)
    working = [node for node in nodes if node not in constants]
    readers = _readers(captured, constants)
    joined = [readers[name] for name in together if name in readers]
    vertex_of = _group(working, [*joined, *_inseparable(working, notes)])
    members: dict[str, list[str]] = {}
    work: dict[str, Work] = {}
    for node in working:
        members.setdefault(vertex_of[node], []).append(node.name)
    for vertex in _topological(working, vertex_of):
        work[vertex] = Work()
    for node in working:
        vertex = vertex_of[node]
        work[vertex] = add_work(work[vertex], weigh(node, notes[node], costs))
    for node, size in loss_bytes(captured, notes, costs).items():
        if node in vertex_of:
            work[vertex_of[node]] = add_work(work[vertex_of[node]], Work(saved_bytes=size, loss_bytes=size))
    return FlowGraph(
        work=work,
        values=tuple(_values(captured, notes, vertex_of, costs)),
        holdings=tuple(_holdings(captured, readers, vertex_of, costs)),
        members={vertex: tuple(members[vertex]) for vertex in work},
    )


def loss_bytes(captured: Captured, notes: Mapping[fx.Node, Observed], costs: Costs) -> dict[fx.Node, int]:
    """What a loss keeps of each result of the model, which is logits for instance, and of its gradient.

    A loss computes in float32 or wider: it copies what has fewer bits, keeps as much again (a log-softmax, a
    difference), and gives a gradient of that size and one of the result's. Nothing is added to a model that
    returns its loss.
    """
    output = next(node for node in reversed(captured.graph_module.graph.nodes) if node.op == "output")
    results = {node: notes[node].value for node in output.all_input_nodes}
    trained = {
        node: value for node, value in results.items() if isinstance(value, Tensor) and value.requires_grad
    }
    if not costs.training or any(value.dim() == 0 for value in trained.values()):
        return {}
    found = {}
    for node, value in trained.items():
        size = value.element_size()
        wide = max(4, size)
        size = value.numel() * (2 * wide + size + (wide if wide > size else 0))
        found[node] = size // notes[node].result_share
    return found


def find_constants(captured: Captured, notes: Mapping[fx.Node, Observed]) -> dict[fx.Node, None]:
    """Calls that give the same in every stage: of no input, no parameter, nothing random, nothing written."""
    written = {key for note in notes.values() for key in note.writes}
    constants: dict[fx.Node, None] = {}
    for node in captured.graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if random or notes[node].writes or notes[node].touches & written:
            continue
        if all(
            other in constants or (other.op == "get_attr" and not needs_gradient(notes[other].value))
            for other in node.all_input_nodes
        ):
            constants[node] = None
    return constants


def shared_parameters(flow: FlowGraph) -> list[str]:
    """Trained parameters that more than one vertex uses."""
    return [held.name for held in flow.holdings if held.gradient_bytes and len(held.vertices) > 1]


def _readers(captured: Captured, constants: Collection[fx.Node]) -> dict[str, list[fx.Node]]:
    """Working nodes that read each parameter and buffer, directly or through constants."""
    root = captured.graph_module
    first: dict[int, str] = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        first.setdefault(id(tensor), name)
    readers: dict[str, list[fx.Node]] = {}
    for node in root.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), []).extend(_users(node, constants))
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            for tensor in (*module.parameters(), *module.buffers()):
                readers.setdefault(first[id(tensor)], []).append(node)
    return readers


def _users(read: fx.Node, constants: Collection[fx.Node]) -> list[fx.Node]:
    """Working nodes that use a read, looking through constants."""
    queue, seen, found = list(read.users), set(read.users), []
    while queue:
        node = queue.pop(0)
        if node in constants:
            queue.extend(user for user in node.users if user not in seen)
            seen.update(node.users)
        elif node.op != "output":
            found.append(node)
    return found


def _inseparable(working: Sequence[fx.Node], notes: Mapping[fx.Node, Observed]) -> Iterator[list[fx.Node]]:
    """Sets of nodes between which no cut may go."""
    for node in working:
        if not isinstance(notes[node].value, Tensor):
            yield [node, *(user for user in node.users if user.op != "output")]
    for key in {key for note in notes.values() for key in note.writes}:
        yield [node for node in working if key in notes[node].touches]


def _group(working: Sequence[fx.Node], sets: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, str]:
    """The vertex of each node: the name of its group's first node; groups form no cycle."""
    links = nx.Graph()
    links.add_nodes_from(working)
    for nodes in sets:
        links.add_edges_from((nodes[0], other) for other in nodes[1:])
    order = {node: number for number, node in enumerate(working)}

    def name_groups(groups: Iterator[set[fx.Node]]) -> dict[fx.Node, str]:
        return {node: min(group, key=order.__getitem__).name for group in groups for node in group}

    vertex_of = name_groups(nx.connected_components(links))
    of_vertex: dict[str, list[fx.Node]] = {}
    for node, vertex in vertex_of.items():
        of_vertex.setdefault(vertex, []).append(node)
    for cycle in nx.strongly_connected_components(_vertex_graph(working, vertex_of)):
        merged = [node for vertex in cycle for node in of_vertex[vertex]]
        links.add_edges_from((merged[0], other) for other in merged[1:])
    return name_groups(nx.connected_components(links))


def _vertex_graph(working: Sequence[fx.Node], vertex_of: Mapping[fx.Node, str]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(vertex_of.values())
    for node in working:
        for user in node.users:
            if user in vertex_of and vertex_of[user] != vertex_of[node]:
                graph.add_edge(vertex_of[node], vertex_of[user])
    return graph


def _topological(working: Sequence[fx.Node], vertex_of: Mapping[fx.Node, str]) -> list[str]:
    first: dict[str, int] = {}
    for number, node in enumerate(working):
        first.setdefault(vertex_of[node], number)
    graph = _vertex_graph(working, vertex_of)
    return list(nx.lexicographical_topological_sort(graph, key=first.__getitem__))


def weigh(node: fx.Node, note: Observed, costs: Costs, devices: int = 1) -> Work:
    """Time of a node: measured, or by the measured rates of its operations, or by the roofline.

    By the roofline a backward runs each product again for every input that needs a gradient. Attention over a
    sequence that devices divide gathers keys and values, in the backward once more, as they are not kept, and
    scatters their gradients; computing does not hide it.

    Args:
        node: of the graph.
        note: on it.
        costs: how seconds are counted.
        devices: that divide its operations and bytes evenly.
    """
    work = _weigh_alone(node, note, costs, devices)
    if not note.gathered_bytes:
        return work
    size = note.gathered_bytes // devices
    gather = costs.context.seconds(size)
    runs_again = any(one.kept is None for one in note.operations)
    return replace(
        work,
        forward_seconds=work.forward_seconds + gather,
        backward_seconds=work.backward_seconds + 2 * gather * costs.training,
        selective_seconds=work.selective_seconds + gather * (costs.training and runs_again),
        results=tuple(replace(one, seconds=one.seconds + gather) for one in work.results),
        gathered_bytes=size * (2 if costs.training else 1),
    )


def _weigh_alone(node: fx.Node, note: Observed, costs: Costs, devices: int) -> Work:
    """The same without what other devices send."""
    if costs.hardware.rates:
        forward = _by_rates(note.operations, "forward", costs.hardware.rates, devices)
        backward = _by_rates(note.backward, "backward", costs.hardware.rates, devices) * costs.training
    else:
        forward, backward = _by_roofline(note, costs, devices)
    measured = costs.measured
    if measured is not None and node.name in measured.forward:
        taken = measured.forward[node.name] / (devices * note.share)
        if measured.backward is None:
            backward = taken * (backward / forward if forward else 0.0)
        elif costs.training:
            backward = measured.backward.get(node.name, 0.0) / (devices * note.share)
        forward = taken
    if not costs.training:
        return Work(forward, backward)
    again = [one for one in note.operations if one.kept is None]
    scale = forward / (_seconds(note, note.operations, costs, devices) or 1.0)
    return Work(
        forward,
        backward,
        note.saved_bytes // devices,
        sum(one.kept or 0 for one in note.operations) // devices,
        scale * _seconds(note, again, costs, devices) if len(again) < len(note.operations) else forward,
        results=tuple(
            Result(scale * _seconds(note, [one], costs, devices), one.result_bytes // devices)
            for one in note.operations
            if one.result_bytes
        ),
    )


def _device(note: Observed, costs: Costs) -> cost.Device:
    if _is_attention(note):
        return costs.hardware.attention_device
    return costs.hardware.fp8_device if note.fp8 else costs.hardware.device


def _is_attention(note: Observed) -> bool:
    return any(one.kind == "attention" for one in note.operations)


def _seconds(note: Observed, operations: Sequence[Operation], costs: Costs, devices: int) -> float:
    """What operations of a node take forward, whatever it does besides."""
    if costs.hardware.rates:
        return _by_rates(operations, "forward", costs.hardware.rates, devices)
    products = (
        cost.Product(one.macs / devices, (one.bytes - one.weight_bytes) / devices, one.weight_bytes / devices)
        for one in operations
        if one.bytes
    )
    return cost.seconds(tuple(products), _device(note, costs), itemsize=1)


def _by_rates(operations: Sequence[Operation], phase: str, rates: Sequence[Rate], devices: int) -> float:
    of_kind = {rate.kind: rate for rate in rates if rate.phase == phase}
    total = 0.0
    for one in operations:
        rate = of_kind[one.kind]
        total += rate.launch_seconds
        total += (one.macs * rate.seconds_per_mac + one.bytes * rate.seconds_per_byte) / devices
    return total


def _by_roofline(note: Observed, costs: Costs, devices: int) -> tuple[float, float]:
    device = _device(note, costs)
    products = tuple(
        cost.Product(product.macs / devices, product.activations / devices, product.weights / devices)
        for product in note.products
    )
    forward = cost.seconds(products, device, itemsize=1)
    backward = 0.0
    if costs.training and note.backward:  # of a fused kernel
        products = tuple(cost.Product(0.0, one.bytes / devices, 0.0) for one in note.backward)
        backward = cost.seconds(products, device, itemsize=1)
    elif costs.training and note.gradients:
        # Attention computes its scores again, then two products for each of the forward's.
        times = 2.5 if _is_attention(note) else min(2, note.gradients)
        products = tuple(replace(product, macs=product.macs * times) for product in products)
        factor = 2 if any(product.macs for product in products) else 1
        products = tuple(
            replace(
                product,
                activations=factor * product.activations,
                weights=factor * product.weights,
            )
            for product in products
        )
        backward = cost.seconds(products, device, itemsize=1)
    return forward, backward


def add_work(first: Work, second: Work) -> Work:
    """Both, one after the other."""
    return Work(
        first.forward_seconds + second.forward_seconds,
        first.backward_seconds + second.backward_seconds,
        first.saved_bytes + second.saved_bytes,
        first.selective_bytes + second.selective_bytes,
        first.selective_seconds + second.selective_seconds,
        first.loss_bytes + second.loss_bytes,
        first.results + second.results,
        max(first.gathered_bytes, second.gathered_bytes),
    )


def _values(
    captured: Captured, notes: Mapping[fx.Node, Observed], vertex_of: Mapping[fx.Node, str], costs: Costs
) -> Iterator[Value]:
    for node in captured.graph_module.graph.nodes:
        producer = SOURCE if node.op == "placeholder" else vertex_of.get(node)
        tensor = notes[node].value
        if producer is None or not isinstance(tensor, Tensor):
            continue
        users = (SINK if user.op == "output" else vertex_of[user] for user in node.users)
        consumers = tuple(dict.fromkeys(user for user in users if user != producer))
        if consumers:
            size = tensor_size(tensor) // notes[node].result_share
            yield Value(
                node.name, producer, consumers, size, size * (costs.training and tensor.requires_grad)
            )


def held_bytes(tensor: Tensor, costs: Costs) -> tuple[int, int]:
    """Bytes of a parameter or buffer itself, and of its gradient and optimizer states."""
    if not (costs.training and tensor.requires_grad):
        return tensor_size(tensor), 0
    states = OPTIMIZER_BYTES[costs.optimizer] + _MASTER_BYTES * _has_master(tensor, costs)
    return tensor_size(tensor), gradient_size(tensor, costs) + states * tensor.numel()


def gradient_size(tensor: Tensor, costs: Costs) -> int:
    """Bytes of the gradient of a trained parameter, as it is summed."""
    return _MASTER_BYTES * tensor.numel() if _has_master(tensor, costs) else tensor_size(tensor)


def _has_master(tensor: Tensor, costs: Costs) -> bool:
    return costs.master_weights and tensor.is_floating_point() and tensor.element_size() < _MASTER_BYTES


def _holdings(
    captured: Captured,
    readers: Mapping[str, Sequence[fx.Node]],
    vertex_of: Mapping[fx.Node, str],
    costs: Costs,
) -> Iterator[Holding]:
    for name, nodes in readers.items():
        tensor = attribute(captured.graph_module, name)
        if not isinstance(tensor, Tensor):
            continue
        size, trained = held_bytes(tensor, costs)
        vertices = tuple(dict.fromkeys(vertex_of[node] for node in nodes))
        yield Holding(name, size, trained, gradient_size(tensor, costs) * (trained > 0), vertices)
