"""Peak memory and time of `sketchify_checkpoint` on random decoders of Llama's shape, in bfloat16.

    python benchmarks/streamed.py 3b --blocks 2 4 --folder FOLDER
    python benchmarks/streamed.py 1b --blocks 2 4 --folder FOLDER --batches 8 --length 64

Each count of blocks is a process of its own, with one thread. Memory is what the process gains between the
call and its peak, as Linux counts it (VmHWM): its own pages, and beside them those of mapped files, which the
system would take back if others needed them. A line of JSON each, then one for each whole model, estimated:
time from that of a block, by the work on its matrices; memory from the largest of them.
"""

import argparse
import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from process_memory import process_memory, watch_peak
from safetensors.torch import save_file
from torch import Tensor

import panther_compile as pc
from panther_compile.factorization.factorize import decomposition_work


@dataclass(frozen=True)
class Shape:
    """Widths of a decoder, and how many blocks the whole model has."""

    hidden: int
    between: int
    heads: int
    kv_heads: int
    blocks: int
    vocabulary: int = 128256
    tied: bool = False

    def matrices(self) -> list[tuple[int, int]]:
        """The shapes (O, I) of the matrices of a block."""
        cached = self.hidden // self.heads * self.kv_heads
        attention = [(self.hidden, self.hidden)] * 2 + [(cached, self.hidden)] * 2
        return [*attention, *[(self.between, self.hidden)] * 2, (self.hidden, self.between)]


SHAPES = {
    "tiny": Shape(512, 1536, 8, 2, 4, 8192, tied=True),
    "half": Shape(1024, 4096, 16, 4, 16, tied=True),
    "1b": Shape(2048, 8192, 32, 8, 16, tied=True),
    "3b": Shape(3072, 8192, 24, 8, 28, tied=True),
    "8b": Shape(4096, 14336, 32, 8, 32),
    "70b": Shape(8192, 28672, 64, 8, 80),
}
STD = 0.02


def llama_config(shape: Shape, blocks: int) -> transformers.LlamaConfig:
    """The config of a model of so many blocks."""
    return transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.between,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=blocks,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
    )


def write_model(folder: Path, shape: str, blocks: int) -> None:
    """Write a model of random weights, a file for each block."""
    config = llama_config(SHAPES[shape], blocks)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in transformers.LlamaForCausalLM(config).named_parameters()}
    draws = torch.Generator().manual_seed(0)

    def drawn(size: torch.Size) -> Tensor:
        made = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draws).mul_(STD)
        return made.bfloat16()

    places: dict[str, str] = {}
    for part in dict.fromkeys(name.rpartition(".layers.")[2].partition(".")[0] for name in shapes):
        names = [name for name in shapes if name.rpartition(".layers.")[2].partition(".")[0] == part]
        file = f"part-{part}.safetensors"
        save_file({name: drawn(shapes[name]) for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


class Watch:
    """What memory is at its highest while it is open.

    Attributes:
        own: of it what is the process's own, GB.
        used: of the disk, GB.
    """

    def __init__(self, folder: Path) -> None:
        self.own = self.used = 0.0
        self._folder, self._done = folder, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        watch_peak()
        self._resident, self._own = process_memory("VmRSS"), process_memory("RssAnon")
        self._free = shutil.disk_usage(self._folder).free
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = (process_memory("VmHWM") - self._resident) / 1e9

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.own = max(self.own, (process_memory("RssAnon") - self._own) / 1e9)
            self.used = max(self.used, (self._free - shutil.disk_usage(self._folder).free) / 1e9)


def measure(folder: Path, options: argparse.Namespace, blocks: int) -> None:
    """Sketch a model of so many blocks, and print what it took."""
    torch.set_num_threads(1)
    torch.linalg.eigh(torch.eye(8, dtype=torch.float64))  # its library is loaded
    source = folder / "dense"
    source.mkdir()
    write_model(source, options.shape, blocks)
    draws = torch.Generator().manual_seed(1)
    sizes = (options.batches, 1, options.length)
    tokens = torch.randint(0, SHAPES[options.shape].vocabulary, sizes, generator=draws)
    data = [{"input_ids": batch} for batch in tokens]
    size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no longer counted
    begun, cpu = time.perf_counter(), time.process_time()
    with Watch(folder) as watch:
        pc.sketchify_checkpoint(
            source,
            folder / "small",
            options.ratio,
            data=data or None,
            synthetic=False,
            progress=options.progress,
        )
    row = {
        "shape": options.shape,
        "blocks": blocks,
        "tokens": options.batches * options.length,
        "model GB": round(size, 2),
        "peak GB": round(watch.peak, 2),
        "own GB": round(watch.own, 2),
        "disk GB": round(watch.used, 2),
        "seconds": round(time.perf_counter() - begun),
        "CPU seconds": round(time.process_time() - cpu),
    }
    print(json.dumps(row), flush=True)


def work_and_memory(shape: Shape, *, with_data: bool) -> tuple[float, float]:
    """What a block takes and what its largest matrix holds, but for common factors.

    Without data the spectrum of each matrix (O, I) is taken and its factors; with data also those of the
    covariances of its inputs (I, I) and of the gradients of its outputs (O, O).
    """
    matrices = shape.matrices()
    work = sum(decomposition_work(*one) for one in matrices)
    if with_data:
        work += sum(float(size) ** 3 for one in matrices for size in one)
        return work, float(max(map(max, matrices))) ** 2
    return work, float(max(map(math.prod, matrices)))


def estimate(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What a whole model would take, from what few blocks of another did.

    Args:
        rows: of one shape, by rising counts of blocks.
        name: of the whole model's shape.
    """
    first, last = rows[0], rows[-1]
    seconds = (last["CPU seconds"] - first["CPU seconds"]) / (last["blocks"] - first["blocks"])
    with_data = last["tokens"] > 0
    work, held = work_and_memory(SHAPES[last["shape"]], with_data=with_data)
    wanted, needed = work_and_memory(SHAPES[name], with_data=with_data)
    embeddings = SHAPES[name].vocabulary * SHAPES[name].hidden * 2 / 1e9  # mapped, while they are written
    return {
        "whole model": name,
        "blocks": SHAPES[name].blocks,
        "tokens": last["tokens"],
        "seconds a block": round(seconds * wanted / work),
        "hours": round(SHAPES[name].blocks * seconds * wanted / work / 3600, 1),
        "peak GB": round(max(last["own GB"] * needed / held, embeddings), 1),
    }


def main() -> None:
    """Measure each count of blocks in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="with room on its disk"
    )
    parser.add_argument("--batches", type=int, default=0, help="of data; none sketches the weights alone")
    parser.add_argument("--length", type=int, default=64, help="tokens of a batch")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    if len(options.blocks) == 1:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            measure(Path(scratch), options, options.blocks[0])
        return
    place = sys.argv.index("--blocks")
    rest = sys.argv[:place] + sys.argv[place + 1 + len(options.blocks) :]
    rows = []
    for blocks in sorted(options.blocks):
        run = subprocess.run(
            [sys.executable, *rest, "--blocks", str(blocks)],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        print(run.stdout, end="", flush=True)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    for name in ("1b", "3b", "8b", "70b"):
        print(json.dumps(estimate(rows, name)))


if __name__ == "__main__":
    main()
