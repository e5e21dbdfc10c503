"""Predicted tokens per second and memory beside what others have published for Llama-3 on H100.

    python benchmarks/published.py [--rows 0 1 ...] [--ranked 8b 70b] [--kept FILE] [--output docs/benchmarks]

The rows are in published_rows.json, with their sources. Five constants are fitted, on the rows marked "fit"
alone: how many FLOP/s products reach in bf16 and in fp8, each on torchtitan's boards of 500 W and on those of
700 W that the others have, and what share of the rate of products in bf16 attention reaches. The last layer
and attention stay in bf16. Everything else is data sheets. Rows marked "test" are predicted with them. The
runs were compiled or had fused kernels (`compiled=True`), the devices of a stage sent, and kept, each a part
of what the next one takes, what is gathered or computed again at once is a decoder layer, and the loss took
logits in shards. Attention is causal; keys and values of grouped queries are kept once where the runtime does
("grouped"), and what products read in one byte where it does ("keeps"). Each published mesh is also ranked
among all meshes of as many devices at its global batch, by what the planner expects of them; where sequences
were divided (cp), among those that do not as well. "selective" keeps what torchtitan keeps: every second
product, and attention. No GPU is used. Writes published.md.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from panther_compile.errors import StageMemoryError
from panther_compile.partition import Link, Partition
from panther_compile.partition.graph.flow import FlowGraph
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graph.hardware import H100, Hardware
from panther_compile.partition.graph.observe import Observed, tensor_size
from panther_compile.partition.graphs import Graphs, read_graphs, reweigh
from panther_compile.partition.options import PlanOptions
from panther_compile.partition.records import Mesh
from panther_compile.partition.search import expect_meshes, partition_mesh

ROWS = Path(__file__).with_name("published_rows.json")
TOKENS = 8192  # of a sequence, where a row does not say
# hidden and intermediate size, layers, heads
SHAPES = {"8b": (4096, 14336, 32, 32), "70b": (8192, 28672, 80, 64), "405b": (16384, 53248, 126, 128)}
# TB/s of boards by their GB of memory (torchtitan's have 96), of which 80 %.
MEMORY_RATES = {80: 3.35, 96: 2.4}
UNLIMITED = 10**12  # bytes
TITAN, DGX = 96, 80  # boards by their GB
# FLOP/s to begin with, and the share of the first that attention reaches.
FIRST = {
    **{f"bf16 {board}": 0.5 * 989e12 for board in (TITAN, DGX)},
    **{f"fp8 {board}": 0.35 * 1979e12 for board in (TITAN, DGX)},
    "attention": 0.6,
}
HIDDEN = Link(1e15, 0.0)  # NVLink where collectives of shards run behind products
ATTENTIONS = ("causal", "grouped causal")  # the latter without repeating keys and values


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    grouped: bool,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, None]:
    """Causal attention as the runs have it; a mask in its place would count as twice the work."""
    if not grouped:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    mixed = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return mixed.transpose(1, 2), None


for grouped, attention in enumerate(ATTENTIONS):
    ALL_ATTENTION_FUNCTIONS.register(attention, partial(attend, grouped=bool(grouped)))


def build(model: str, rows: int, tokens: int = TOKENS, *, grouped: bool = False) -> tuple[nn.Module, Tensor]:
    """The shape of a Llama in bfloat16, and a microbatch of so many sequences, without data."""
    hidden, intermediate, layers, heads = SHAPES[model]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation=ATTENTIONS[grouped],
    )
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        return made, torch.zeros(rows, tokens, dtype=torch.long)


@dataclass(frozen=True)
class Rates:
    """FLOP/s that are reached.

    Attributes:
        bf16: by products that are not in eight bits.
        fp8: by those that are; None of a row without.
        attention: by attention.
    """

    bf16: float
    fp8: float | None
    attention: float


def rates_of(row: Mapping[str, Any], constants: Mapping[str, float]) -> Rates:
    """Those of a row's boards, from constants named as in `FIRST`."""
    size = row["memory_gb"]
    bf16 = constants[f"bf16 {size}"]
    fp8 = constants[f"fp8 {size}"] if row["precision"] == "fp8" else None
    return Rates(bf16, fp8, constants["attention"] * bf16)


def board(row: dict[str, Any], rates: Rates) -> Hardware:
    """The devices of a row."""
    memory = row["memory_gb"]
    rate = 0.8 * MEMORY_RATES[memory] * 1e12
    made = replace(
        H100,
        flops_per_second=rates.bf16,
        fp8_flops_per_second=rates.fp8,
        attention_flops_per_second=rates.attention,
        memory_bytes=memory * 10**9,
        memory_bytes_per_second=rate,
    )
    return replace(made, intra_node=HIDDEN) if row.get("overlaps_tp") else made


