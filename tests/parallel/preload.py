"""What every rank needs, imported once, before the processes are forked."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import zoo
from parallel import (
    behavior,
    checkpoint_jobs,
    matrix_jobs,
    metrics_jobs,
    module_jobs,
    prepared,
    sharding_jobs,
    tensor_jobs,
    training,
)

JOBS = (
    behavior,
    checkpoint_jobs,
    matrix_jobs,
    metrics_jobs,
    module_jobs,
    sharding_jobs,
    tensor_jobs,
)
torch.set_num_threads(1)
for name in ("bert", "gpt2", "vit", "resnet"):
    zoo.ZOO[name].build()
# Much is imported and kept when a model is read; no backward runs here, whose threads could not be forked.
training.partition(*training.build("mlp"), {"dp": 2, "pp": 2, "tp": 2}).split()
prepared.prepare()
gc.collect()
gc.freeze()  # else each process makes a copy of all this to collect what it cannot free
