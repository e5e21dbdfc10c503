"""Weights as int8, a scale a row, or int4, one for 32, by torchao: of a dense model, or of factors."""

import importlib.util
import warnings
from collections.abc import Collection

import torch
from torch import nn

from peers.int8 import check_ratio
from peers.job import Job, NotDefinedError

GROUP = 32  # inputs that have a scale in common, in int4


def compress(job: Job, ratio: float) -> nn.Module:
    """The dense layers: a quarter of the bytes, so at 0.25 only."""
    check_ratio(ratio)
    return quantize_weights(job.copy(), job.names)


def compress_to_int4(job: Job, ratio: float) -> nn.Module:
    """The dense layers in int4, .16 of the bytes with its scales; in the column of int8."""
    check_ratio(ratio)
    return quantize_weights(job.copy(), job.names, bits=4)


def quantize_weights(model: nn.Module, names: Collection[str], *, bits: int = 8) -> nn.Module:
    """Quantise the linear layers at some names, or within what stands there; in place.

    Raises:
        NotDefinedError: torchao is not installed, there are convolutions under the names, or inputs that
            cannot be divided.
    """
    if importlib.util.find_spec("torchao") is None:
        raise NotDefinedError("torchao is not installed: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))

    modules = dict(model.named_modules())
    # The projections of an attention are one module in a model whose attention is not unfolded.
    found = (modules[name] if name in modules else modules[name.rpartition(".")[0]] for name in names)
    inside = {part for one in found for part in one.modules()}
    if any(isinstance(part, nn.Conv2d) for part in inside):
        raise NotDefinedError("torchao has such weights for linear layers only, this model has convolutions")
    odd = [part for part in inside if isinstance(part, nn.Linear) and part.in_features % GROUP]
    if bits == 4 and odd:
        raise NotDefinedError(f"int4 with a scale for {GROUP} inputs, of a layer of {odd[0].in_features}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A factor that several layers share comes up again as an int8 tensor, which torchao would not take.
        quantize_(
            model,
            four if bits == 4 else Int8WeightOnlyConfig(),
            filter_fn=lambda part, _: (
                part in inside and isinstance(part, nn.Linear) and type(part.weight) is nn.Parameter
            ),
        )
    return model
