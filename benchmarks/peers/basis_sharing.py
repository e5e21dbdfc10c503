"""Basis Sharing: Wang et al., "Basis Sharing: Cross-Layer Parameter Sharing for LLM Compression", ICLR 2025.

Layers of one name in two blocks that follow each other, if they read the stream between blocks (query, key
and value; up and gate), store one basis: with S S^T the sum of X^T X of both, [W_1; W_2] S = U diag(s) V^T,
the basis is the first r rows of V^T S^-1, and each layer has coefficients of its own, its rows of U diag(s).
What reads the result of the attention or of the neurons is cut by itself, as by SVD-LLM. All have the same
ratio. At .6 and below, as in the configurations of their repository, all coefficients are fitted once more,
by least squares, to what the compressed model gives its layers. Without their fine-tuning by LoRA.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peers.budget import spend
from peers.calibration import DAMPING, call, input_groups, listening, square_root, told
from peers.job import Job, NotDefinedError
from peers.layers import Factored, balanced, first_layer, linear_layer
from peers.nested import Factors
from peers.svd import decompose_matrix

TOGETHER = 2  # blocks
REFITTED = 0.6  # ratio, from which on down coefficients are fitted again

Group = tuple[str, ...]
"""The layers that store one basis."""


def compress(job: Job, ratio: float) -> nn.Module:
    """Cut each group, and fit the coefficients again where the ratio is small.

    Raises:
        NotDefinedError: the layers are not all linear, in blocks.
    """
    groups = _groups(job)
    if "basis-sharing" not in job.memory:
        job.memory["basis-sharing"] = [_decompose(job, group) for group in groups]
    small, ranks = job.copy(), _ranks(job, groups, ratio)
    for group, (left, right) in zip(groups, job.memory["basis-sharing"], strict=True):
        rank = ranks[group[0]]
        _put(job, small, group, left[:, :rank], right[:rank])
    if ratio <= REFITTED:
        _refit(job, small, groups)
    return small


def _groups(job: Job) -> list[Group]:
    """The layers of the same name in neighbouring blocks where they read the stream, others alone."""
    inside = [[name for name in job.names if name.startswith(f"{block}.")] for block in job.blocks]
    if not job.is_linear or not job.blocks or sum(map(len, inside)) != len(job.names):
        raise NotDefinedError("Basis Sharing is written for linear layers in a chain of blocks")
    groups: list[Group] = []
    for start in range(0, len(inside), TOGETHER):
        blocks = job.blocks[start : start + TOGETHER]
        in_order = input_groups(job.dense, inside[start], lambda: call(job.dense, job.batches[0]))
        for place, layers in enumerate(in_order):
            reads_stream = place % 2 == 0  # attention and feed-forward, each in and out
            for name in layers:
                same = [block + name.removeprefix(job.blocks[start]) for block in blocks]
                groups.extend([tuple(same)] if reads_stream else [(one,) for one in same])
    return groups


def _decompose(job: Job, group: Group) -> Factors:
    grams = torch.stack([job.statistics[name].gram for name in group])
    root, inverse = square_root(grams.sum(0))
    left, right = decompose_matrix(torch.cat([job.weight(name) for name in group]) @ root)
    return left, right @ inverse


def _ranks(job: Job, groups: Sequence[Group], ratio: float) -> dict[str, int]:
    """The rank of each group, by its first layer."""
    shapes, biases = {}, {}
    for group in groups:
        shapes[group[0]] = sum(job.shapes[name][0] for name in group), job.shapes[group[0]][1]
        biases[group[0]] = sum(job.biases[name] for name in group)
    return spend(shapes, biases, ratio)


def _put(job: Job, small: nn.Module, group: Group, left: Tensor, right: Tensor) -> None:
    """Layers with one first factor; each side of it gets half of every singular value."""
    left, right = balanced(left, right)
    first = first_layer(job.dense.get_submodule(group[0]), right)
    for name, rows in zip(group, left.split([job.shapes[name][0] for name in group]), strict=True):
        second = linear_layer(rows, job.dense.get_submodule(name).bias)
        small.set_submodule(name, Factored(first, second))


@torch.no_grad()
def _refit(job: Job, small: nn.Module, groups: Sequence[Group]) -> None:
    """Coefficients W M B^T (B M B^T)^-1, with B the basis and M = X'^T X' of all of a group."""
    moments: dict[str, Tensor] = {}

    def tell(name: str, x: Tensor) -> None:
        rows = told(batch, x).flatten(0, -2)
        moments[name] = moments.get(name, 0) + (rows.T @ rows).double()

    # each layer of a group calls the same first factor, so that one name hears them all
    with listening(small, [f"{group[0]}.0" for group in groups], tell):
        for batch in job.batches:
            call(small, batch)
    for group in groups:
        moment = moments[f"{group[0]}.0"]
        for name in group:
            first, second = small.get_submodule(name)
            basis = first.weight.double()
            inner = basis @ moment @ basis.T
            inner += DAMPING * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype)
            second.weight.copy_(torch.linalg.solve(inner, basis @ moment @ job.weight(name).T).T)
