"""A training that goes on with the ranks that are left; a script under torchrun, once for each node."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from parallel.training import build, draw, loss_fn, partition

from panther_compile import TrainingCheckpoints, parallelize_model

COUNT = 8  # microbatches of a step, over all replicas


def batch_of(inputs, step):
    (x,), target = draw(inputs, COUNT, seed=step)
    return x, target


def main(folder, steps, dies_after):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    model, inputs = build("mlp")
    plan = partition(model, inputs, {"dp": world}, COUNT // world)
    replicas = "ddp" if world > 1 else None
    engine = parallelize_model(model, plan, data_parallel=replicas, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    checkpoints = TrainingCheckpoints(folder)
    resumed = checkpoints.load(engine, optimizer)
    for step in range(resumed.step if resumed else 0, int(steps)):
        x, target = (rows.chunk(world)[rank] for rows in batch_of(inputs, step))
        loss = engine.step(x, target)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(engine, optimizer, step=step + 1)
        checkpoints.wait()
        if rank == 0:
            with Path(folder, "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(loss), "ranks": world}) + "\n")
        if step + 1 == int(dies_after) and "THIS_NODE_DIES" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent, with all that it would say
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
