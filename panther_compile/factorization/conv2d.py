"""Low-rank forms of a convolution's weight W (O, I/G, kh, kw), and what each rank of them costs.

Each form is a chain of smaller convolutions, all with the G groups of the dense one:

    channel   kh x kw, 1 x 1           W[o,i,a,b] = Σ_p  U[o,p] V[p,i,a,b]
    spatial   kh x 1, 1 x kw           W[o,i,a,b] = Σ_p  U[o,p,b] V[p,i,a]
    tucker2   1 x 1, kh x kw, 1 x 1    W[o,i,a,b] = Σ_pq U[o,p] C[p,q,a,b] V[q,i]
    basis     kh x kw, 1 x 1           W[o,i,a,b] = Σ_p  U[o,i,p] V[p,a,b]

within a group; ranks, p = 1..r or p = 1..r_out and q = 1..r_in, are per group, but for the last, whose r
filters V are those of every channel of every group: each channel is filtered by all of them. Long kernels,
of sound, have more in common along their taps than among channels. The first two and the last are truncated
SVDs of W as a matrix, (o) x (i,a,b), (o,b) x (i,a) and (o,i) x (a,b); the third is the higher-order SVD,
refined by alternating projections (HOOI).

Sources: Zhang et al., TPAMI 38 (2016) (channel); Jaderberg et al., BMVC 2014 (spatial); Kim et al., ICLR
2016 (tucker2); De Lathauwer et al., SIAM J. Matrix Anal. Appl. 21 (2000) (HOSVD, HOOI); Qiu et al., ICML
2018, and Li et al., ICCV 2019 (basis).
"""

# G groups, O out_channels, I in_channels, kh x kw kernel; per group: o = O/G, i = I/G, k = kh kw

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.errors import RankError, check_choice
from panther_compile.factorization.candidates import Candidate, LinearCandidate, kept_energies
from panther_compile.factorization.factorize import factorize, singular_values
from panther_compile.factorization.values import check_values

SCHEMES = ("channel", "spatial", "tucker2", "basis")
_HOOI_SWEEPS = 3
# The filters of "basis" read one channel at a time, which oneDNN is slow at: 26 measured cases ran at .35 to
# 1.1 of the speed that `cost.py` predicts, those predicted to be 1.2 times as fast as dense at about .8.
BASIS_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ConvKernels:
    """A convolution's weight as a chain of kernels, first factor first.

    Attributes:
        scheme: one of `SCHEMES`.
        kernels: float64 weights of the factors, (C_out, C_in / G, height, width) each, of equal
            Frobenius norm.
        error: relative Frobenius error of the chain, exact.
        method: how they were found: that of the SVDs, or "hooi".
    """

    scheme: str
    kernels: tuple[Tensor, ...]
    error: float
    method: str


class ConvCandidate(Candidate):
    """One scheme for a kernel W (O, I/G, kh, kw) with G groups.

    `macs` counts per output position, as if the stride were 1. Stages ahead of a stride see more
    positions: the first of tucker2 stride_h stride_w as many, the first of spatial stride_w as many.

    Args:
        shape: of the weight, (O, I/G, kh, kw).
        groups: G.
        weight: computes the energies from it; None leaves them unknown.
    """

    def __init__(self, shape: tuple[int, ...], groups: int, weight: Tensor | None = None) -> None:
        out_channels, self.inputs, *self.kernel_size = shape
        self.groups, self.outputs = groups, out_channels // groups
        self.max_rank = self._max_rank()
        self.energies = None if weight is None else self._kept_energies(weight)

    def macs(self, rank: int) -> int:
        """One multiply-add per stored weight and output position."""
        return self.numbers(rank)

    def _max_rank(self) -> int:
        raise NotImplementedError

    def _kept_energies(self, weight: Tensor) -> Tensor:
        matrices = to_matrices(weight, self.groups, self.scheme)
        return kept_energies(singular_values(matrices).square().sum(dim=0).sqrt())


class ChannelCandidate(ConvCandidate):
    """kh x kw to r channels a group, then 1 x 1."""

    scheme = "channel"

    def numbers(self, rank: int) -> int:
        """G r (i kh kw + o)."""
        kh, kw = self.kernel_size
        return self.groups * rank * (self.inputs * kh * kw + self.outputs)

    def _max_rank(self) -> int:
        kh, kw = self.kernel_size
        return min(self.outputs, self.inputs * kh * kw)