def keep_every_second(notes: Mapping[Any, Observed]) -> None:
    """Let selective checkpointing keep every second product, and attention, as torchtitan's does."""
    products = 0
    for note in notes.values():
        kinds = {one.kind for one in note.operations if one.macs and note.gradients}
        products += bool(kinds) and "attention" not in kinds
        keeps = "attention" in kinds or (bool(kinds) and products % 2 == 1)
        size = tensor_size(note.value) if keeps else 0
        for number, one in enumerate(note.operations):
            note.operations[number] = replace(one, kept=size * (number == 0) if keeps else None)


def divide_by_layers(layers: Mapping[str, str], flow: FlowGraph) -> tuple[int, ...]:
    """Where decoder layers end, and what is before and behind them: what the runs gather and compute again.

    Args:
        layers: by the name of a node, the layer that it is of.
        flow: the graph, a vertex a node.
    """
    names = [layers[vertex] for vertex in flow.work]
    return (*(number for number, (one, after) in enumerate(pairwise(names), 1) if one != after), len(names))


def layer_of(node: fx.Node) -> str:
    """The decoder layer of a node, or the other module right below the model."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return ".".join(paths[-1].split(".")[:3]) if paths else ""


class Study:
    """Graphs that are read once, and predictions from them."""

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], Graphs] = {}
        self._weighed: tuple[object, Graphs] | None = None

    def predict(self, row: dict[str, Any], rates: Rates) -> tuple[float, Partition]:
        """Tokens a second and GPU of the published layout, and the partition."""
        graphs = self._graphs(row, board(row, rates))
        mesh = Mesh(**row["mesh"])
        options = PlanOptions(
            hardware=graphs.costs.hardware,
            memory_bytes=row["memory_gb"] * 10**9,
            microbatches=row["microbatches"],
            samples=row["rows"],
            schedule=row["schedule"],
            stages_per_device=row.get("stages_per_device"),
            recompute=row["recompute"],
            data_parallel=row["states"],
            shard_size=mesh.replicas if row["states"] != "ddp" else None,
            master_weights=True,
            scattered=True,
        )
        part = partition_mesh(graphs, replace(options, memory_bytes=UNLIMITED), mesh)
        if part.device_memory_bytes > options.memory_bytes:
            with suppress(StageMemoryError):  # it was run, so that it fits
                part = partition_mesh(graphs, options, mesh)
        tokens = row["rows"] * row["microbatches"] * mesh.dp * row.get("sequence", TOKENS)
        return tokens / part.step_seconds / mesh.devices, part

    def predict_sizes(self, row: dict[str, Any], rates: Rates) -> tuple[float, int]:
        """Tokens a second and GPU, and bytes of the fullest device."""
        tokens, part = self.predict(row, rates)
        return tokens, part.device_memory_bytes

    def rank(self, row: dict[str, Any], rates: Rates) -> tuple[int, int, str]:
        """The place of the published mesh among those expected to fit, their number, and the first."""
        graphs, mesh = self._graphs(row, board(row, rates)), Mesh(**row["mesh"])
        options = PlanOptions(
            hardware=graphs.costs.hardware,
            memory_bytes=graphs.costs.hardware.memory_bytes,
            global_batch=row["rows"] * row["microbatches"] * mesh.dp,
            samples=row["rows"],
            schedule="auto",
            recompute="auto",
            master_weights=True,
            context_parallel=tuple(dict.fromkeys((1, mesh.cp))),
            scattered=True,
        )
        candidates, _ = expect_meshes(graphs, options, mesh.devices, progress=False)
        ranked = dict.fromkeys(
            one.mesh
            for one in sorted(candidates, key=lambda one: one.rank, reverse=True)
            if one.expected.room >= 1 or one.mesh == mesh
        )
        return list(ranked).index(mesh) + 1, len(ranked), str(next(iter(ranked)))

    def _graphs(self, row: dict[str, Any], hardware: Hardware) -> Graphs:
        grouped, keeps = row.get("grouped", False), row.get("keeps")
        tokens = row.get("sequence", TOKENS)
        key = row["model"], row["rows"], tokens, grouped, keeps
        costs = Costs(
            hardware, master_weights=True, parallel_loss=True, compiled=True, products="fp8", keeps=keeps
        )
        if key not in self._read:
            model, ids = build(row["model"], row["rows"], tokens, grouped=grouped)
            read = read_graphs(model, {"input_ids": ids}, (), costs)
            keep_every_second(read.notes)
            layers = {node.name: layer_of(node) for node in read.captured.graph_module.graph.nodes}
            name = f"Llama-{row['model']}"
            self._read[key] = replace(read, name=name, divide=partial(divide_by_layers, layers))
        if self._weighed is None or self._weighed[0] != (key, costs):
            self._weighed = (key, costs), reweigh(self._read[key], costs)
        return self._weighed[1]


def fit(study: Study, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Constants, as in `FIRST`, for which tokens a second of the rows marked "fit" are met best.

    Seconds are nearly linear in the inverse of each rate: each is tried at two values.
    """
    lines = [_Line.of(study, row) for row in rows if row["use"] == "fit"]
    factors = dict.fromkeys(FIRST, 1.0)
    grid = [0.3 * 1.01**step for step in range(240)]

    def error(tried: Mapping[str, float]) -> float:
        return sum(math.log(line.seconds(tried) / line.wanted) ** 2 for line in lines)

    for _ in range(20):
        for name in FIRST:
            factors[name] = min(grid, key=lambda one: error({**factors, name: one}))
    return {name: FIRST[name] * factor for name, factor in factors.items()}


