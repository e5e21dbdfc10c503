"""Units whose ways to store them are judged in the metric of data, in place of by the weight alone."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from panther_compile.factorization.candidates import Candidate, LinearCandidate
from panther_compile.records import Unit


def in_data(unit: Unit, values: Tensor | None, energies: Mapping[str, Tensor]) -> Unit:
    """The unit as data tells of it; itself where data tells nothing.

    Args:
        unit: with candidates judged by its weight.
        values: singular values of its matrix in the metric of data.
        energies: what each rank of its kernel keeps there, by scheme.
    """
    if values is None and not energies:
        return unit
    return replace(
        unit, candidates=tuple(_judged(one, values, energies) for one in unit.candidates), in_data=True
    )


def _judged(one: Candidate, values: Tensor | None, energies: Mapping[str, Tensor]) -> Candidate:
    if values is not None and isinstance(one, LinearCandidate):
        return LinearCandidate(one.out_features, one.in_features, one.scheme, singular_values=values.cpu())
    if one.scheme not in energies:
        return one
    judged = copy.copy(one)
    judged.energies = energies[one.scheme]
    return judged
