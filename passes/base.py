"""What a pass is: one kind of dense layer in, its sketched stand-in out.

Exact passes keep a model's function and may restructure it; approximate passes replace layers by
sketches. Both leave their input alone where a check fails, and say why.
"""

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from panther_compile.candidates import Candidate, LinearCandidate, SignSketchCandidate
from panther_compile.config import SketchConfig
from panther_compile.factorize import LowRank, factorize, singular_values
from panther_compile.layers.base import SketchedLayer
from panther_compile.records import Choice, Fitted, Site, Unit

Ready = Mapping[str, tuple[SketchedLayer, Fitted]]
"""Layers that were fitted elsewhere, on data, by the name of the unit, and what came of them."""

NOTHING_READY: Ready = MappingProxyType({})

# Spectra of larger matrices cost minutes on a CPU; the planner then assumes a common decay.
LARGEST_SPECTRUM = 4096


class SketchPass(Protocol):
    """One approximate pass. Passes hold no state; `passes/default.py` lists them."""

    def kind(self, module: nn.Module) -> str | None:
        """What this pass calls the module ("Linear"), or None if it is not the pass's business."""

    def why_not(self, module: nn.Module) -> str | None:
        """Why a module of this kind must be left alone, or None if it can be sketched."""

    def units(self, site: Site, config: SketchConfig, *, energies: bool) -> tuple[Unit, ...]:
        """The weights of a site and their candidates; `energies` asks for their spectra."""

    def unit_names(self, site: Site) -> tuple[str, ...]:
        """Their names alone."""

    def sketch(
        self, site: Site, choices: Mapping[str, Choice], config: SketchConfig, ready: Ready = NOTHING_READY
    ) -> tuple[SketchedLayer, dict[str, Fitted]]:
        """The stand-in, and what came of each unit that was chosen to be sketched; `ready` ones are taken."""


@runtime_checkable
class SharingPass(SketchPass, Protocol):
    """A pass that can let several modules with one weight share its factors."""

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """Whether `other`, which has the same weight as `module`, can use the factors of its stand-in."""

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """The stand-in for `other`, with the factors of `layer`."""


def numbers_of(tensor: Tensor | None) -> int:
    """Stored numbers of an optional parameter."""
    return 0 if tensor is None else tensor.numel()


def can_compute_spectrum(weight: Tensor) -> bool:
    """Whether the weight, taken as a matrix (O, the rest), has data and is not too large."""
    return not weight.is_meta and min(weight.shape[0], weight[0].numel()) <= LARGEST_SPECTRUM


def spectrum(weight: Tensor, *, energies: bool) -> Tensor | None:
    """Singular values of a weight (O, I), or None where they are not wanted or not to be had."""
    return singular_values(weight.detach()) if energies and can_compute_spectrum(weight) else None


def matrix_candidates(weight: Tensor, config: SketchConfig, *, energies: bool) -> tuple[Candidate, ...]:
    """How a weight (O, I) may be stored; never as a plain pair, which is the pivoted form in more numbers."""
    out_features, in_features = weight.shape
    if min(weight.shape) < 2:
        return ()
    if config.method == "panther":
        return (SignSketchCandidate(out_features, in_features, "pair"),)
    values = spectrum(weight, energies=energies)
    return (LinearCandidate(out_features, in_features, "pivoted", singular_values=values),)


def fit_matrix(weight: Tensor, name: str, rank: int, config: SketchConfig) -> LowRank:
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


def generator_for(name: str, config: SketchConfig, device: torch.device) -> torch.Generator:
    """A generator that depends on the seed and the layer's name alone, not on the order of work."""
    return torch.Generator(device).manual_seed(config.seed + zlib.crc32(name.encode()))