class SpatialCandidate(ConvCandidate):
    """kh x 1 to r channels a group, then 1 x kw."""

    scheme = "spatial"

    def numbers(self, rank: int) -> int:
        """G r (i kh + o kw)."""
        kh, kw = self.kernel_size
        return self.groups * rank * (self.inputs * kh + self.outputs * kw)

    def _max_rank(self) -> int:
        kh, kw = self.kernel_size
        return min(self.outputs * kw, self.inputs * kh)


class Tucker2Candidate(ConvCandidate):
    """1 x 1, kh x kw, 1 x 1. The rank is that of the wider side; the other is proportional.

    Neither is more than kh kw times the other: the kernel between them has no further directions. The
    energies are those of the truncated HOSVD; HOOI keeps at least as much.
    """

    scheme = "tucker2"

    def ranks(self, rank: int) -> tuple[int, ...]:
        """(r_in, r_out) per group, rounded up."""
        (r_in, r_out), taps = self._proportional(rank), math.prod(self.kernel_size)
        return min(r_in, taps * r_out), min(r_out, taps * r_in)

    def numbers(self, rank: int) -> int:
        """G (i r_in + kh kw r_in r_out + o r_out)."""
        (kh, kw), (r_in, r_out) = self.kernel_size, self.ranks(rank)
        return self.groups * (self.inputs * r_in + kh * kw * r_in * r_out + self.outputs * r_out)

    def _max_rank(self) -> int:
        return max(self.inputs, self.outputs)

    def _kept_energies(self, weight: Tensor) -> Tensor:
        tensor_goik = _grouped(_checked(weight), self.groups).flatten(3)
        taps = math.prod(self.kernel_size)
        u_gop = _leading(tensor_goik.flatten(2), min(self.outputs, taps * self.inputs))
        v_giq = _leading(tensor_goik.transpose(1, 2).flatten(2), min(self.inputs, taps * self.outputs))
        kept = _core(tensor_goik, u_gop, v_giq).square().sum(dim=(0, 3)).cumsum(0).cumsum(1)
        r_in, r_out = torch.tensor([self._proportional(r + 1) for r in range(self.max_rank)]).T
        r_in, r_out = r_in.clamp_max(kept.shape[1]), r_out.clamp_max(kept.shape[0])
        return (
            kept[r_out - 1, r_in - 1] / kept[-1, -1]
            if kept[-1, -1] > 0
            else torch.ones(len(r_in), dtype=kept.dtype)
        )

    def _proportional(self, rank: int) -> tuple[int, int]:
        widest = self.max_rank
        return -(-rank * self.inputs // widest), -(-rank * self.outputs // widest)


class BasisCandidate(ConvCandidate):
    """r filters kh x kw of every channel, then 1 x 1."""

    scheme = "basis"

    def numbers(self, rank: int) -> int:
        """(kh kw + G i o) r."""
        kh, kw = self.kernel_size
        return rank * (kh * kw + self.groups * self.inputs * self.outputs)

    def macs(self, rank: int) -> int:
        """G i r (kh kw + o): the filters run on every channel; of a kernel that is multiplied out its own."""
        kh, kw = self.kernel_size
        if is_multiplied_out(rank, kh * kw, self.outputs):
            return self.groups * self.inputs * self.outputs * kh * kw
        return self.groups * self.inputs * rank * (kh * kw + self.outputs)

    def _max_rank(self) -> int:
        kh, kw = self.kernel_size
        return min(kh * kw, self.groups * self.inputs * self.outputs)


def is_multiplied_out(rank: int, taps: int, outputs: int) -> bool:
    """Whether a kernel is made of its basis at each call, as running the filters would take longer.

    To make it takes G i o r kh kw multiply-adds, few beside those of a call.

    Args:
        rank: r.
        taps: kh kw.
        outputs: o.
    """
    return rank * (taps + outputs) > BASIS_SHARE * taps * outputs


def conv_candidates(weight: Tensor, groups: int, compute_energies: bool = True) -> tuple[Candidate, ...]:
    """Every scheme for a convolution.

    A 1 x 1 kernel without groups is a matrix: "pivoted". With groups it has "channel" alone, the plain
    pair. A kh x 1 kernel has no "spatial", which would be "channel" again, as would "basis" where a group has
    one input. A depthwise weight has none.

    Args:
        weight: (O, I/G, kh, kw); a meta tensor will do without energies.
        groups: G.
        compute_energies: whether to compute what each rank keeps: an eigendecomposition or two each.

    Raises:
        WeightError: energies are asked for and the weight holds NaN or Inf, or is on the meta device.
    """
    out_channels, inputs, kh, kw = weight.shape
    if is_depthwise(inputs, groups):
        return ()
    if kh == kw == groups == 1:
        matrix = weight.flatten(1)
        return (
            LinearCandidate(
                out_channels,
                inputs,
                "pivoted",
                singular_values=singular_values(matrix) if compute_energies else None,
            ),
        )
    kinds: list[type[ConvCandidate]] = [ChannelCandidate]
    if kw > 1:
        kinds.append(SpatialCandidate)
    if kh * kw > 1:
        kinds.append(Tucker2Candidate)
    if kh * kw > 1 and inputs > 1:
        kinds.append(BasisCandidate)
    values = weight if compute_energies else None
    return tuple(kind(tuple(weight.shape), groups, values) for kind in kinds)


def is_depthwise(inputs_per_group: int, groups: int) -> bool:
    """Whether each group sees one channel: its filters share nothing that a low rank could use."""
    return inputs_per_group == 1 and groups > 1


@torch.no_grad()
def factorize_conv2d(
    weight: Tensor,
    groups: int,
    scheme: str,
    rank: int | tuple[int, ...],
    *,
    method: str = "auto",
    sketch: str = "gaussian",
    generator: torch.Generator,
) -> ConvKernels:
    """Factorize a convolution's weight.

    Args:
        weight: (O, I/G, kh, kw), any real floating dtype; the work is done in float64.
        groups: G.
        scheme: one of `SCHEMES`.
        rank: per group; for "tucker2" a pair (r_in, r_out), or one number as in `Tucker2Candidate`.
        method: of the SVDs, see `panther_compile.factorization.factorize.factorize`; "tucker2" takes none.
        sketch: see there.
        generator: see there.

    Raises:
        ConfigError: the scheme, method or sketch is unknown.
        RankError: the rank is out of range.
        WeightError: the weight holds NaN or Inf, or is on the meta device.
    """
    check_choice("scheme", scheme, SCHEMES)
    work = _checked(weight)
    if scheme == "tucker2":
        kernels = _tucker2(work, groups, tucker2_ranks(tuple(weight.shape), groups, rank))
        used = "hooi"
    else:
        if not isinstance(rank, int):
            raise RankError(f"scheme={scheme!r} takes one rank, got {rank!r}")
        pairs = [
            factorize(matrix, rank, method=method, sketch=sketch, generator=generator)
            for matrix in to_matrices(work, groups, scheme)
        ]
        left_gmr = torch.stack([pair.left.double() for pair in pairs])
        right_grn = torch.stack([pair.right.double() for pair in pairs])
        kernels = _to_kernels(left_gmr, right_grn, work.shape, scheme)
        used = pairs[0].method
    kernels = _balanced(kernels)
    size = torch.linalg.vector_norm(work)
    distance = torch.linalg.vector_norm(work - multiply_out(kernels, groups, scheme))
    error = float(distance / size) if size > 0 else 0.0
    return ConvKernels(scheme, kernels, error, used)


def multiply_out(kernels: tuple[Tensor, ...], groups: int, scheme: str) -> Tensor:
    """The weight (O, I/G, kh, kw) that a chain of kernels stands for; differentiable."""
    if scheme == "basis":
        filters, up = kernels
        product = up.reshape(-1, filters.shape[0]) @ filters.flatten(1)
        return product.view(up.shape[0], -1, *filters.shape[2:])
    down, up = _grouped(kernels[0], groups), _grouped(kernels[-1], groups)
    if scheme == "channel":
        weight = torch.einsum("gop,gpiab->goiab", up[..., 0, 0], down)
    elif scheme == "spatial":
        weight = torch.einsum("gopb,gpia->goiab", up[..., 0, :], down[..., 0])
    else:
        core = _grouped(kernels[1], groups)
        half = torch.einsum("gpqab,gqi->gpiab", core, down[..., 0, 0])
        weight = torch.einsum("gop,gpiab->goiab", up[..., 0, 0], half)
    return weight.flatten(0, 1)


def to_matrices(weight: Tensor, groups: int, scheme: str) -> Tensor:
    """Matrices to truncate: "channel" (G, o, i kh kw), "spatial" (G, o kw, i kh), "basis" (1, O i, kh kw)."""
    if scheme == "basis":
        return weight.flatten(2).flatten(0, 1)[None]
    tensor = _grouped(weight, groups)
    if scheme == "channel":
        return tensor.flatten(2)
    return tensor.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2)


