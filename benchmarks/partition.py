"""Pipeline stages by minimum cuts against four baselines, on whole models.

    python benchmarks/partition.py [--stages 4] [--output docs/benchmarks] [--uneven]

Every method cuts the same graph under the same predicted costs (bf16 on eight H100 a node, training, one
microbatch as listed), and is judged by its slowest stage, transfers included. The models are on the meta
device but for the sketched one. Writes partition.md, partition.png and partition_plan.png.

    equal layers       numbered blocks divided evenly; what is before and after goes along
    equal parameters   the same count of parameters in each stage, in the order of the graph
    PipeDream          the best ends in the order of the graph (Narayanan et al., SOSP 2019)
    Kernighan-Lin      recursive bisection, then whatever flows backwards moved on

With --uneven the second half of the pipeline is on devices of half the speed and memory, and
partition_uneven.md is written.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import networkx as nx
import numpy as np
import torch
import transformers
from torch import nn

from panther_compile import partition_model, sketchify
from panther_compile.partition import Partition
from panther_compile.partition.graph.flow import SINK, SOURCE, FlowGraph
from panther_compile.partition.graph.hardware import H100, Hardware
from panther_compile.partition.stages.chains import StageRequest
from panther_compile.partition.stages.ends import linear_cuts, measure_cuts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from stage_milp import milp_bound
from zoo.handwritten import UNet

META = torch.device("meta")
BASELINES = ("equal layers", "equal parameters", "PipeDream", "Kernighan-Lin")
HALF = replace(
    H100,
    name="half",
    flops_per_second=H100.flops_per_second / 2,
    memory_bytes_per_second=H100.memory_bytes_per_second / 2,
    memory_bytes=H100.memory_bytes // 2,
)


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device=META)


def _pixels(batch: int, size: int) -> torch.Tensor:
    return torch.zeros(batch, 3, size, size, dtype=torch.bfloat16, device=META)


def _meta(make: Callable[[], nn.Module]) -> nn.Module:
    with META:
        return make().to(torch.bfloat16).train()


def _mixed() -> nn.Module:
    """A vision transformer whose layers are sketched at ratios from 1/10 to all of the numbers."""
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=12, intermediate_size=4096, num_labels=1000
    )
    config.num_attention_heads = 16
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    ratios = {f"*.{layer}.*": ratio for layer, ratio in zip(range(8), [0.1] * 5 + [0.25] * 3, strict=True)}
    sketched = sketchify(model, ratio=ratios, method="randomized", allow_slower=True, progress=False)
    return sketched.to(torch.bfloat16).train()


def _mixed_inputs() -> dict[str, Any]:
    return {"pixel_values": torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16)}


@dataclass(frozen=True)
class Subject:
    """A model, its microbatch, and whether its layers cost unequal time."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    uneven: bool


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig())


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def _t5() -> nn.Module:
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    return transformers.T5ForConditionalGeneration(config)


def _whisper() -> nn.Module:
    sizes = {"layers": 12, "attention_heads": 12, "ffn_dim": 3072}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(d_model=768, **both))


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))


def _swin() -> nn.Module:
    return transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))


def _resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))


def _clip() -> nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig())


def _vision_decoder() -> nn.Module:
    decoder = transformers.GPT2Config(use_cache=False)
    of_both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    return transformers.VisionEncoderDecoderModel(of_both(transformers.ViTConfig(), decoder))


def _mixtral() -> nn.Module:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, use_cache=False))


