"""What torchrun would say to a process, for the libraries that read it."""

import os
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def as_of_torchrun(rank):
    size = str(dist.get_world_size())
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",  # nobody listens: the process group is there already
        "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
    }
    with mock.patch.dict(os.environ, variables):
        yield
