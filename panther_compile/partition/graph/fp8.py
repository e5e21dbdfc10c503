"""Products in eight bits: which they are, and what is kept of what they read.

Layers whose products run in fp8, forward and for both gradients, leave all else in the model's dtype:
attention, norms, and the last layer, as torchtitan and Megatron-LM have it. What a product reads is kept for
its backward

    in the model's dtype    torchao casts it again
    in one byte             Transformer Engine keeps the copy; what others need of a tensor is kept besides

Scales, and copies of weights in eight bits, are not counted.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from panther_compile.models.outputs import tensors_in
from panther_compile.partition.graph.capture import Captured
from panther_compile.partition.graph.narrowing import storage
from panther_compile.partition.graph.observe import Observed


def mark_products(captured: Captured, notes: Mapping[fx.Node, Observed], *, keeps: bool) -> None:
    """Note which nodes are products that run in fp8: those with a weight, but the last.

    Args:
        captured: the model.
        notes: of `observe`; added to.
        keeps: whether what they read is kept in one byte.
    """
    leads_on = set[fx.Node]()  # to another product
    for node in reversed(captured.graph_module.graph.nodes):
        note = notes[node]
        is_product = any(one.kind == "product" and one.weight_bytes for one in note.operations)
        is_before = node in leads_on
        note.fp8 = is_product and is_before
        note.keeps_fp8 = note.fp8 and keeps
        if is_product or is_before:
            leads_on.update(node.all_input_nodes)


def keep_copies(notes: Mapping[fx.Node, Observed]) -> dict[fx.Node, Observed]:
    """Notes in which products keep copies of one byte a number, each tensor once.

    Args:
        notes: with the products marked; left as they are.
    """
    widths = number_widths(notes)
    others = {key for note in notes.values() if not note.keeps_fp8 for key in note.saves}
    copied = set[int]()
    found = dict(notes)
    for node, note in notes.items():
        if note.keeps_fp8:
            own = {key: size // widths.get(key, 1) for key, size in note.saves.items() if key not in copied}
            copied |= own.keys()
            whole = note.saved_bytes if others & note.saves.keys() else 0
            found[node] = replace(note, saved_bytes=whole + sum(own.values()))
    return found


def number_widths(notes: Mapping[fx.Node, Observed]) -> dict[int, int]:
    """Bytes of a number, by storage."""
    widths: dict[int, int] = {}
    for note in notes.values():
        for one in tensors_in(note.value):
            widths.setdefault(storage(one), one.element_size())
    return widths
