"""PyTorch's dynamic int8 quantisation of the same linear layers: all numbers, a quarter of the bytes."""

import copy
import warnings

import torch
from torch import nn

from peers.job import Job, NotDefinedError


def check_ratio(ratio: float) -> None:
    """Refuse any but that of int8 to float32."""
    if ratio != 0.25:
        raise NotDefinedError("int8 takes a quarter of the bytes, no other ratio")


def compress(job: Job, ratio: float) -> nn.Module:
    """A quarter of the bytes, so at 0.25 only."""
    check_ratio(ratio)
    dense = job.copy()
    linear = {name for name in job.names if isinstance(dense.get_submodule(name), nn.Linear)}
    if len(linear) < len(job.names):
        raise NotDefinedError("dynamic quantisation has linear layers only, this model has convolutions")
    configuration = dict.fromkeys(linear, torch.ao.quantization.default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao, which PyTorch does not come with
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(dense), configuration, dtype=torch.qint8)