def tucker2_ranks(shape: tuple[int, ...], groups: int, rank: int | tuple[int, ...]) -> tuple[int, ...]:
    """(r_in, r_out) from a pair, which is checked, or from one number.

    Raises:
        RankError: a rank is out of range.
    """
    candidate = Tucker2Candidate(shape, groups)
    if isinstance(rank, int):
        if not 1 <= rank <= candidate.max_rank:
            raise RankError(f"tucker2: {rank=}, wanted 1..{candidate.max_rank}")
        return candidate.ranks(rank)
    if len(rank) != 2 or not (1 <= rank[0] <= candidate.inputs and 1 <= rank[1] <= candidate.outputs):
        raise RankError(
            f"tucker2: rank={rank!r}, wanted (r_in, r_out) in 1..{candidate.inputs}, 1..{candidate.outputs}"
        )
    return rank


def _to_kernels(left_gmr: Tensor, right_grn: Tensor, shape: torch.Size, scheme: str) -> tuple[Tensor, ...]:
    """Two-factor kernels from the factors of `to_matrices`."""
    outputs, inputs, kh, kw = shape
    if scheme == "basis":
        up = left_gmr[0].unflatten(0, (outputs, inputs)).flatten(1)
        return right_grn[0].unflatten(1, (kh, kw))[:, None], up[..., None, None]
    if scheme == "channel":
        return right_grn.flatten(0, 1).unflatten(1, (inputs, kh, kw)), left_gmr.flatten(0, 1)[..., None, None]
    down = right_grn.flatten(0, 1).unflatten(1, (inputs, kh))[..., None]
    up = left_gmr.unflatten(1, (-1, kw)).flatten(0, 1).transpose(1, 2)[:, :, None]
    return down, up


