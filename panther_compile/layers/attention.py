"""SketchedMultiheadAttention: nn.MultiheadAttention with four sketched projections.

    y = out(softmax(q kᵀ / sqrt(D) + mask) v),   q, k, v projections of query, key, value

Between the projections the attention is exact, unless `attention="favor"` asks for random features.
"""

# N batch, L queries, S keys, H heads, D head_dim, E embed_dim
import copy
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import ATTENTIONS
from panther_compile.errors import ConfigError, LayerError, check_choice
from panther_compile.layers.attention_masks import Masks, check_inputs, make_masks
from panther_compile.layers.base import (
    SketchedLayer,
    Spec,
    check_rank_or_ratio,
    copy_into,
    spec_of_part,
)
from panther_compile.layers.capture import kept_whole
from panther_compile.layers.favor import FavorAttention
from panther_compile.layers.lazy_weight import lazy_weight
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.layers.parts import part_of_spec

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

Projection: TypeAlias = SketchedLinear | NarrowLinear | nn.Linear


class SketchedMultiheadAttention(SketchedLayer):
    """A replacement of `nn.MultiheadAttention` whose projections are low-rank.

    The children `q_proj`, `k_proj`, `v_proj` and `out_proj`, which hold the biases, are each a
    `SketchedLinear`, or an `nn.Linear` where a sketch would not be smaller. Arguments, masks,
    errors, the random numbers of dropout and the attributes are those of `nn.MultiheadAttention`;
    the dense weights are multiplied out when they are read.

    The inference fast path of torch, which runs on the dense weights, is not taken. A query that may
    attend to nothing gets 0 before the output projection, NaN if weights are needed; so it is in torch
    outside the fast path; within it, it is NaN always. Nested tensors, which `nn.TransformerEncoder` makes
    of padded inputs, raise LayerError; `sketchify` turns them off, and the encoder gives what it gave with
    them (nested_tensors.py).

    `attention="favor"` estimates the attention in time linear in the length: see `FavorAttention`
    for what that is good for. Attention masks must then be causal.

    Args:
        embed_dim: E.
        num_heads: H, a divisor of E.
        q_proj: spec of a `SketchedLinear` or `NarrowLinear`, or None for an `nn.Linear`.
        k_proj: likewise.
        v_proj: likewise.
        out_proj: likewise.
        dropout: of the attention weights, in training.
        bias: whether the projections have biases.
        add_bias_kv: whether a learned key and value are appended.
        add_zero_attn: whether a zero key and value are appended.
        kdim: features of `key`; E unless given.
        vdim: features of `value`; E unless given.
        batch_first: whether batched inputs are (N, L, E), not (L, N, E).
        attention: "exact" or "favor".
        features: number of random features, of "favor".
        feature_seed: of "favor".
        device: where the parameters are made.
        dtype: of the parameters, any floating dtype.

    Raises:
        ConfigError: `attention` is unknown, or `features` is not positive.
        LayerError: E is not a multiple of H, or a projection has the wrong shape.
    """

    dense_type = nn.MultiheadAttention
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    out_proj: Projection
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    favor: FavorAttention | None
    no_factors = frozenset({"favor"})
    # Read by nn.TransformerEncoderLayer, which otherwise computes on in_proj_weight by itself.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        q_proj: Spec | None = None,
        k_proj: Spec | None = None,
        v_proj: Spec | None = None,
        out_proj: Spec | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        attention: str = "exact",
        features: int = 256,
        feature_seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = f"{type(self).__name__}({embed_dim}, {num_heads})"
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise LayerError(f"{what}: wanted embed_dim a positive multiple of num_heads")
        check_choice(f"{what}: attention", attention, ATTENTIONS)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.attention, self.features, self.feature_seed = attention, features, feature_seed

        def projection(width: int, spec: Spec | None) -> Projection:
            return part_of_spec(spec, width, embed_dim, bias=bias, device=device, dtype=dtype)

        self.q_proj = projection(embed_dim, q_proj)
        self.k_proj = projection(self.kdim, k_proj)
        self.v_proj = projection(self.vdim, v_proj)
        self.out_proj = projection(embed_dim, out_proj)
        self._check_projections(what)
        self.bias_k = self.bias_v = None
        if add_bias_kv:
            self.bias_k = nn.Parameter(torch.empty(1, 1, embed_dim, device=device, dtype=dtype))
            self.bias_v = nn.Parameter(torch.empty(1, 1, embed_dim, device=device, dtype=dtype))
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)
        self.favor = None
        if attention == "favor":
            self.favor = FavorAttention(self.head_dim, features, feature_seed, device=device, dtype=dtype)

    def _check_projections(self, what: str) -> None:
        widths = (self.embed_dim, self.kdim, self.vdim, self.embed_dim)
        for name, width in zip(PROJECTIONS, widths, strict=True):
            projection = getattr(self, name)
            found = (projection.in_features, projection.out_features)
            if found != (width, self.embed_dim):
                raise LayerError(f"{what}: {name} is {found}, wanted {(width, self.embed_dim)}")
            if (projection.bias is None) != (self.q_proj.bias is None):
                raise LayerError(f"{what}: only one of q_proj and {name} has a bias")

    @classmethod
    def from_projections(
        cls,
        layer: nn.MultiheadAttention,
        projections: Mapping[str, nn.Module],
        *,
        attention: str = "exact",
        features: int = 256,
        feature_seed: int = 0,
    ) -> Self:
        """The replacement of `layer` with projections made elsewhere.

        Args:
            layer: the dense layer; gives everything but the projections.
            projections: a `SketchedLinear` or `nn.Linear` for each name in `PROJECTIONS`, not copied.
            attention: see the class; so for the other two.
            features: of "favor".
            feature_seed: of "favor".

        Raises:
            ConfigError, LayerError: see the class.
        """
        new = cls(
            layer.embed_dim,
            layer.num_heads,
            dropout=layer.dropout,
            bias=layer.out_proj.bias is not None,
            add_bias_kv=layer.bias_k is not None,
            add_zero_attn=layer.add_zero_attn,
            kdim=layer.kdim,
            vdim=layer.vdim,
            batch_first=layer.batch_first,
            attention=attention,
            features=features,
            feature_seed=feature_seed,
            device="meta",  # every tensor is replaced below
        )
        for name in PROJECTIONS:
            setattr(new, name, projections[name])
        new._check_projections(f"{cls.__name__}.from_projections")
        new.bias_k = copy.deepcopy(layer.bias_k)  # type: ignore[assignment]
        new.bias_v = copy.deepcopy(layer.bias_v)  # type: ignore[assignment]
        if new.favor is not None:
            like = layer.out_proj.weight
            new.favor = FavorAttention(
                new.head_dim, features, feature_seed, device=like.device, dtype=like.dtype
            )
        new.train(layer.training)
        return new

    @classmethod
    def from_dense(
        cls,
        layer: nn.MultiheadAttention,
        *,
        rank: int | Mapping[str, int | None] | None = None,
        ratio: float | None = None,
        form: str = "auto",
        method: str = "auto",
        sketch: str = "gaussian",
        seed: int = 0,
        attention: str = "exact",
        features: int = 256,
        feature_seed: int = 0,
    ) -> Self:
        """The closest layer of given ranks, or of the largest ranks that store `ratio` of each weight.

        A projection stays an `nn.Linear` where its sketch would store no less.

        Args:
            layer: the dense layer, left as it is.
            rank: of every projection; or of each by name, where those left out stay dense.
            ratio: in (0, 1]; exactly one of rank and ratio is given.
            form: see `SketchedLinear.from_dense`; so for the next three.
            method: of the factorization.
            sketch: of the randomized method.
            seed: of that sketch.
            attention: see the class; so for the other two.
            features: of "favor".
            feature_seed: of "favor".

        Raises:
            ConfigError: an option is out of range, or rank names what is no projection.
            RankError: a rank is outside what its projection allows.
            WeightError: a weight to be sketched holds NaN or Inf, or is on the meta device.
        """
        check_rank_or_ratio(rank, ratio, f"{cls.__name__}.from_dense")
        ranks = rank if isinstance(rank, Mapping) else dict.fromkeys(PROJECTIONS, rank)
        if not set(ranks) <= set(PROJECTIONS):
            raise ConfigError(f"rank={dict(ranks)}: wanted names among {PROJECTIONS}")
        projections: dict[str, nn.Module] = {}
        for name, (weight, bias) in projection_weights(layer).items():
            projections[name] = dense = dense_projection(weight, bias)
            if ratio is None and ranks.get(name) is None:
                continue
            sketched = SketchedLinear.from_dense(
                dense,
                rank=ranks.get(name),
                ratio=ratio,
                form=form,
                method=method,
                sketch=sketch,
                seed=seed,
            )
            if sketched.stored_numbers < sum(tensor.numel() for tensor in dense.parameters()):
                projections[name] = sketched
        return cls.from_projections(
            layer, projections, attention=attention, features=features, feature_seed=feature_seed
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value, as `nn.MultiheadAttention.forward`.

        Args:
            query: (L, E), (L, N, E), or (N, L, E) with `batch_first`.
            key: (S, kdim), (S, N, kdim) or (N, S, kdim).
            value: (S, vdim), (S, N, vdim) or (N, S, vdim).
            key_padding_mask: (S,) or (N, S); bool, True hides, or float, added to the logits.
            need_weights: whether to return the weights, which rules out fused kernels.
            attn_mask: (L, S) or (N H, L, S); bool, True hides, or float, added to the logits.
            average_attn_weights: whether to average the weights over the heads.
            is_causal: a hint that `attn_mask`, which is still needed, is causal.

        Returns:
            The output, shaped like query, and the weights (N, L, S), or (N, H, L, S) if not
            averaged, without N if query has none; None without `need_weights`.

        Raises:
            AssertionError, RuntimeError: a shape is wrong, as in torch.
            LayerError: an input is nested, or "favor" is given a mask it does not take.
        """
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if (node := kept_whole(self, query, key, value, *options)) is not None:
            return node  # type: ignore[no-any-return]
        if query.is_nested or key.is_nested or value.is_nested:
            raise LayerError(
                "nested input: pad it and give key_padding_mask instead; if it comes from "
                "nn.TransformerEncoder, set use_nested_tensor = False there"
            )
        batched = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        seq_first = batched and not self.batch_first
        check_inputs(query, key, value, self.embed_dim, batch_dim=int(seq_first))

        q = self._split_heads(self.q_proj(query), seq_first)
        k = self._split_heads(self.k_proj(key), seq_first)
        v = self._split_heads(self.v_proj(value), seq_first)
        masks = make_masks(
            key_padding_mask,
            attn_mask,
            sizes=(*q.shape[:3], k.shape[2]),
            appended=(self.bias_k is not None) + self.add_zero_attn,
            is_causal=is_causal,
            need_weights=need_weights,
            dtype=query.dtype,
        )
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        attend = exact_attention if self.favor is None else self.favor
        dropout = self.dropout if self.training else 0.0
        heads, weights = attend(q, k, v, masks, dropout, need_weights)
        heads = heads.permute(2, 0, 1, 3) if seq_first else heads.transpose(1, 2)
        output = self.out_proj(heads.flatten(-2))

        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output, weights

    def _split_heads(self, x: Tensor, seq_first: bool) -> Tensor:
        """(N, S, E), or (S, N, E), to (N, H, S, D)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.permute(1, 2, 0, 3) if seq_first else x.transpose(1, 2)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values (N, H, S, D) with the learned row (1, 1, E) and the zero row, if any."""
        if learned is not None:
            row = learned.view(1, self.num_heads, 1, self.head_dim)
            x = torch.cat([x, row.expand(x.shape[0], -1, -1, -1)], dim=2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def to_dense(self) -> nn.MultiheadAttention:
        """An `nn.MultiheadAttention` with the factors multiplied out; its attention is exact."""
        like = self.out_proj.weight
        dense = nn.utils.skip_init(
            nn.MultiheadAttention,
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=self.q_proj.bias is not None,
            add_bias_kv=self.bias_k is not None,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device=like.device,
            dtype=like.dtype,
        )
        for name, (weight, bias) in projection_weights(dense).items():
            projection = getattr(self, name)
            if isinstance(projection, SketchedLayer):
                projection = projection.to_dense()
            copy_into(weight, projection.weight)
            if bias is not None:
                copy_into(bias, projection.bias)
        if self.bias_k is not None and self.bias_v is not None:
            copy_into(dense.bias_k, self.bias_k)
            copy_into(dense.bias_v, self.bias_v)
        for name, parameter in dense.named_parameters():
            parameter.requires_grad_(attrgetter(name)(self).requires_grad)
        return dense.train(self.training)

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The weights of q, k, v (3 E, E), multiplied out when read; None if kdim or vdim differs."""
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            return None
        return self._stacked("weight", (3 * self.embed_dim, self.embed_dim))

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The biases of q, k, v (3 E,), or None."""
        return None if self.q_proj.bias is None else self._stacked("bias", (3 * self.embed_dim,))

    def _stacked(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        like = getattr(parts[0], kind)
        return lazy_weight(shape, like, lambda: torch.cat([getattr(part, kind) for part in parts]))

    @property
    def q_proj_weight(self) -> Tensor:
        """The weight of q (E, E), read-only."""
        return self.q_proj.weight

    @property
    def k_proj_weight(self) -> Tensor:
        """The weight of k (E, kdim), read-only."""
        return self.k_proj.weight

    @property
    def v_proj_weight(self) -> Tensor:
        """The weight of v (E, vdim), read-only."""
        return self.v_proj.weight

    @property
    def dense_weight(self) -> str:
        """See `SketchedLayer`."""
        return "in_proj_weight" if self.kdim == self.vdim == self.embed_dim else "q_proj_weight"

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`; a projection left dense is None."""
        projections = {name: getattr(self, name) for name in PROJECTIONS}
        return {
            "embed_dim": self.embed_dim,
            "num_heads": self.num_heads,
            **{name: spec_of_part(projection) for name, projection in projections.items()},
            "dropout": self.dropout,
            "bias": self.q_proj.bias is not None,
            "add_bias_kv": self.bias_k is not None,
            "add_zero_attn": self.add_zero_attn,
            "kdim": self.kdim,
            "vdim": self.vdim,
            "batch_first": self.batch_first,
            "attention": self.attention,
            "features": self.features,
            "feature_seed": self.feature_seed,
        }

    @property
    def not_shown(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `SketchedLayer`; the projections show themselves."""
        return PROJECTIONS if self.attention == "favor" else (*PROJECTIONS, "features", "feature_seed")

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        biases = 4 * (self.q_proj.bias is not None) + 2 * (self.bias_k is not None)
        return self.embed_dim * (2 * self.embed_dim + self.kdim + self.vdim + biases)

    @property
    def dense_macs(self) -> int:
        """Multiply-adds of the projections, per token; see `SketchedLayer.dense_macs`."""
        return self.embed_dim * (2 * self.embed_dim + self.kdim + self.vdim)


def projection_weights(
    layer: nn.MultiheadAttention,
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight (E, E, kdim or vdim) and bias (E,) of each projection, by its name in `PROJECTIONS`.

    Where torch keeps them stacked, they are views of `in_proj_weight` and `in_proj_bias`.
    """
    if layer.in_proj_weight is None:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    else:
        weights = list(layer.in_proj_weight.chunk(3))
    biases = [None] * 3 if layer.in_proj_bias is None else list(layer.in_proj_bias.chunk(3))
    weights.append(layer.out_proj.weight)
    biases.append(layer.out_proj.bias)
    return dict(zip(PROJECTIONS, zip(weights, biases, strict=True), strict=True))


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend from q (N, H, L, D) to k and v (N, H, S, D).

    Returns:
        The heads (N, H, L, D), and the weights (N, H, L, S) if they are needed.
    """
    mask = masks.merged()
    if not need_weights:
        is_causal = masks.is_causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
    logits = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
    # Under autocast the logits are of its type, and the mask takes it, as in torch.
    weights = (logits if mask is None else logits + mask.to(logits.dtype)).softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return weights @ v, weights


def dense_projection(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An `nn.Linear` with copies of a weight and a bias."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return linear
