"""SketchedEmbedding: a table (V, D) as codes (V, r) times a basis (r, D)."""

# V num_embeddings, D embedding_dim, R rank
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.factorization.factorize import probe_error
from panther_compile.layers.base import SketchedLayer, Spec, check_rank, copy_into, take_over
from panther_compile.layers.lazy_weight import lazy_weight


class _Basis(nn.Linear):
    """The basis (r, D), a layer that is called either way, as hooks that bring a weight from disk need it."""

    def forward(self, input: Tensor, *, transposed: bool = False) -> Tensor:
        """Multiply (..., D) to (..., r), or transposed (..., r) to (..., D)."""
        return input @ self.weight if transposed else super().forward(input)


class SketchedEmbedding(SketchedLayer):
    """A rank-r replacement of `nn.Embedding`; indices of shape (...) give (..., embedding_dim).

    The factors are those of a `SketchedLinear` pair with the same weight (up = codes, down = basis), so
    that an output head tied to the table can share them.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        rank: r, in 1..min(V, D).
        padding_idx: index whose code gets no gradient, as in `nn.Embedding`.
        scale_grad_by_freq: see `nn.Embedding`.
        sparse: see `nn.Embedding`.
        device: where the factors are made.
        dtype: of the factors, any floating dtype.

    Raises:
        RankError: rank is outside 1..min(V, D).
    """

    dense_type = nn.Embedding
    stages = ("codes", "basis")
    max_norm: ClassVar[None] = None
    norm_type: ClassVar[float] = 2.0

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        *,
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        limit = min(num_embeddings, embedding_dim)
        check_rank(rank, limit, f"SketchedEmbedding({num_embeddings}, {embedding_dim})")
        self.num_embeddings, self.embedding_dim, self.rank = num_embeddings, embedding_dim, rank
        self.scheme, self.ranks = "pair", (rank,)
        self.codes = nn.Embedding(
            num_embeddings,
            rank,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            device=device,
            dtype=dtype,
        )
        self.basis = _Basis(embedding_dim, rank, bias=False, device=device, dtype=dtype)

    @classmethod
    def from_factors(cls, left: Tensor, right: Tensor, like: nn.Embedding) -> Self:
        """A layer whose table is left (V, r) @ right (r, D), with the options of `like`."""
        layer = cls(
            left.shape[0],
            right.shape[1],
            left.shape[1],
            padding_idx=like.padding_idx,
            scale_grad_by_freq=like.scale_grad_by_freq,
            sparse=like.sparse,
            device="meta",
            dtype=like.weight.dtype,
        )
        # Made without data: initial values would be drawn from the user's random numbers, and lost.
        layer.to_empty(device=like.weight.device)
        copy_into(layer.codes.weight, left)
        copy_into(layer.basis.weight, right)
        take_over(layer, like, like.weight.requires_grad)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Look up indices (...), any integer dtype, and return (..., D)."""
        codes = self.codes(input)
        return self.basis(codes, transposed=True).to(codes.dtype)  # autocast would give a half type

    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors left (V, r) and right (r, D) of the table."""
        return self.codes.weight, self.basis.weight

    def weight_error(self, weight: Tensor, generator: torch.Generator) -> float | None:
        """See `SketchedLayer.weight_error`; estimated by Gaussian probes of the weight (V, D)."""
        left, right = (factor.detach() for factor in self.factors())
        return probe_error(weight.detach(), left, right, generator=generator)

    def to_dense(self) -> nn.Embedding:
        """An `nn.Embedding` with the factors multiplied out."""
        like = self.codes
        dense = nn.utils.skip_init(
            nn.Embedding,
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=like.padding_idx,
            scale_grad_by_freq=like.scale_grad_by_freq,
            sparse=like.sparse,
            device=like.weight.device,
            dtype=like.weight.dtype,
        )
        left, right = (factor.detach().double() for factor in self.factors())
        copy_into(dense.weight, left @ right)
        take_over(dense, self, like.weight.requires_grad)
        return dense

    @property
    def weight(self) -> Tensor:
        """The table (V, D) that the factors stand for; read-only, multiplied out when it is read."""
        shape = (self.num_embeddings, self.embedding_dim)
        return lazy_weight(shape, self.codes.weight, lambda: self.codes.weight @ self.basis.weight)

    @property
    def padding_idx(self) -> int | None:
        """See `nn.Embedding`."""
        return self.codes.padding_idx

    @property
    def scale_grad_by_freq(self) -> bool:
        """See `nn.Embedding`."""
        return self.codes.scale_grad_by_freq

    @property
    def sparse(self) -> bool:
        """See `nn.Embedding`."""
        return self.codes.sparse

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "rank": self.rank,
            "padding_idx": self.padding_idx,
            "scale_grad_by_freq": self.scale_grad_by_freq,
            "sparse": self.sparse,
        }

    def extra_repr(self) -> str:
        """The shape, rank and stored share, as `print(model)` shows them."""
        share = self.stored_numbers / self.dense_numbers
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}, stored={share:.3f}"

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        return self.num_embeddings * self.embedding_dim

    @property
    def dense_macs(self) -> int:
        """None: a look-up multiplies nothing."""
        return 0

    @property
    def macs(self) -> int:
        """One product of a code with the basis."""
        return self.rank * self.embedding_dim
