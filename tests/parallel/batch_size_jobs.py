"""Trials of batch sizes; as a script under torchrun, the search of every rank."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from parallel.training import build, draw, loss_fn, partition

from panther_compile import find_batch_size, parallelize_model
from panther_compile.errors import ParallelError
from panther_compile.parallel.agreement import find_timeout

COUNT = 4  # microbatches
TIMEOUT = timedelta(minutes=29)  # longer than the test has, and not torch's own


def step(rows, mesh, **options):
    assert find_timeout(torch.device("cpu")) == TIMEOUT
    model, _ = build("mlp")
    example = (torch.zeros(rows // COUNT, 16),)
    engine = parallelize_model(model, partition(model, example, mesh, COUNT), loss_fn=loss_fn, **options)
    batch, target = draw(example, COUNT, dist.get_rank())
    engine.step(*batch, target)


def out_of_memory(rows):
    """Rank 1 asks for more than there is above 40 rows, while rank 0 waits for it in a stage."""
    if dist.get_rank() == 1 and rows > 40:
        torch.empty(2**60)
    step(rows, {"pp": 2})


def killed(rows):
    """As the kernel does it, above 8 rows."""
    if dist.get_rank() == 0 and rows > 8:
        os.kill(os.getpid(), signal.SIGKILL)
    step(rows, {"dp": 2}, data_parallel="fsdp")


def wrong(rows):
    if dist.get_rank() == 1:
        raise KeyError("a mistake of the user's")
    dist.barrier()


def main(folder):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = {
        "out of memory": find_batch_size(
            out_of_memory, multiple_of=COUNT, predicted=lambda rows: rows <= 40, maximum=44
        ),
        "killed": find_batch_size(killed, start=8, multiple_of=COUNT, maximum=12),
    }
    try:
        find_batch_size(wrong)
    except ParallelError as error:
        found["wrong"] = str(error)
    dist.barrier()  # the training's own group is as it was
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
