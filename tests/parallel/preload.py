"""What every rank needs, imported once, before the processes are forked."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import zoo

torch.set_num_threads(1)
for name in ("bert", "gpt2", "vit", "resnet"):
    zoo.ZOO[name].build()
