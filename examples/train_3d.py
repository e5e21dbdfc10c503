"""Train a sketched transformer on real text, on a mesh of replicas, pipeline stages and tensor shards.

torchrun --nproc-per-node=8 examples/train_3d.py [--mesh 2,2,2] [--checkpoint FOLDER]
python examples/train_3d.py [--quick]      starts its processes itself

The text is the reference of the Python language, as `help()` shows it, in bytes. With --checkpoint it goes on
from the last checkpoint of the folder; to survive a rank that dies:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts=3 ... --checkpoint FOLDER
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F
from torch import Tensor, nn

import panther_compile as pc

MESHES = {8: (2, 2, 2), 4: (2, 2, 1), 2: (1, 2, 1), 1: (1, 1, 1)}
MICROBATCHES, ROWS = 4, 4


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width)."""
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length), int64; the result is (batch, length, 256)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Windows of the text in a random order, another one each epoch; its place is saved with the training."""

    def __init__(self, length: int, epoch: int = 0, place: int = 0) -> None:
        data = "\n".join(topics[name] for name in sorted(topics)).encode()
        count = (len(data) - 1) // length
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self.starts = torch.arange(count) * length
        self.length, self.epoch, self.place = length, epoch, place

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and what comes next, each (count, length); every rank draws the batch of all replicas."""
        if self.place + count > len(self.starts):
            self.epoch, self.place = self.epoch + 1, 0
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(self.epoch))
        starts = self.starts[order[self.place : self.place + count]]
        self.place += count
        windows = self.data[starts[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state(self) -> dict[str, int]:
        """What `Text` takes to go on from here."""
        return {"epoch": self.epoch, "place": self.place}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats for each byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def show_progress(step: int, steps: int, loss: float, speed: float) -> None:
    """A bar that a terminal draws over, and a log has a line of now and then."""
    if not sys.stdout.isatty() and step % max(1, steps // 5) and step != steps:
        return
    bar = "#" * (24 * step // steps)
    end = "\r" if sys.stdout.isatty() and step < steps else "\n"
    print(f"[{bar:<24}] {step}/{steps}  loss {loss:.4f}  {speed:,.0f} tokens/s", end=end, flush=True)


def read_count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a whole number, 1 or more")
    return int(text)


def read_mesh(text: str) -> tuple[int, ...]:
    """Sizes of dp, pp and tp."""
    sizes = tuple(map(read_count, text.split(",")))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted the sizes of dp, pp and tp, as 2,2,1")
    return sizes


def uses_gpus() -> bool:
    """Whether each process of this machine has one."""
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def train(options: argparse.Namespace) -> None:
    """What each rank runs."""
    size = dist.get_world_size()
    dp, pp, tp = options.mesh or MESHES.get(size, (size, 1, 1))
    width, depth, length = (64, 2, 32) if options.quick else (256, 6, 128)
    device = torch.device("cpu")
    if uses_gpus():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every rank makes the same model
    dense = Transformer(width, depth, 4, length)
    # It is not trained yet: there is nothing to fit to what it answers.
    sketch = pc.SketchConfig(ratio=0.5, synthetic=False, min_params=0, allow_slower=True, progress=False)
    model = pc.sketchify(dense, config=sketch).to(device).train()
    example = torch.zeros(ROWS, length, dtype=torch.int64, device=device)
    part = pc.partition_model(
        model,
        (example,),
        mesh={"dp": dp, "pp": pp, "tp": tp},
        microbatches=MICROBATCHES,
        hardware="h100" if device.type == "cuda" else "cpu",
    )
    engine = pc.parallelize_model(model, part, data_parallel="ddp" if dp > 1 else None, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    checkpoints = pc.TrainingCheckpoints(options.checkpoint) if options.checkpoint else None
    resumed = checkpoints.load(engine, optimizer) if checkpoints else None
    first = resumed.step if resumed else 0
    text = Text(length, **(resumed.extra["text"] if resumed else {}))
    is_first = dist.get_rank() == 0
    if is_first:
        print(part)
        moved = {one.purpose: one.intra_node_bytes + one.inter_node_bytes for one in part.traffic}
        amounts = ", ".join(f"{count / 1e6:,.2f} MB for {purpose}" for purpose, count in moved.items())
        print(f"bubble {part.bubble:.1%} predicted; moved in a step: {amounts}")
        if resumed:
            print(f"goes on from step {first}, {resumed.path}")
    batch = ROWS * MICROBATCHES
    start = time.perf_counter()
    for step in range(first + 1, options.steps + 1):
        inputs, targets = (rows[engine.devices.dp :: dp].to(device) for rows in text.take(batch * dp))
        loss = engine.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            speed = (step - first) * batch * dp * length / (time.perf_counter() - start)
            show_progress(step, options.steps, float(loss), speed)
        if checkpoints and (step % options.every == 0 or step == options.steps):
            checkpoints.save(engine, optimizer, step=step, extra={"text": text.state()})
    if checkpoints:
        checkpoints.wait()


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=read_mesh, metavar="DP,PP,TP", help="of as many processes, as 2,2,1")
    parser.add_argument("--steps", type=read_count, help="of the optimizer; 200 if not given, with --quick 6")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save here, and go on from what is there")
    parser.add_argument("--every", type=read_count, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, two processes")
    options = parser.parse_args()
    options.steps = options.steps or (6 if options.quick else 200)
    if "RANK" not in os.environ:
        count = torch.Size(options.mesh or MESHES[2]).numel()
        torch.distributed.run.main(["--standalone", f"--nproc-per-node={count}", __file__, *sys.argv[1:]])
        return
    dist.init_process_group("nccl" if uses_gpus() else "gloo", timeout=timedelta(minutes=5))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
