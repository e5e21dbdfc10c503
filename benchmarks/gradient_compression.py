"""What torch's communication hooks save and cost: bytes of a step, error of the gradient, loss.

    python benchmarks/gradient_compression.py [--steps 30] [--output docs/benchmarks/gradient_compression.md]

A small GPT, dense and sketched, learns Python's documentation byte by byte on two replicas of one machine
(gloo). Each hook sees the same batches in the same order. The error is the distance of the gradient that the
hook leaves from the one of a plain all-reduce, over that one's norm: of the last step, and of the sum over
all steps along the same path, where an error that is fed back cancels.
"""

import argparse
import platform
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import panther_compile as pc

sys.path.insert(0, str(Path(__file__).parent))
from accuracy_models.gpt import GPT

RANKS, ROWS, LENGTH = 2, 8, 128
KINDS = ("dense", "sketched at .5")
HOOKS = ("none", "fp16", "PowerSGD, rank 1", "PowerSGD, rank 4", "PowerSGD, rank 16")

SIZES = {"fp16": 2}


@dataclass
class Row:
    """What a hook came to.

    Attributes:
        megabytes: that a rank hands to all-reduces in a step; of PowerSGD by its own count.
        last, summed: errors of the gradient, relative.
        loss: of the last ten batches, in nats a byte.
    """

    megabytes: float
    last: float
    summed: float
    loss: float


def main() -> None:
    """Train with each hook, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, help="write the table there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.pt"
        multiprocessing.spawn(train_all, (folder, options.steps), nprocs=RANKS)
        rows: dict[tuple[str, str], Row] = torch.load(kept, weights_only=False)
    text = "\n".join(lines(rows, options.steps))
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")


def train_all(rank: int, folder: str, steps: int) -> None:
    """Every model with every hook, on one rank; rank 0 keeps the rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    stream = torch.tensor(list(text.encode()))
    rows = {}
    for kind in KINDS:
        for hook in HOOKS:
            rows[kind, hook] = train(make(kind), hook, stream, steps)
            if rank == 0:
                print(kind, hook, rows[kind, hook], flush=True)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.destroy_process_group()


def make(kind: str) -> nn.Module:
    """The model as it starts."""
    torch.manual_seed(0)
    model = GPT()
    if kind == KINDS[0]:
        return model
    return pc.sketchify(model, 0.5, synthetic=False, progress=False)


def train(model: nn.Module, hook: str, stream: Tensor, steps: int) -> Row:
    """A training with a hook, and beside it the gradients that it would have had without."""
    # As `engine.module` is, but for one bucket: over gloo PowerSGD's collectives of several overtake each
    # other, and it aborts.
    replica = DistributedDataParallel(model, bucket_cap_mb=64)
    plain = list(model.parameters())
    if (found := communication(hook)) is not None:
        replica.register_comm_hook(*found)
    optimizer = torch.optim.AdamW(plain, lr=1e-3)
    wanted_sum, found_sum, losses, last = torch.zeros(()), torch.zeros(()), [], 0.0
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(stream) - LENGTH - 1, (RANKS, ROWS, 1), generator=generator)
        batch = stream[starts[dist.get_rank()] + torch.arange(LENGTH + 1)]
        with replica.no_sync():
            loss_of(replica, batch).backward()
        wanted = torch.cat([p.grad.flatten() for p in plain if p.grad is not None])
        dist.all_reduce(wanted)
        wanted /= RANKS
        optimizer.zero_grad()
        loss = loss_of(replica, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in plain if p.grad is not None])
        wanted_sum, found_sum = wanted_sum + wanted, found_sum + gradient
        last = float((gradient - wanted).norm() / wanted.norm())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
        optimizer.step()
        optimizer.zero_grad()
    size = gradient.numel() * SIZES.get(hook, 4) / 1e6
    if found is not None and isinstance(found[0], powerSGD_hook.PowerSGDState):
        size /= found[0].compression_stats()[0]
    summed = float((found_sum - wanted_sum).norm() / wanted_sum.norm())
    return Row(size, last, summed, sum(losses[-10:]) / 10)


def loss_of(model: nn.Module | Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def communication(hook: str) -> tuple[Any, Callable[..., Any]] | None:
    """State and hook as `register_comm_hook` takes them; None for a plain all-reduce."""
    if hook == "none":
        return None
    if hook == "fp16":
        return None, default_hooks.fp16_compress_hook
    rank = int(hook.split()[-1])
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    return state, powerSGD_hook.powerSGD_hook


def lines(rows: dict[tuple[str, str], Row], steps: int) -> list[str]:
    """The document."""
    found = [
        "# Gradient compression by torch's communication hooks",
        "",
        "Made by `benchmarks/gradient_compression.py`: the GPT of accuracy.py from its random start, "
        f"{steps} steps of AdamW on {RANKS} gloo",
        f"processes, {ROWS} x {LENGTH} bytes each; {platform.machine()}, PyTorch {torch.__version__}. "
        "`engine.module.register_comm_hook` takes",
        "the hooks. Errors are relative: of the last step's gradient, and of the sum over all steps. "
        "One bucket: over gloo",
        "PowerSGD's collectives of several overtake each other, and torch aborts. "
        "The hook for bfloat16 wants NCCL.",
        "",
        "| model | hook | MB a step | error, last step | error, summed | loss |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (kind, hook), row in rows.items():
        found.append(
            f"| {kind} | {hook} | {row.megabytes:.2f} | {row.last:.1e} | {row.summed:.1e} | {row.loss:.3f} |"
        )
    return [*found, ""]


if __name__ == "__main__":
    main()