def _tucker2(weight: Tensor, groups: int, ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """HOSVD, then HOOI: each side in turn the best for the other, so that the error only falls."""
    r_in, r_out = ranks
    tensor_goik = _grouped(weight, groups).flatten(3)
    left_goqk = tensor_goik  # of all inputs, where those chosen will hold all that the outputs have
    if r_in < tensor_goik.shape[3] * r_out:
        v_giq = _leading(tensor_goik.transpose(1, 2).flatten(2), r_in)
        left_goqk = torch.einsum("goik,giq->goqk", tensor_goik, v_giq)
    for _ in range(_HOOI_SWEEPS):
        u_gop = _leading(left_goqk.flatten(2), r_out)
        v_giq = _leading(torch.einsum("goik,gop->gipk", tensor_goik, u_gop).flatten(2), r_in)
        left_goqk = torch.einsum("goik,giq->goqk", tensor_goik, v_giq)
    core = torch.einsum("goqk,gop->gpqk", left_goqk, u_gop)
    down = v_giq.transpose(1, 2).flatten(0, 1)[..., None, None]
    return down, core.flatten(0, 1).unflatten(-1, weight.shape[2:]), u_gop.flatten(0, 1)[..., None, None]


def _core(tensor_goik: Tensor, u_gop: Tensor, v_giq: Tensor) -> Tensor:
    return torch.einsum("gpik,giq->gpqk", torch.einsum("goik,gop->gpik", tensor_goik, u_gop), v_giq)


def _leading(matrices: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors (G, m, r) of (G, m, n)."""
    if matrices.shape[1] > matrices.shape[2]:  # m may be very large
        return torch.linalg.svd(matrices, full_matrices=rank > matrices.shape[2])[0][..., :rank]
    return torch.linalg.eigh(matrices @ matrices.mT).eigenvectors[..., -rank:].flip(-1)


def _balanced(kernels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Scale the kernels to equal Frobenius norm; a zero weight is left as it is."""
    norms = torch.stack([torch.linalg.vector_norm(kernel) for kernel in kernels])
    if norms.min() == 0:
        return kernels
    scales = norms.log().mean().exp() / norms
    return tuple(kernel * scale for kernel, scale in zip(kernels, scales, strict=True))


def _grouped(kernel: Tensor, groups: int) -> Tensor:
    """(O, ...) as (G, O/G, ...)."""
    return kernel.unflatten(0, (groups, -1))


def _checked(weight: Tensor) -> Tensor:
    """The weight in float64."""
    check_values(weight, f"weight of shape {tuple(weight.shape)}")
    return weight.double()
