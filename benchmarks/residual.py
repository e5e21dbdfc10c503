"""int4 weights with a low-rank branch beside them: quality against bytes, of an encoder and of a decoder.

    python benchmarks/residual.py minilm          minutes of a core, 2 GB
    python benchmarks/residual.py smollm2         half an hour of a core, 6 GB

Weights are rounded as ONNX Runtime's MatMulNBits does, symmetric, a float32 scale for each block of 64, and
kept as they are when multiplied out: torch runs all rows. Bytes are those of the layers as MatMulNBits stores
them, and of the branches: float32, or as int8 with a scale for each row, rounded before they are judged.
"Weights" are branches of the weights alone, EoRA those of peers/eora.py on the same data, ours add_residual.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Here a file is called onnx.py: this folder has to come last.
HERE = Path(__file__).parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.resolve()]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import panther_compile as pc  # noqa: E402

sys.path.append(str(HERE))
from accuracy_models.minilm import minilm  # noqa: E402
from accuracy_models.smollm2 import smollm2  # noqa: E402
from accuracy_models.subject import Subject  # noqa: E402
from peers.eora import eora_factors, input_moments  # noqa: E402

BLOCK = 64
SUBJECTS = {"minilm": (minilm, "encoder."), "smollm2": (smollm2, "model.layers.")}


def main() -> None:
    """Round, add branches, judge, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SUBJECTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--budgets", type=float, nargs="*", default=[])
    parser.add_argument("--batches", type=int, help="of the data; all if not given")
    options = parser.parse_args()
    make, where = SUBJECTS[options.model]
    subject = make(Path(), False)
    names = [
        name
        for name, layer in subject.model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(where)
    ]
    data = subject.calibration("in", 0)[: options.batches]
    print(f"{subject.title}; torch {torch.__version__}, {len(data)} batches\n")
    print("| | " + " | ".join([*subject.metrics, "MB of the layers", "seconds"]) + " |")
    print("|---|" + "--:|" * (len(subject.metrics) + 2))
    for row in rows(subject, names, data, options.ranks, options.budgets):
        print(row, flush=True)


def rows(
    subject: Subject, names: list[str], data: list, ranks: list[int], budgets: list[float]
) -> Iterator[str]:
    """Lines of the table."""
    dense = subject.model
    numbers = sum(dense.get_submodule(name).weight.numel() for name in names)

    def line(title: str, model: nn.Module, size: float, seconds: float = 0.0) -> str:
        quality = subject.evaluate(model)
        cells = [f"{quality[one]:.4f}" for one in subject.metrics]
        return f"| {title} | " + " | ".join(cells) + f" | {size / 1e6:.2f} | {seconds:.0f} |"

    yield line("dense", dense, 4 * numbers)
    sizes = {bits: numbers * bits / 8 + numbers / BLOCK * 4 for bits in (4, 8)}
    yield line("int8", rounded(dense, names, 8), sizes[8])
    low = rounded(dense, names, 4)
    yield line("int4", low, sizes[4])
    moments = input_moments(dense, names, data)
    for rank in ranks:
        branches = {
            "weights": timed(lambda rank=rank: pc.add_residual(low, dense, rank=rank)),
            "EoRA": timed(lambda rank=rank: with_eora(low, dense, names, moments, rank)),
            "add_residual": timed(lambda rank=rank: pc.add_residual(low, dense, rank=rank, data=data)),
        }
        for name, (model, seconds) in branches.items():
            yield line(f"int4, rank {rank}, {name}", model, sizes[4] + branch_bytes(model, 4), seconds)
        model = in_int8(branches["add_residual"][0])
        yield line(
            f"int4, rank {rank}, add_residual, branch in int8", model, sizes[4] + branch_bytes(model, 1)
        )
    for budget in budgets:
        share = budget * sizes[4] / (4 * numbers)  # add_residual sees float32 weights here
        model, seconds = timed(lambda share=share: pc.add_residual(low, dense, budget=share, data=data))
        yield line(f"int4, budget {budget}, add_residual", model, sizes[4] + branch_bytes(model, 4), seconds)


def timed(make: Callable[[], nn.Module]) -> tuple[nn.Module, float]:
    """What a function makes, and processor seconds."""
    start = time.process_time()
    made = make()
    return made, time.process_time() - start


@torch.no_grad()
def rounded(model: nn.Module, names: list[str], bits: int) -> nn.Module:
    """A copy whose weights are rounded in blocks, each by its largest number, which keeps its sign."""
    low = copy.deepcopy(model)
    most = 2 ** (bits - 1)
    for name in names:
        weight = low.get_submodule(name).weight
        blocks = weight.view(len(weight), -1, BLOCK)
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scales = torch.where(largest == 0, 1.0, largest / -most)
        weight.copy_(((blocks / scales).round().clamp(-most, most - 1) * scales).view_as(weight))
    return low


def with_eora(
    low: nn.Module, dense: nn.Module, names: list[str], moments: dict[str, Tensor], rank: int
) -> nn.Module:
    """A copy with EoRA's branches; a layer of the same form as ours, without the bias."""
    model = copy.deepcopy(low)
    for name in names:
        layer, twin = model.get_submodule(name), dense.get_submodule(name)
        lacking = twin.weight.detach().double() - layer.weight.detach().double()
        branch = pc.ResidualLinear(layer, twin.in_features, twin.out_features, rank)
        factors = eora_factors(lacking, moments[name], rank)
        for part, values in zip((branch.up, branch.down), factors, strict=True):
            with torch.no_grad():
                part.weight.copy_(values)
        model.set_submodule(name, branch)
    return model


@torch.no_grad()
def in_int8(model: nn.Module) -> nn.Module:
    """A copy whose branches are rounded to int8, a scale for each row."""
    model = copy.deepcopy(model)
    for layer in branches_of(model):
        for part in (layer.up, layer.down):
            scales = part.weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
            part.weight.copy_((part.weight / scales).round() * scales)
    return model


def branch_bytes(model: nn.Module, size: int) -> int:
    """Of factors, so many bytes a number; of biases that are not zero, and of scales if rounded, 4."""
    total = 0
    for layer in branches_of(model):
        total += size * (layer.up.weight.numel() + layer.down.weight.numel())
        total += 4 * layer.up.bias.numel() * bool(layer.up.bias.any())
        total += 4 * (layer.out_features + layer.rank) * (size == 1)
    return total


def branches_of(model: nn.Module) -> list[pc.ResidualLinear]:
    """The layers with a branch."""
    return [layer for layer in model.modules() if isinstance(layer, pc.ResidualLinear)]


if __name__ == "__main__":
    main()
