"""What two coupled layers keep of the features between them, and their weights in closed form.

The reader's output W a loses least where it is computed from the kept features k = T a with the best weights
for them, W' = W S Tᵀ (T S Tᵀ)⁻¹, S = E[a aᵀ]: an interpolative decomposition of the reader's input in the
metric of G, the weight of errors at its output.

- Features that pass one by one can only be chosen. All are kept at first; those are left out, some at a
  time, whose absence costs least with the best weights for the rest: of feature j ‖G^½ w_j‖² / (S⁻¹)_jj, w_j
  its weights by then. This is the rule of Hassibi and Stork, "Second order derivatives for network
  pruning" (1992), for features in place of single weights, as ZipLM (2302.04089) has it.
- Of a head any directions can be kept: T is the left factor of the truncated G^½ W_h S_h^½; the
  value's weights become T W_v. Heads that share a value share T, of their summed squares.

With S = L Lᵀ in the order in which features are kept, the first k columns of G^½ W L are what k features
keep, whitened: what the others lose and what ranks of the narrow reader lose are read off them.
"""

# O out_features of the reader, N features between the two, I in_features of the writers
# H heads, D features of a head, K kept features of a head
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther_compile.factorization.fit_matrix import FittedPair, fit_matrix_to, fit_whole_to, shifted_bias
from panther_compile.factorization.gram import gram
from panther_compile.factorization.metric import among, rooted, unrooted
from panther_compile.factorization.moments import Moments
from panther_compile.factorization.whiten import lower_root, root_of, solve
from panther_compile.kinds.targets import Target
from panther_compile.layers.base import copy_into
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.planning.coupled import Coupling

_STEPS = 48  # in which features are left out
_GRID = 12  # numbers of features with known losses, where they pass one by one


@dataclass(frozen=True, slots=True)
class Between:
    """The features between coupled layers, as the dense model has them.

    Attributes:
        basis: which features to keep, the first ones first: int64 places `(N,)`; of heads the rows of T,
            float32 `(heads of the writer, D, D)`.
        covariance: S with a ridge, float32 `(N, N)`, about the mean if the reader has a bias.
        mean: `(N,)`, zeros if it has none.
    """

    basis: Tensor
    covariance: Tensor
    mean: Tensor


def choose_features(coupling: Coupling, rows: Tensor, covariance: Tensor) -> Tensor:
    """The basis of `Between`, float64 if it is of heads.

    Args:
        coupling: the layers.
        rows: G^½ W of the reader, float64 `(O, N)`.
        covariance: S, float64 `(N, N)`.
    """
    return (_by_heads if coupling.padded else _one_by_one)(coupling, rows, covariance)


