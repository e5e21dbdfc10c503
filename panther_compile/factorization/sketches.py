"""Random test operators Omega that compress the columns of a matrix: ``matrix @ Omega``.

With n rows and s columns, every kind is scaled so that E[Omega Omega^T] = I_n, hence
E||x^T Omega||^2 = ||x||^2:

    gaussian      Omega_ij ~ N(0, 1/s)                     -> DenseSketch
    sign          Omega_ij = +-1/sqrt(s)                   -> DenseSketch
    srht          Omega = 1/sqrt(s) [D 0] H R              -> HadamardSketch
    countsketch   one entry +-1 in each row                -> SparseSketch
    sjlt          z entries +-1/sqrt(z) in each row        -> SparseSketch

D is a diagonal of random signs, [D 0] pads n to N, the next power of two, H is the N x N
Walsh-Hadamard matrix of entries +-1, and R takes s of its N columns without replacement. On an
(m, n) matrix a dense kind costs m n s multiplications, SRHT about 2 m N sqrt(N), a sparse kind
m n z additions. Only the dense kinds hold Omega itself.

Sources: Halko, Martinsson and Tropp, SIAM Review 53 (2011), section 4 (Gaussian, structured);
Tropp, Adv. Adapt. Data Anal. 3 (2011) (SRHT); Clarkson and Woodruff, STOC 2013 (CountSketch); Kane
and Nelson, J. ACM 61 (2014), block construction (SJLT).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.errors import ConfigError, check_choice

SKETCH_KINDS = ("gaussian", "sign", "srht", "countsketch", "sjlt")
_SJLT_NONZEROS = 8


@dataclass(frozen=True, slots=True, eq=False)
class SketchOperator(ABC):
    """A random matrix Omega of shape (rows, columns), known by what it does to a matrix."""

    rows: int
    columns: int

    @abstractmethod
    def apply_right(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ Omega``.

        Args:
            matrix: (m, rows), of the dtype and on the device the operator was made for.

        Returns:
            (m, columns), same dtype and device.
        """


@dataclass(frozen=True, slots=True, eq=False)
class DenseSketch(SketchOperator):
    """Omega held as a matrix: the Gaussian and sign kinds have no faster product.

    Attributes:
        omega: (rows, columns).
    """

    omega: Tensor

    def apply_right(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ Omega``; see the base class."""
        return matrix @ self.omega


@dataclass(frozen=True, slots=True, eq=False)
class HadamardSketch(SketchOperator):
    """Subsampled randomized Hadamard transform, Omega = 1/sqrt(s) [D 0] H R.

    Attributes:
        signs: (rows,), the diagonal of D.
        picks: (columns,) int64, the distinct columns of H that R takes.
    """

    signs: Tensor
    picks: Tensor

    def apply_right(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ Omega``; see the base class."""
        padding = _next_power_of_two(self.rows) - self.rows
        padded_mN = torch.nn.functional.pad(matrix * self.signs, (0, padding))
        return walsh_hadamard(padded_mN)[:, self.picks] / math.sqrt(self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class SparseSketch(SketchOperator):
    """A few entries +-1/sqrt(z) in each row of Omega: CountSketch (z = 1) and SJLT.

    On CUDA ``index_add`` sums in no fixed order; ``torch.use_deterministic_algorithms`` fixes it.

    Attributes:
        buckets: (nonzeros, rows) int64, the columns of the entries of each row, all distinct.
        values: (nonzeros, rows), the entries.
    """

    buckets: Tensor
    values: Tensor

    def apply_right(self, matrix: Tensor) -> Tensor:
        """Return ``matrix @ Omega``; see the base class."""
        result_ms = matrix.new_zeros(matrix.shape[0], self.columns)
        for buckets_n, values_n in zip(self.buckets, self.values, strict=True):
            result_ms.index_add_(1, buckets_n, matrix * values_n)
        return result_ms


def make_sketch(
    kind: str,
    rows: int,
    columns: int,
    *,
    generator: torch.Generator,
    device: torch.device | str,
    dtype: torch.dtype,
) -> SketchOperator:
    """Draw a test operator.

    Everything is drawn on the generator's device and moved, so that a CPU generator gives the same
    operator on every device.

    Args:
        kind: one of ``SKETCH_KINDS``.
        rows: n, the width of the matrices it will apply to.
        columns: s. At most n for "srht", which samples without replacement.
        generator: the only source of randomness.
        device: where the operator is to live.
        dtype: a floating dtype, that of the matrices it will apply to.

    Returns:
        The operator.

    Raises:
        ConfigError: the kind is unknown, or a size is out of range.
    """
    check_choice("sketch", kind, SKETCH_KINDS)
    if rows < 1 or columns < 1:
        raise ConfigError(f"sketch {kind!r}: size {rows} x {columns}, wanted at least 1 x 1")

    def signs(*shape: int) -> Tensor:
        bits = torch.randint(2, shape, generator=generator, device=generator.device)
        return (2 * bits - 1).to(device, dtype)

    if kind == "gaussian":
        omega_ns = torch.randn(rows, columns, generator=generator, device=generator.device, dtype=dtype)
        return DenseSketch(rows, columns, omega_ns.to(device) / math.sqrt(columns))
    if kind == "sign":
        return DenseSketch(rows, columns, signs(rows, columns) / math.sqrt(columns))
    if kind == "srht":
        if columns > rows:
            raise ConfigError(f"sketch 'srht': columns={columns}, wanted at most {rows} (rows)")
        order_N = torch.randperm(_next_power_of_two(rows), generator=generator, device=generator.device)
        return HadamardSketch(rows, columns, signs(rows), order_N[:columns].to(device))

    nonzeros = 1 if kind == "countsketch" else min(_SJLT_NONZEROS, columns)
    # The columns are cut into z blocks of nearly equal width; each row has one entry in each block.
    edges = torch.arange(nonzeros + 1, device=generator.device) * columns // nonzeros
    uniform_zn = torch.rand(nonzeros, rows, generator=generator, device=generator.device, dtype=torch.float64)
    buckets_zn = edges[:-1, None] + (uniform_zn * edges.diff()[:, None]).long()
    values_zn = signs(nonzeros, rows) / math.sqrt(nonzeros)
    return SparseSketch(rows, columns, buckets_zn.to(device), values_zn)


def walsh_hadamard(matrix: Tensor) -> Tensor:
    """Multiply from the right with the Walsh-Hadamard matrix of entries +-1, in Sylvester's order.

    H_N = H_a (x) H_b with a b = N and both near sqrt(N): two small products in place of log2(N) passes
    over memory, 3 to 5 times faster than the butterfly in PyTorch (float32, 2 CPU cores, N 512 to
    4096).

    Args:
        matrix: (m, N), any floating dtype, N a power of two.

    Returns:
        (m, N), same dtype and device.
    """
    rows, columns = matrix.shape
    assert columns == _next_power_of_two(columns), columns
    log2 = columns.bit_length() - 1
    left_aa = _hadamard(log2 // 2).to(matrix)
    right_bb = _hadamard(log2 - log2 // 2).to(matrix)
    blocks_mab = matrix.reshape(rows, len(left_aa), len(right_bb))
    return (left_aa @ (blocks_mab @ right_bb)).reshape(rows, columns)


def _hadamard(log2: int) -> Tensor:
    """Return Sylvester's Hadamard matrix of order 2**log2, float32."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    for _ in range(log2):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
