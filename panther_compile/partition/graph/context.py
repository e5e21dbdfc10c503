"""Context parallelism: what a model computes, keeps and sends where devices divide its sequences.

With cp devices each has 1 / cp of the positions of every tensor, and all parameters. What runs position by
position is divided; attention needs the keys and values of all positions (Llama 3, arXiv 2407.21783, section
3.3.2): they are gathered for each attention alone, once more in its backward, and their gradients scattered.

    norm ──► q  ────────────────────────────► attention ──► out ──► mlp       1/cp of the work each
         └─► k, v ── all-gather over cp ──────────┘                           bytes of all keys and values

Below a causal mask the last positions attend to more than the first. So a sequence is cut into 2 cp pieces,
and device i has pieces i and 2 cp - 1 - i: then attention takes 1 / cp of its work, too. Of grouped queries
the keys and values are gathered before they are repeated.

A tensor is divided if it has an axis as long as what attention attends to, or is made of one that has and its
elements are a multiple of that: as (batch x positions, features), or what experts take.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, fx

from panther_compile.errors import MeshError
from panther_compile.names import is_parameter
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.observe import ATTENTION, Observed, Operation, tensor_size


def count_positions(captured: Captured, devices: int) -> int:
    """The length of the sequence that a model attends to.

    Args:
        captured: the model.
        devices: that are to divide it.

    Raises:
        MeshError: there is no such sequence, or several, or it does not divide.
    """
    nodes = captured.graph_module.graph.nodes
    lengths = {
        int(one.meta["tensor"].shape[-2])
        for node in nodes
        if node.target in ATTENTION
        for one in node.args[:2]
        if isinstance(one, fx.Node)
    }
    if not lengths:
        raise MeshError(
            f"cp={devices} divides a sequence, and the graph has no scaled_dot_product_attention over one: "
            "of a Hugging Face model give attn_implementation='sdpa'"
        )
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        raise MeshError(
            f"cp={devices} divides one sequence, and attention is over several, of {found} positions"
        )
    (length,) = lengths
    if length % (2 * devices):
        raise MeshError(
            f"cp={devices} divides a sequence into 2 x {devices} pieces, two a device, and its {length} "
            f"positions are not divisible by {2 * devices}"
        )
    return length


def divide_sequence(
    captured: Captured, notes: Mapping[fx.Node, Observed], devices: int
) -> dict[fx.Node, Observed]:
    """The notes of one of the devices that divide a sequence.

    Args:
        captured: the model.
        notes: of `observe`, fused or not; left as they are.
        devices: that divide it.

    Raises:
        MeshError: as of `count_positions`.
    """
    length = count_positions(captured, devices)
    divided = _find_divided(captured, notes, length)
    found = {}
    for node, note in notes.items():
        reads = any(one in divided for one in node.all_input_nodes)
        if node not in divided and not reads:
            found[node] = note
            continue
        shared = _share(note, devices)
        if node in divided and isinstance(note.value, Tensor):
            shared.result_share = devices
        if node.target in ATTENTION:
            shared.gathered_bytes = sum(tensor_size(notes[one].value) for one in gathered_nodes(node))
        found[node] = shared
    return found


def gathered_nodes(attention: fx.Node) -> tuple[fx.Node, ...]:
    """The keys and the values, before they are repeated for groups of queries."""
    return tuple(_smallest(one) for one in attention.args[1:3] if isinstance(one, fx.Node))


def _smallest(node: fx.Node) -> fx.Node:
    """The result of fewest bytes from which a tensor follows by itself."""
    best = node
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        if node.op != "call_function" or "tensor" not in node.meta:
            break
        if tensor_size(node.meta["tensor"]) < tensor_size(best.meta["tensor"]):
            best = node
    return best


def _find_divided(captured: Captured, notes: Mapping[fx.Node, Observed], length: int) -> set[fx.Node]:
    """Nodes whose results lie in parts of the sequence."""
    divided, weights = set[fx.Node](), set[fx.Node]()
    for node in captured.graph_module.graph.nodes:
        if node.op == "get_attr":
            if is_parameter(captured.graph_module, str(node.target)):
                weights.add(node)
            continue
        inputs, value = node.all_input_nodes, notes[node].value
        if inputs and all(one in weights for one in inputs):
            weights.add(node)
        elif isinstance(value, Tensor):
            follows = any(one in divided for one in inputs) and node.op != "output"
            if length in value.shape or (follows and value.numel() and value.numel() % length == 0):
                divided.add(node)
        elif node.op != "output" and any(one in divided for one in inputs):
            divided.add(node)  # several tensors at once, as of a split
    return divided


def _share(note: Observed, devices: int) -> Observed:
    def operation(one: Operation) -> Operation:
        return replace(
            one,
            macs=one.macs / devices,
            bytes=one.weight_bytes + (one.bytes - one.weight_bytes) / devices,
            kept=None if one.kept is None else one.kept // devices,
            result_bytes=one.result_bytes // devices,
        )

    return replace(
        note,
        products=[
            replace(one, macs=one.macs / devices, activations=one.activations / devices)
            for one in note.products
        ],
        operations=[operation(one) for one in note.operations],
        backward=[operation(one) for one in note.backward],
        saved_bytes=note.saved_bytes // devices,
        saves={key: size // devices for key, size in note.saves.items()},
        share=devices,
    )
