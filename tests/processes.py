"""Functions in processes of their own, forked from this one, to be killed."""

import os
import random
import signal
import time
import traceback
from contextlib import contextmanager


class Process:
    """A fork of this process that runs a function, and nothing else."""

    def __init__(self, function, *args):
        self.pid = os.fork()
        if self.pid == 0:
            try:
                function(*args)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        """The exit status, negative for a signal."""
        pid, self.pid = self.pid, None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def started(function, *args):
    """A process that is killed at the end, if it still runs."""
    process = Process(function, *args)
    try:
        yield process
    finally:
        if process.pid is not None:
            process.kill()
            process.wait()


class Killed:
    """A function that is killed at a moment of its run."""

    def __init__(self, function, seed):
        self.function, self.moment = function, random.Random(seed).random()

    def run(self):
        whole = self.duration()
        with started(self._for_ever):
            time.sleep(self.moment * whole)

    def _for_ever(self):
        while True:
            self.function()

    def duration(self):
        """Seconds of a whole run, measured once."""
        if not hasattr(self.function, "seconds"):
            begin = time.perf_counter()
            self.function()
            self.function.seconds = time.perf_counter() - begin
        return self.function.seconds