def _one_by_one(coupling: Coupling, rows: Tensor, covariance: Tensor) -> Tensor:
    places = torch.arange(coupling.width, device=rows.device)
    inverse, best = torch.linalg.inv(covariance), rows
    order = []
    most = max(1, coupling.width // _STEPS)
    while len(places):
        ranked = (best.square().sum(0) / inverse.diagonal()).argsort()
        out, rest = ranked[:most], ranked[most:].sort().values
        order.append(places[out])
        given = torch.linalg.solve(inverse[out][:, out], inverse[out][:, rest])
        best = best[:, rest] - best[:, out] @ given
        across, inverse = inverse[rest[:, None], out], inverse[rest[:, None], rest]  # without a third copy
        inverse -= across @ given
        places = places[rest]
    return torch.cat(order).flip(0)


def _by_heads(coupling: Coupling, rows: Tensor, covariance: Tensor) -> Tensor:
    bases = []
    for head in range(coupling.heads // coupling.shared):
        readers = range(head * coupling.shared, (head + 1) * coupling.shared)
        spans = [slice(one * coupling.width, (one + 1) * coupling.width) for one in readers]
        # Of heads that share a value: one metric of their inputs, as it is the same value in all of them.
        root = root_of(torch.stack([covariance[span, span] for span in spans]).mean(0))
        size = torch.stack([rows[:, span].T @ rows[:, span] for span in spans]).sum(0)
        vectors = torch.linalg.eigh(root.factor.T @ size @ root.factor)[1].flip(1)
        bases.append(vectors.T @ root.inverse)
    return torch.stack(bases)


def keep(coupling: Coupling, basis: Tensor, kept: int, features: Tensor) -> Tensor:
    """T a of features a (..., N) of the reader, or of a writer: (..., K of each head)."""
    if not coupling.padded:
        return features[..., basis[:kept]]
    heads = features.unflatten(-1, (-1, coupling.width))
    repeats = heads.shape[-2] // len(basis)
    rows = basis[:, :kept].repeat_interleave(repeats, 0).to(features)
    return torch.einsum("...hd,hkd->...hk", heads, rows).flatten(-2)


def extend(coupling: Coupling, basis: Tensor, kept: int) -> Tensor:
    """Features (N, K of each head) that T maps to the kept ones, and to zeros of the others, float64."""
    if not coupling.padded:
        extended = torch.zeros(coupling.width, kept, dtype=torch.float64, device=basis.device)
        extended[basis[:kept], torch.arange(kept, device=basis.device)] = 1.0
        return extended
    inverse = torch.linalg.inv(basis.double())[:, :, :kept].repeat_interleave(coupling.shared, 0)
    return torch.block_diag(*inverse)


def features_kept(coupling: Coupling) -> list[int]:
    """The numbers of features of a head to find losses for, descending; all of them first."""
    if coupling.padded:
        return list(range(coupling.width, 0, -1))
    step = 8 if coupling.width >= 120 else 1
    grid = [coupling.width * share // _GRID for share in range(_GRID, 0, -1)]
    return list(dict.fromkeys([coupling.width, *(max(1, kept - kept % step) for kept in grid[1:])]))


def reader_losses(
    coupling: Coupling, rows: Tensor, covariance: Tensor, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """What is lost to the features left out (g,), and to ranks 0, 1, ... of the narrow reader (g, r + 1).

    Args:
        coupling: the layers.
        rows: G^½ W, float64 `(O, N)`.
        covariance: S, float64 `(N, N)`.
        basis: see `Between`.
    """
    inner = keep(coupling, basis, coupling.width, keep(coupling, basis, coupling.width, covariance).T)
    if coupling.padded:  # the first features of all heads stand first
        order = torch.arange(len(inner), device=inner.device).view(-1, coupling.width).T.flatten()
        inner = inner[order][:, order]
        rows = rows @ extend(coupling, basis, coupling.width)[:, order]
    else:
        rows = keep(coupling, basis, coupling.width, rows)
    terms = rows @ lower_root(inner)
    kept = features_kept(coupling)
    total = terms.square().sum()
    narrowed = torch.stack([total - terms[:, : one * coupling.heads].square().sum() for one in kept])
    tails = [_tails(terms[:, : one * coupling.heads]) for one in (kept[:1] if coupling.padded else kept)]
    return narrowed.clamp_min(0.0), _stacked(tails, len(kept))


def writer_losses(coupling: Coupling, left: Tensor, gradient: Tensor, basis: Tensor) -> Tensor:
    """What is lost to ranks 0, 1, ... of a narrow writer (g, r + 1).

    Args:
        coupling: the layers.
        left: float64 `(N, m)`, with W S Wᵀ = left leftᵀ, W the writer's weight and S its input's covariance.
        gradient: weight of errors at its output, float64 `(N, N)`, or its diagonal `(N,)`.
        basis: see `Between`.
    """
    kept = features_kept(coupling)
    if coupling.padded:
        return _stacked([_tails(rooted(lower_root(gradient), left))], len(kept))
    metric, rows = among(gradient, basis), left[basis]
    outer = lower_root(metric)
    if outer.dim() == 1:
        terms = rooted(outer, rows)
        return _stacked([_tails(terms[:one]) for one in kept], len(kept))
    # The features kept are the first ones: their root is a corner of that of all.
    terms, tails, before = torch.zeros_like(rows), [], 0
    for one in reversed(kept):
        terms[:one] += outer[before:one, :one].T @ rows[before:one]
        tails.append(_tails(terms[:one]))
        before = one
    tails.reverse()
    return _stacked(tails, len(kept))


def _tails(terms: Tensor) -> Tensor:
    """Squared singular values summed from the r-th on, r = 0, 1, ..., those of full rank left out."""
    small = gram(terms.T if terms.shape[0] <= terms.shape[1] else terms)
    values = torch.linalg.eigvalsh(small).clamp_min(0.0)
    return values.cumsum(0).flip(0)


def _stacked(tails: list[Tensor], count: int) -> Tensor:
    longest = max(map(len, tails))
    rows = torch.full((count, longest), torch.inf, dtype=torch.float64, device=tails[0].device)
    for place, one in enumerate(tails):
        rows[place, : len(one)] = one
    return rows


def fit_narrow(
    target: Target,
    coupling: Coupling,
    basis: Tensor,
    ranks: tuple[int, ...],
    moments: Moments,
    gradient: Tensor | None,
    *,
    pivoted: bool | None = True,
) -> tuple[NarrowLinear, float]:
    """A layer of a coupling, and the relative error of its output.

    A writer gives T (W x + b) from z; the reader W x + b + (s - s') from the kept features z.

    Args:
        target: the dense layer.
        coupling: that it is of.
        basis: see `Between`.
        ranks: how many features are kept, and the rank if it is factorized.
        moments: of x and z, about the means if the layer has a bias; of a reader z are the kept ones.
        gradient: weight of errors at its dense outputs, float64, or None.
        pivoted: see `fit_matrix_to`.
    """
    weight, bias = target.weight_and_bias()
    dense = weight.detach().double()
    if target.name != coupling.reader:
        kept = ranks[0] // coupling.heads_of(target.name)
        dense, bias = _narrow_writer(target, coupling, basis, kept)
        if gradient is not None:  # of heads T gives other features, whose errors count alike
            places = basis[:kept]
            gradient = None if coupling.padded else among(gradient, places)
    if len(ranks) > 1:
        found = fit_matrix_to(dense, bias, moments, gradient, ranks[1], pivoted=pivoted, dtype=weight.dtype)
    else:
        found = fit_whole_to(dense, bias, moments)
    return _around(target, coupling, basis, found), found.output_error


def _narrow_writer(
    target: Target, coupling: Coupling, basis: Tensor, kept: int
) -> tuple[Tensor, Tensor | None]:
    """Weight (K of each head, I) and bias of what the dense writer does for the kept features, float64."""
    weight, bias = target.weight_and_bias()
    rows = keep(coupling, basis, kept, weight.detach().double().T).T
    return rows, None if bias is None else keep(coupling, basis, kept, bias.detach().double())


def _around(target: Target, coupling: Coupling, basis: Tensor, found: FittedPair) -> NarrowLinear:
    side = "in" if target.name == coupling.reader else "out"
    inner = _linear_of(found, target.weight_and_bias()[0])
    heads = coupling.heads_of(target.name)
    places = None
    if not coupling.padded:
        places = basis[: inner.in_features if side == "in" else inner.out_features]
    wide = coupling.wide and side == "out"
    return NarrowLinear.around(
        inner, target.layer, side=side, heads=heads, padded=coupling.padded, wide=wide, places=places
    )


def _linear_of(found: FittedPair, like: Tensor) -> nn.Linear | SketchedLinear:
    """A layer that stores what was fitted, of the dtype and on the device of another tensor."""
    dtype, device, bias = like.dtype, like.device, found.bias
    if found.right is not None:
        return SketchedLinear.from_stored(
            found.left, found.right, bias, start=found.start, dtype=dtype, device=device
        )
    outputs, inputs = found.left.shape
    whole = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias is not None, device=device, dtype=dtype)
    copy_into(whole.weight, found.left)
    if bias is not None:
        copy_into(whole.bias, bias)
    return whole


def cut_coupling(
    targets: Mapping[str, Target],
    coupling: Coupling,
    between: Between,
    ranks: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    factors: Mapping[str, tuple[Tensor, Tensor, Tensor]],
) -> dict[str, NarrowLinear]:
    """All layers of a coupling from the study alone, by name.

    Args:
        targets: the dense layers, by name.
        coupling: that they are of.
        between: what is between them.
        ranks: see `fit_narrow`; by name.
        weights: of errors, by name.
        factors: of the study, by name.
    """
    layers = {}
    for name in coupling.names:
        target, rank = targets[name], ranks[name][1:]
        kept = ranks[name][0] // coupling.heads_of(name)
        cut = _cut_reader if name == coupling.reader else _cut_writer
        weight, spread, bias, metric = cut(
            target, coupling, between, kept, factors.get(name), weights.get(name)
        )
        left, right = _truncated(weight, spread, metric, rank[0]) if rank else (weight, None)
        layers[name] = _around(target, coupling, between.basis, FittedPair(left, right, None, bias, 0.0))
    return layers


_Cut = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_Factors = tuple[Tensor, Tensor, Tensor] | None


def _cut_writer(
    target: Target,
    coupling: Coupling,
    between: Between,
    kept: int,
    factors: _Factors,
    gradient: Tensor | None,
) -> _Cut:
    """Weight M of the narrow layer, Z with M S Mᵀ = Z Zᵀ, bias, and weight of errors."""
    rows, bias = _narrow_writer(target, coupling, between.basis, kept)
    if coupling.padded or factors is None:
        return rows, rows, bias, None
    places = between.basis[:kept]
    metric = None if gradient is None else among(gradient, places).double()
    return rows, factors[0][places].double(), bias, metric


def _cut_reader(
    target: Target, coupling: Coupling, between: Between, kept: int, _: _Factors, gradient: Tensor | None
) -> _Cut:
    weight, bias = target.weight_and_bias()
    dense, covariance = weight.detach().double(), between.covariance.double()
    cross = keep(coupling, between.basis, kept, dense @ covariance)  # E[W a kᵀ]
    inner = keep(coupling, between.basis, kept, keep(coupling, between.basis, kept, covariance).T)
    new = solve(inner, cross.T).T
    mean = between.mean.double()
    bias = shifted_bias(bias, dense @ mean, new @ keep(coupling, between.basis, kept, mean))
    return new, new @ lower_root(inner), bias, None if gradient is None else gradient.double()


def _truncated(weight: Tensor, spread: Tensor, metric: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best matrix of a rank, where errors count by the metric and M S Mᵀ = spread spreadᵀ."""
    if metric is None:
        metric = torch.ones(len(weight)).to(weight)
    outer = lower_root(metric)
    terms = rooted(outer, spread)
    if terms.shape[0] <= terms.shape[1]:
        vectors = torch.linalg.eigh(terms @ terms.T)[1][:, -rank:].flip(1)
    else:  # columns of T V are as long as singular values, and orthogonal but for rounding
        vectors = torch.linalg.qr(terms @ torch.linalg.eigh(terms.T @ terms)[1][:, -rank:].flip(1)).Q
    return unrooted(outer, vectors), vectors.T @ rooted(outer, weight)


def narrow_rows(coupling: Coupling, basis: Tensor, kept: int, rows: Tensor) -> Tensor:
    """The kept features (n, K of each head) of what reaches a narrow reader."""
    if coupling.padded:
        return rows.unflatten(-1, (coupling.heads, -1))[..., :kept].flatten(-2)
    # From another layer than the writer, where the sketched model takes another path than the dense one.
    return rows[:, basis[:kept]] if rows.shape[1] == coupling.width else rows