_STEP = 1.25


@dataclass(frozen=True)
class _Line:
    """Seconds of a token of a row, by what its constants are of those in `FIRST`.

    Attributes:
        fixed: of what no constant changes.
        parts: by the names of the constants that divide them together.
        wanted: as published.
    """

    fixed: float
    parts: Mapping[tuple[str, ...], float]
    wanted: float

    @classmethod
    def of(cls, study: Study, row: Mapping[str, Any]) -> "_Line":
        """From predictions at `FIRST`, and with each rate alone higher by `_STEP`."""

        def seconds(**higher: float) -> float:
            rates = rates_of(row, FIRST)
            found = replace(rates, **{name: getattr(rates, name) * factor for name, factor in higher.items()})
            return 1 / study.predict(row, found)[0]

        names = {
            "bf16": (f"bf16 {row['memory_gb']}",),
            "attention": (f"bf16 {row['memory_gb']}", "attention"),
        }
        if row["precision"] == "fp8":
            names["fp8"] = (f"fp8 {row['memory_gb']}",)
        now = seconds()
        parts = {of: (now - seconds(**{name: _STEP})) / (1 - 1 / _STEP) for name, of in names.items()}
        return cls(now - sum(parts.values()), parts, 1 / row["tokens"])

    def seconds(self, factors: Mapping[str, float]) -> float:
        """What is expected with constants of so many times `FIRST`."""
        return self.fixed + sum(
            part / math.prod(factors[name] for name in of) for of, part in self.parts.items()
        )


HEAD = (
    "source",
    "model",
    "mesh",
    "run",
    "use",
    "tokens/s/GPU",
    "predicted",
    "error",
    "GiB",
    "predicted",
    "error",
    "rank of the mesh",
)


@dataclass(frozen=True)
class Found:
    """What is predicted for a row.

    Attributes:
        tokens: a second and GPU.
        memory_bytes: of the fullest device.
        rank: place of the mesh, number of meshes, and the first; None where that was not looked for.
    """

    tokens: float
    memory_bytes: int
    rank: tuple[int, int, str] | None

    def meets(self, row: dict[str, Any]) -> bool:
        """Whether step time is within 15 %, memory within 10 % and the mesh among the best three.

        Where no memory is published, it has to be what the board has.
        """
        is_near = self.memory_bytes <= row["memory_gb"] * 10**9
        if row["gib"] is not None:
            is_near = abs(self.memory_bytes / 2**30 / row["gib"] - 1) <= 0.1
        is_first = self.rank is None or self.rank[0] <= 3
        return abs(row["tokens"] / self.tokens - 1) <= 0.15 and is_near and is_first

    def line(self, row: dict[str, Any]) -> list[str]:
        """A row of the table."""
        gib = self.memory_bytes / 2**30
        per_device = f" x {row['stages_per_device']}" if "stages_per_device" in row else ""
        tokens = f", {row['sequence']:,} tokens" if "sequence" in row else ""
        hidden = ", hidden tp" if row.get("overlaps_tp") else ""
        schedule = f"{row['schedule']}{per_device}" if row["mesh"].get("pp", 1) > 1 else "no pipeline"
        run = f"{row['precision']}, {row['states']}, {row['recompute']}, {schedule}{tokens}{hidden}"
        memory = ["", f"{gib:.1f}", ""]
        if row["gib"] is not None:
            memory = [f"{row['gib']}", f"{gib:.1f}", f"{gib / row['gib'] - 1:+.0%}"]
        speed = [f"{row['tokens']:,}", f"{self.tokens:,.0f}", f"{self.tokens / row['tokens'] - 1:+.0%}"]
        place_of = "not ranked"
        if self.rank is not None:
            place, count, first = self.rank
            place_of = f"{place} of {count}" + ("" if place == 1 else f", first {first}")
        mesh = str(Mesh(**row["mesh"]))
        return [row["source"], row["model"], mesh, run, row["use"], *speed, *memory, place_of]


