"""What kinds have in common: how a matrix may be stored, its spectrum, and its factors."""

import zlib

import torch
from torch import Tensor

from panther_compile.config import SketchConfig
from panther_compile.factorization.candidates import Candidate, LinearCandidate
from panther_compile.factorization.cost import device_class
from panther_compile.factorization.factorize import LowRankPair, factorize, singular_values
from panther_compile.layers.base import SketchedLayer
from panther_compile.records import Fitted, Unit

# Spectra of larger matrices cost minutes on a CPU; the planner then assumes a common decay.
LARGEST_SPECTRUM = 4096


def numbers_of(tensor: Tensor | None) -> int:
    """Stored numbers of an optional parameter."""
    return 0 if tensor is None else tensor.numel()


def can_compute_spectrum(weight: Tensor) -> bool:
    """Whether the weight, taken as a matrix (O, the rest), has data and is not too large."""
    return not weight.is_meta and min(weight.shape[0], weight[0].numel()) <= LARGEST_SPECTRUM


def spectrum(weight: Tensor, *, energies: bool) -> Tensor | None:
    """Singular values of a weight (O, I), or None where they are not wanted or not to be had."""
    return singular_values(weight.detach()) if energies and can_compute_spectrum(weight) else None


def matrix_unit(name: str, weight: Tensor, bias: Tensor | None, *, energies: bool) -> Unit:
    """The unit of one weight (O, I) with its bias.

    Never as a plain pair, which is the pivoted form in more numbers.
    """
    (rows, columns), bias_numbers = weight.shape, numbers_of(bias)
    candidates: tuple[Candidate, ...] = ()
    if min(rows, columns) > 1:
        values = spectrum(weight, energies=energies)
        candidates = (LinearCandidate(rows, columns, "pivoted", singular_values=values),)
    return Unit(
        name,
        tuple(weight.shape),
        weight.numel() + bias_numbers,
        bias_numbers,
        candidates,
        device_class(weight.device),
    )


def fit_matrix(weight: Tensor, name: str, rank: int, config: SketchConfig) -> LowRankPair:
    """Factorize a weight (O, I) on the device asked for, with random numbers of its own."""
    weight = weight.detach()
    if config.device is not None:
        weight = weight.to(config.device)
    return factorize(
        weight,
        rank,
        method=config.method,
        sketch=config.sketch,
        generator=generator_for(name, config, weight.device),
    )


def fitted_record(
    layer: SketchedLayer, weight: Tensor, name: str, method: str, config: SketchConfig
) -> Fitted:
    """What came of a weight that a layer stands for now, by the name of its unit."""
    error = layer.weight_error(weight, generator_for(name, config, weight.device))
    return Fitted(layer.scheme, layer.ranks, method, error)


def generator_for(name: str, config: SketchConfig, device: torch.device) -> torch.Generator:
    """A generator that depends on the seed and the layer's name alone, not on the order of work."""
    return torch.Generator(device).manual_seed(config.seed + zlib.crc32(name.encode()))
