"""Real processes that speak gloo: started once, and given one job after the other.

A job is a function of this folder, called as `job(rank, **options)` in every process of a fresh process
group. What it gives comes back as a list, one for each rank; what it raises is raised here.
"""

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta

TIMEOUT = 60  # seconds, of the process group
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["parallel.preload"])


class Ranks:
    """Processes that wait for jobs."""

    def __init__(self, count):
        self.count = count
        self._pipes = []
        self._processes = []
        for rank in range(count):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=serve, args=(rank, count, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, job, *, timeout=TIMEOUT, **options):
        """Run a job on every rank; results in the order of ranks."""
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for pipe in self._pipes:
                pipe.send((job.__module__, job.__name__, store, timeout, options))
            deadline = time.monotonic() + 200
            answers = []
            for rank, pipe in enumerate(self._pipes):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} gives no answer")
                answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def serve(rank, count, pipe):
    """Run jobs until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            module, name, store, timeout, options = pipe.recv()
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
            answer = None, getattr(importlib.import_module(module), name)(rank, **options)
        except BaseException:
            answer = traceback.format_exc(), None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
