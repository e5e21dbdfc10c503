"""CORP: Zhang and Yang, "Closed-Form One-shot Representation-Preserving Structured Pruning", 2026.

Features between two layers of a transformer are left out, and what they said is told by those that stay, an
affine map of them fitted by ridge regression to the dense model's calibration data, which goes into weights:

    hidden features h of a feed-forward part, and the values that a head hands on:
        h_P ~ B h_S + c,    W'_2 = W_2S + W_2P B,    b'_2 = b_2 + W_2P c
    the D features in which the queries and keys of a head meet:
        q_P . k_P ~ [q_S, 1] . M k_S,    q' = (I + M_q)^T q_S + m,    k' = k_S

S stays and P goes; M_q are the rows of M for q_S and m the one for 1, which is a bias. M has the least
squared error over all queries and keys of each sequence, plus a ridge. The paper is read here from its
abstract, which does not say by what features are chosen: those stay that have the most power in what the
layer behind them computes, E[h_i^2] |W_2i|^2, and of queries and keys E sum (q_i k_i)^2 over a sequence.

Of each block the same share stays of the features of a head and, to the number that the budget allows, of
the feed-forward part; all heads keep equally many.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peers.calibration import call
from peers.job import Job, NotDefinedError
from peers.layers import UnfoldedAttention, linear_layer, weight_matrix

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
LAYERS = (*PROJECTIONS, "linear1", "linear2")
RIDGE = 1e-4  # of the mean of the diagonal

# B samples, T tokens, H heads, D features of a head, F features


@dataclass
class _Sums:
    """What the calibration data shows of one block, in float64.

    Attributes:
        hidden, mixed: (F + 1, F + 1) second moments of the inputs of linear2 and out_proj, a 1 behind each.
        queries, keys: (B, H, D + 1, D + 1) and (B, H, D, D), of each sequence; a 1 behind each query.
    """

    hidden: Tensor
    mixed: Tensor
    queries: Tensor
    keys: Tensor


def compress(job: Job, ratio: float) -> nn.Module:
    """Prune each block by itself, all by what the dense model shows.

    Raises:
        NotDefinedError: other layers are to be replaced than whole blocks of `nn.TransformerEncoder`.
    """
    layers = {n: m for n, m in job.dense.named_modules() if isinstance(m, nn.TransformerEncoderLayer)}
    if {f"{name}.{layer}" for name in layers for layer in LAYERS} != set(job.names):
        raise NotDefinedError("CORP is written for whole nn.TransformerEncoderLayer, and nothing else")
    if "corp" not in job.memory:
        job.memory["corp"] = {name: _sums(job, layer) for name, layer in layers.items()}
    small = job.copy()
    for name, sums in job.memory["corp"].items():
        _prune(small.get_submodule(name), sums, ratio)
    return small


@torch.no_grad()
def _sums(job: Job, layer: nn.Module) -> _Sums:
    attention = layer.self_attn
    seen: dict[str, list[Tensor]] = {"hidden": [], "mixed": [], "queries": [], "keys": []}

    def keep(name: str, x: Tensor) -> None:
        seen[name].append(x.double())

    def keep_input(name: str) -> Any:
        return lambda _, args: keep(name, args[0])

    def keep_output(name: str) -> Any:
        return lambda _, __, output: keep(name, output)

    handles = [
        layer.linear2.register_forward_pre_hook(keep_input("hidden")),
        attention.out_proj.register_forward_pre_hook(keep_input("mixed")),
        attention.q_proj.register_forward_hook(keep_output("queries")),
        attention.k_proj.register_forward_hook(keep_output("keys")),
    ]
    try:
        for batch in job.batches:
            call(job.dense, batch)
    finally:
        for handle in handles:
            handle.remove()
    heads = {
        name: torch.cat(seen[name]).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for name in ("queries", "keys")
    }
    queries = _with_one(heads["queries"])
    keys = heads["keys"]
    moments = [_with_one(torch.cat(seen[name]).flatten(0, -2)) for name in ("hidden", "mixed")]
    return _Sums(*(x.T @ x for x in moments), queries.mT @ queries, keys.mT @ keys)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _prune(layer: nn.Module, sums: _Sums, ratio: float) -> None:
    attention, hidden = layer.self_attn, layer.linear1.out_features
    heads, width = attention.heads, layer.linear2.out_features
    size = width // heads
    of_head, of_hidden = kept_features(heads, size, width, hidden, ratio)
    _prune_queries(attention, sums, of_head)
    by_head = _power(attention.out_proj, sums.mixed).view(heads, size)
    kept = _largest(by_head, of_head) + torch.arange(0, width, size)[:, None]
    attention.v_proj, attention.out_proj = _pair(
        attention.v_proj, attention.out_proj, sums.mixed, kept.flatten()
    )
    kept = _largest(_power(layer.linear2, sums.hidden), of_hidden)
    layer.linear1, layer.linear2 = _pair(layer.linear1, layer.linear2, sums.hidden, kept)


def kept_features(heads: int, size: int, width: int, hidden: int, ratio: float) -> tuple[int, int]:
    """How many of the `size` features of each head and of the `hidden` ones stay in the budget of a block."""
    budget = ratio * (4 * width * (width + 1) + hidden * (2 * width + 1) + width)
    of_head = max(1, round(ratio * size))
    of_attention = heads * of_head * (3 * (width + 1) + width) + width
    of_hidden = int((budget - of_attention - width) / (2 * width + 1) + 1e-9)
    if of_hidden < 1:
        raise NotDefinedError(f"at {ratio} no feature of the feed-forward part would stay")
    return of_head, min(of_hidden, hidden)


def _power(reader: nn.Linear, moments: Tensor) -> Tensor:
    return moments.diagonal()[:-1] * weight_matrix(reader).square().sum(0)


def _largest(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count).indices.sort().values


def _pair(writer: nn.Linear, reader: nn.Linear, moments: Tensor, kept: Tensor) -> tuple[nn.Linear, nn.Linear]:
    """The writer of the kept features, and the reader that makes up for the others."""
    gone = _others(kept, writer.out_features)
    told = torch.cat([kept, torch.tensor([writer.out_features])])  # those that stay, and the 1
    matrix = weight_matrix(reader)
    fitted = torch.linalg.solve(_ridged(moments[told][:, told]), moments[told][:, gone]).T
    change = matrix[:, gone] @ fitted
    first = linear_layer(weight_matrix(writer)[kept], writer.bias[kept])
    second = linear_layer(matrix[:, kept] + change[:, :-1], reader.bias.double() + change[:, -1])
    return first, second


def _prune_queries(attention: UnfoldedAttention, sums: _Sums, count: int) -> None:
    heads, size = sums.keys.shape[1:3]
    queries, keys = (
        (weight_matrix(p).unflatten(0, (heads, size)), p.bias.double().unflatten(0, (heads, size)))
        for p in (attention.q_proj, attention.k_proj)
    )
    power = sums.queries.diagonal(dim1=-2, dim2=-1)[..., :-1] * sums.keys.diagonal(dim1=-2, dim2=-1)
    found: list[list[Tensor]] = [[], [], [], []]
    for head, kept in enumerate(_largest(power.sum(0), count)):
        gone, told = _others(kept, size), torch.cat([kept, torch.tensor([size])])
        now = sums.queries[:, head][:, told]
        then = sums.keys[:, head][:, :, kept]
        left = torch.einsum("bik,bjl->ijkl", now[:, :, told], then[:, kept]).flatten(2).flatten(0, 1)
        right = (now[:, :, gone] @ then[:, gone]).sum(0)
        map_q = torch.linalg.solve(_ridged(left), right.flatten()).view_as(right)
        mixing = (torch.eye(count, dtype=map_q.dtype) + map_q[:-1]).T * (count / size) ** 0.5
        found[0].append(mixing @ queries[0][head, kept])
        found[1].append(mixing @ queries[1][head, kept] + map_q[-1] * (count / size) ** 0.5)
        found[2].append(keys[0][head, kept])
        found[3].append(keys[1][head, kept])
    whole = [torch.cat(parts) for parts in found]
    attention.q_proj, attention.k_proj = linear_layer(*whole[:2]), linear_layer(*whole[2:])


def _others(kept: Tensor, size: int) -> Tensor:
    gone = torch.ones(size, dtype=torch.bool)
    gone[kept] = False
    return gone.nonzero()[:, 0]


def _ridged(moments: Tensor) -> Tensor:
    return moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype)