_TEXT = """\
# Published training runs, as predicted

Made by `benchmarks/published.py`; the rows and their sources are in `benchmarks/published_rows.json`.
Llama-3 on H100, sequences of 8,192 tokens where the run does not say, Adam with float32 master weights, the
loss divided over tp. Nothing was run on a GPU. Five constants are fitted on the rows marked "fit", what is
reached: by products in bf16 {titan:.0f} TFLOP/s on torchtitan's boards of 500 W and {dgx:.0f} on the others,
of 700 W; in fp8 {torchao:.0f} by torchao on the first and {engine:.0f} by Transformer Engine on the others
(`products="fp8"`, the last layer in bf16); by attention {attention:.0%} of the rate in bf16. All else is data
sheets. The runs were compiled, or had fused kernels (`compiled=True`). Their stages send and keep parts of
what crosses a cut, where ours send all from each device, and what is gathered or computed again at once is a
decoder layer; so it is in the plan here. NVIDIA's runs, and those with AsyncTP, ran collectives of shards
behind products ("hidden tp"): they take no time here. NVIDIA's runtime keeps keys and values of grouped
queries once, and what products read in one byte (`keeps="fp8"`). With cp keys and values are gathered in
full, and nothing hides it. The fit did not look at rows marked "test". Rank: the place of the published mesh
among all that are expected to fit at the same global batch and microbatch, those without cp among them. Rows
that miss (a step time by more than 15 %, memory by more than 10 %, or more than the board has where none is
published, or a rank behind 3) come first, and what that follows from is below the table.

{table}

{notes}
Sources: {sources}.

Found with {versions}.
"""


def main() -> None:
    """Fit on one half, predict both, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows in the file; all without")
    parser.add_argument("--ranked", nargs="*", default=list(SHAPES), help="models whose meshes are ranked")
    parser.add_argument("--kept", type=Path, help="results of rows, added to; those found there are taken")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    read = json.loads(ROWS.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    study, rows = Study(), read["rows"]
    kept: dict[str, Any] = {}
    if arguments.kept is not None and arguments.kept.exists():
        kept = json.loads(arguments.kept.read_text(encoding="utf-8"))

    def keep(name: str, find: Callable[[], Any]) -> Any:
        if name not in kept:
            kept[name] = find()
            if arguments.kept is not None:
                arguments.kept.write_text(json.dumps(kept), encoding="utf-8")
        return kept[name]

    lines, notes = [], []
    constants = keep("constants", partial(fit, study, rows))
    for number, row in enumerate(rows):
        if arguments.rows is not None and number not in arguments.rows:
            left = f"{row['source']}, {row['model']} on {Mesh(**row['mesh'])}, {row['schedule']}"
            notes.append(f"- {left}: in the file, and not predicted for this table.\n")
            continue
        rates = rates_of(row, constants)
        tokens, size = keep(f"{number}", partial(study.predict_sizes, row, rates))
        rank = None
        if row["model"] in arguments.ranked:
            rank = keep(f"rank {number}", partial(study.rank, row, rates))
        found = Found(tokens, size, rank)
        lines.append((found.meets(row), found.line(row)))
        print(" ".join(lines[-1][1]), flush=True)
        if not found.meets(row):
            where = f"{row['source']}, {row['model']} on {lines[-1][1][2]}"
            notes.append(f"- {where}: {row.get('note', 'not explained')}\n")
    lines.sort(key=lambda one: (one[0], one[1][4]))
    table = [
        f"| {' | '.join(cells)} |"
        for cells in (HEAD, ["---"] * 5 + ["--:"] * 6 + ["---"], *(cells for _, cells in lines))
    ]
    text = _TEXT.format(
        titan=constants[f"bf16 {TITAN}"] / 1e12,
        dgx=constants[f"bf16 {DGX}"] / 1e12,
        torchao=constants[f"fp8 {TITAN}"] / 1e12,
        engine=constants[f"fp8 {DGX}"] / 1e12,
        attention=constants["attention"],
        table="\n".join(table),
        notes="".join(notes),
        sources="; ".join(f"{name}: {where}" for name, where in read["sources"].items()),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "published.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
