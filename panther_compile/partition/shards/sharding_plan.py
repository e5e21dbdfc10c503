"""How a graph is sharded over the tp axis: a step for each node that runs on shards."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from panther_compile.partition.shards.layers import ROW, VOCABULARY, ShardableLayer
from panther_compile.partition.shards.placements import Placement, Shard

REPLICATED, SHARDED, SEQUENCE = "replicated", "sharded", "sequence"


@dataclass(frozen=True)
class Step:
    """A node that runs on shards.

    Attributes:
        kind: "column", "row", "vocabulary", or for what is no layer with a weight "sharded" or "sequence".
        out: placement of its result; None if that is whole.
        needs: of each operand, by the name of its node.
        layer: the layer, if it is one.
    """

    kind: str
    out: Shard | None
    needs: Mapping[str, Placement]
    layer: ShardableLayer | None = None

    @property
    def on_sequence(self) -> bool:
        """Whether its result lies in shards of a sequence."""
        return self.kind == SEQUENCE or (self.kind in (ROW, VOCABULARY) and self.out is not None)


@dataclass(frozen=True)
class ShardingPlan:
    """How a graph is sharded.

    Attributes:
        tp: number of devices.
        steps: of nodes that run on shards, by name.
        parameters: placements of those that are stored in shards.
        absorbed: nodes that have become part of another's step.
        gap: share of the cost by which a better labelling is not ruled out; None if there is no bound, as
            where sequences were tried in a wide graph.
        seconds: the cost.
    """

    tp: int
    steps: Mapping[str, Step]
    parameters: Mapping[str, Shard]
    absorbed: frozenset[str]
    gap: float | None
    seconds: float

    def shard_of(self, node: fx.Node) -> Shard | None:
        """How the result of a node is sharded; None if every device has all of it."""
        if node.op == "get_attr":
            return self.parameters.get(str(node.target))
        step = self.steps.get(node.name)
        return step.out if step is not None else None

    def lies_on_sequence(self, node: fx.Node) -> bool:
        """Whether the result of a node lies in shards of a sequence."""
        step = self.steps.get(node.name)
        return step is not None and step.on_sequence