class TwoStreams(nn.Module):
    """Images and their motion through layers of their own, one of each in turn."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 64, 128, 128, 256, 256, 512, 512)
        self.images, self.motion = (
            nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(inner, outer, 3, 1 + (inner != outer), 1), nn.BatchNorm2d(outer), nn.ReLU()
                )
                for inner, outer in pairwise(widths)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(2 * widths[-1], 1000)

    def forward(self, images: torch.Tensor, motion: torch.Tensor) -> torch.Tensor:
        """Logits."""
        for left, right in zip(self.images, self.motion, strict=True):
            images, motion = left(images), right(motion)
        return self.head(torch.cat((images.mean((2, 3)), motion.mean((2, 3))), 1))


def _spectrogram(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 80, 3000, dtype=torch.bfloat16, device=META)


def _pair(batch: int, length: int, decoded: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(batch, length), "decoder_input_ids": _ids(batch, decoded)}


SUBJECTS = [
    Subject("BERT-base", lambda: _meta(_bert), lambda: {"input_ids": _ids(16, 256)}, True),
    Subject("GPT-2", lambda: _meta(_gpt2), lambda: {"input_ids": _ids(8, 512)}, True),
    Subject("T5-base", lambda: _meta(_t5), lambda: _pair(4, 1024, 128), True),
    Subject(
        "Whisper-small",
        lambda: _meta(_whisper),
        lambda: {"input_features": _spectrogram(4), "decoder_input_ids": _ids(4, 128)},
        True,
    ),
    Subject("ViT-B/16", lambda: _meta(_vit), lambda: {"pixel_values": _pixels(32, 224)}, False),
    Subject("Swin-T", lambda: _meta(_swin), lambda: {"pixel_values": _pixels(32, 224)}, True),
    Subject("ResNet-50", lambda: _meta(_resnet), lambda: {"pixel_values": _pixels(32, 224)}, True),
    Subject("U-Net", lambda: _meta(lambda: UNet(channels=64)), lambda: (_pixels(8, 256),), True),
    Subject("ViT sketched", _mixed, _mixed_inputs, True),
    Subject(
        "CLIP",
        lambda: _meta(_clip),
        lambda: {
            "input_ids": _ids(64, 77),
            "pixel_values": _pixels(64, 224),
            "attention_mask": torch.ones(64, 77, dtype=torch.long, device=META),
        },
        True,
    ),
    Subject(
        "ViT + GPT-2",
        lambda: _meta(_vision_decoder),
        lambda: {"pixel_values": _pixels(8, 224), "decoder_input_ids": _ids(8, 128)},
        True,
    ),
    Subject("Mixtral", lambda: _meta(_mixtral), lambda: {"input_ids": _ids(4, 512)}, True),
    Subject("two streams", lambda: _meta(TwoStreams), lambda: (_pixels(16, 224), _pixels(16, 224)), True),
]


def layer_of(flow: FlowGraph) -> dict[str, int]:
    """The number of the block that each vertex belongs to, in the order of the graph."""
    keys: dict[str, str] = {}
    for holding in flow.holdings:
        match = re.match(r"(.*?\.\d+(?:\.\d+)?)\.", f"{holding.name}.")
        if match:
            for vertex in holding.vertices:
                keys.setdefault(vertex, match[1])
    numbers: dict[str, int] = {}
    layers, current = {}, 0
    for vertex in flow.work:
        if vertex in keys:
            current = max(current, numbers.setdefault(keys[vertex], len(numbers)))
        layers[vertex] = current
    return layers


def equal_layers(flow: FlowGraph, stages: int) -> list[int]:
    """The stage of each vertex."""
    layers = layer_of(flow)
    count = max(layers.values()) + 1
    return [layer * stages // count for layer in layers.values()]


def equal_parameters(flow: FlowGraph, stages: int) -> list[int]:
    """The stage of each vertex; a parameter counts where it is first used."""
    first = dict.fromkeys(flow.work, 0)
    for holding in flow.holdings:
        if holding.vertices:
            first[holding.vertices[0]] += holding.bytes
    done = np.cumsum(list(first.values()))
    return [
        min(int((before - 1) * stages / done[-1]), stages - 1) if before else 0 for before in done.tolist()
    ]


def kernighan_lin(flow: FlowGraph, stages: int) -> list[int]:
    """The stage of each vertex."""
    position = {vertex: number for number, vertex in enumerate(flow.work)}
    graph = nx.Graph()
    graph.add_nodes_from(range(len(position)))  # numbers, as the order of a set of names is random
    for tail, head, data in flow.graph.edges(data=True):
        if tail != SOURCE and head != SINK:
            graph.add_edge(position[tail], position[head], weight=data["bytes"])
    parts = [set(graph)]
    bisect = nx.algorithms.community.kernighan_lin_bisection
    while len(parts) < stages:
        parts = [half for part in parts for half in bisect(graph.subgraph(part), weight="weight", seed=0)]
    parts.sort(key=lambda part: float(np.mean(list(part))))
    stage_of = {vertex: stage for stage, part in enumerate(parts[:stages]) for vertex in part}
    for vertex, number in position.items():
        needs = [stage_of[position[need]] for need in flow.graph.predecessors(vertex) if need != SOURCE]
        stage_of[number] = max([stage_of[number], *needs])
    return [stage_of[number] for number in range(len(position))]


def seconds_of(flow: FlowGraph, request: StageRequest, stage_of: list[int]) -> float:
    """The slowest stage of an assignment."""
    ends = np.array(stage_of)[None, :] < np.arange(request.count + 1)[:, None]
    return measure_cuts(flow, request, ends).seconds


def compare(
    subject: Subject, stages: int, hardware: Hardware | list[Hardware] = H100
) -> tuple[Partition, float, dict[str, float]]:
    """The partition, seconds to find it, and the slowest stage of each baseline."""
    model, inputs = subject.make(), subject.inputs()
    start = time.process_time()
    found = partition_model(model, inputs, mesh={"pp": stages}, hardware=hardware, tied="shared")
    spent = time.process_time() - start
    flow, request = found.flow, found.request
    linear = linear_cuts(flow, request)
    assert linear is not None
    slowest = {
        "equal layers": seconds_of(flow, request, equal_layers(flow, stages)),
        "equal parameters": seconds_of(flow, request, equal_parameters(flow, stages)),
        "PipeDream": linear.seconds,
        "Kernighan-Lin": seconds_of(flow, request, kernighan_lin(flow, stages)),
    }
    if isinstance(hardware, list):
        alike = partition_model(model, inputs, mesh={"pp": stages}, hardware=HALF, tied="shared").stage_of
        stage_of = [alike[flow.members[vertex][0]] for vertex in flow.work]
        slowest["minimum cuts as if alike"] = seconds_of(flow, request, stage_of)
    fastest = min(slowest.values()) * (1 + 1e-9)
    assert found.bottleneck_seconds <= fastest, f"{subject.name}: a baseline is better"
    return found, spent, slowest


def write_uneven(stages: int, output: Path) -> None:
    """Run every model on devices that differ, and write the table."""
    head = ["model", "ours ms", *BASELINES, "minimum cuts as if alike", "CPU seconds to find"]
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    hardware = [H100] * (stages - stages // 2) + [HALF] * (stages // 2)
    for subject in SUBJECTS:
        found, spent, slowest = compare(subject, stages, hardware)
        ours = found.bottleneck_seconds
        cells = (f"{seconds / ours:.3f}" for seconds in slowest.values())
        lines.append(f"| {subject.name} | {ours * 1e3:.3f} | {' | '.join(cells)} | {spent:.1f} |")
        print(lines[-1], flush=True)
    text = (
        f"# {stages} pipeline stages on devices that differ: the slowest stage, over that of the minimum "
        "cuts\n\nMade by `benchmarks/partition.py --uneven`, as [partition.md](partition.md), but that the "
        "second half of the pipeline is on devices of half the speed and memory. The last column but one is "
        "the minimum cuts as if all devices were alike, on these.\n\n"
        + "\n".join(lines)
        + f"\n\n{found_with()}\n"
    )
    (output / "partition_uneven.md").write_text(text, encoding="utf-8")


def found_with() -> str:
    """The last line of a page."""
    versions = (
        f"torch {torch.__version__}, networkx {nx.__version__}, transformers {transformers.__version__}"
    )
    return f"Found with {versions} on one CPU core."


def draw(results: Mapping[str, tuple[float, dict[str, float]]], path: Path) -> None:
    """Bars: slowest stage of each method over that of ours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    methods = list(next(iter(results.values()))[1])
    for number, method in enumerate(methods):
        heights = [slowest[method] / ours for ours, slowest in results.values()]
        axes.bar(np.arange(len(results)) + 0.2 * number - 0.3, heights, 0.2, label=method)
    axes.axhline(1.0, color="black", linewidth=1, label="minimum cuts")
    axes.set(xticks=range(len(results)), ylabel="slowest stage, ours = 1", ylim=(0.8, 3))
    axes.set_xticklabels(results, fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Run every model and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--milp-seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--uneven", action="store_true", help="on devices that differ")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if arguments.uneven:
        return write_uneven(arguments.stages, arguments.output)
    head = ["model", "operations", "ours ms", "over the bound", "bubble", "cut MB", *BASELINES]
    head.append("CPU seconds to find")
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * (len(head) - 1)}|"]
    results = {}
    for subject in SUBJECTS:
        found, spent, slowest = compare(subject, arguments.stages)
        if subject.name == "T5-base":
            found.plot(arguments.output / "partition_plan.png")
        ours = found.bottleneck_seconds
        bound = found.lower_bound_seconds()
        if not found.exact:
            bound = max(bound, milp_bound(found.flow, found.request, ours, arguments.milp_seconds))
        results[subject.name] = (ours, slowest)
        cells = [
            subject.name + ("" if subject.uneven else " (even)"),
            str(len(found.flow.work)),
            f"{ours * 1e3:.3f}",
            "optimal" if found.exact else f"{ours / bound - 1:.1%}",
            f"{found.bubble:.1%}",
            f"{found.cut_bytes / 1e6:.1f}",
            *(f"{seconds / ours:.3f}" for seconds in slowest.values()),
            f"{spent:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = (
        f"# {arguments.stages} pipeline stages: the slowest stage, over that of the minimum cuts\n\n"
        "Made by `benchmarks/partition.py`. Predicted, for one microbatch, bf16 training, the `h100` preset, "
        "1F1B with four microbatches a device; the four columns of baselines are ratios, so 1.2 is a stage "
        "that takes 20 % longer. The bound is an equal share of all work and of the transfers that no cut "
        "can avoid, or that of a mixed-integer program (HiGHS, one minute); where every cut was compared the "
        "result is optimal.\n\n"
        + "\n".join(lines)
        + f"\n\n{found_with()}\n\n![slowest stages](partition.png)\n"
    )
    (arguments.output / "partition.md").write_text(text, encoding="utf-8")
    draw(results, arguments.output / "partition.png")


if __name__ == "__main__":
    main()
