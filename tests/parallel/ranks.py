"""Real processes that speak gloo: started once for all tests, and given one job after the other.

A job is a function of this folder, called as `job(rank, **options)` in every process of a fresh process
group. What it gives comes back as a list, one for each rank; what it raises is raised here.
"""

import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

TIMEOUT = 60  # seconds, of the process group
# Torch 2.11 refuses schedules, and tensors without a gradient between stages; the error says so.
SENDS_ALL = "output_grads" in inspect.signature(PipelineStage).parameters
OLD_TORCH = "torch 2.13 or newer"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["parallel.preload"])
_WORKERS = []  # process and pipe of each rank; a job of n ranks runs on the first n


def _workers(count):
    """The processes of so many ranks; those that are missing are started."""
    # The server knows no path but this variable, and passes over what it cannot import.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    while len(_WORKERS) < count:
        mine, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _WORKERS.append((process, mine))
    return _WORKERS[:count]


def stop():
    """End the processes; the next job starts new ones."""
    for _, pipe in _WORKERS:
        pipe.close()
    for process, _ in _WORKERS:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
    _WORKERS.clear()


class Ranks:
    """So many processes that wait for jobs."""

    def __init__(self, count):
        self.count = count

    def run(self, job, *, timeout=TIMEOUT, **options):
        """Run a job on every rank; results in the order of ranks."""
        workers = _workers(self.count)
        with tempfile.TemporaryDirectory() as folder:
            group = os.path.join(folder, "store"), self.count, timeout
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((job.__module__, job.__name__, rank, group, options))
            deadline = time.monotonic() + 200
            answers = []
            try:
                for rank, (_, pipe) in enumerate(workers):
                    if not pipe.poll(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"rank {rank} gives no answer")
                    answers.append(pipe.recv())
            except (TimeoutError, EOFError):
                stop()  # what they would still say is no answer to another job
                raise
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failed and not SENDS_ALL and any(OLD_TORCH in text for text in failed):
            pytest.skip(f"torch {torch.__version__}: ScheduleError, see docs/parallel.md")
        if failed:
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]


def serve(pipe):
    """Run jobs until the pipe is closed."""
    import torch
    import torch.distributed as dist

    assert "parallel.preload" in sys.modules
    torch.set_num_threads(1)
    while True:
        try:
            module, name, rank, (store, count, timeout), options = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(rank)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that ends before another has met it would break that one's start
            answer = None, getattr(importlib.import_module(module), name)(rank, **options)
        except BaseException:
            answer = traceback.format_exc(), None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
