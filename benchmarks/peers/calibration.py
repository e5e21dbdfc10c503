"""What the peers know of a layer's inputs: in one pass for all layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from peers.layers import input_key, input_rows

DAMPING = 1e-5


@dataclass
class Statistics:
    """Sums over the inputs X (N, I) of a dense layer.

    Attributes:
        gram: (I, I), X^T X, float64.
        magnitude: (I,), mean |x|, float64.
    """

    gram: Tensor
    magnitude: Tensor

    @cached_property
    def root(self) -> tuple[Tensor, Tensor]:
        """(I, I) R and its inverse, with R R^T = X^T X, slightly damped; by eigh, which never fails."""
        return square_root(self.gram)


def square_root(gram: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """R = Q sqrt(L) and R^-1, from gram = Q L Q^T with `damping` times the mean of L added."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0) + damping * values.mean()
    return vectors * values.sqrt(), (vectors / values.sqrt()).T


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def told(batch: Any, x: Tensor) -> Tensor:
    """Without the positions of x (B, T, F) that the batch's attention mask hides, (N, F); else x itself."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    return x if mask is None or x.shape[:2] != mask.shape else x[mask.bool()]


def main_output(output: Any) -> Tensor:
    """The tensor that counts among what a model returns: the first one."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


@contextmanager
def listening(model: nn.Module, names: Sequence[str], tell: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `tell` with the input of each layer."""
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: tell(name, args[0]))
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def input_groups(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> list[list[str]]:
    """The layers in the order in which they run; those fed with the same input together."""
    seen: dict[str, tuple[object, ...]] = {}
    alive = []

    def tell(name: str, x: Tensor) -> None:
        alive.append(x)  # else another tensor could get its id
        seen[name] = input_key(model.get_submodule(name), x)

    with listening(model, names, tell):
        run()
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, key in seen.items():
        groups.setdefault(key, []).append(name)
    missing = set(names) - set(seen)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} did not run on the calibration data")
    return list(groups.values())


@torch.no_grad()
def collect(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> dict[str, Statistics]:
    """One pass over the data; products in float32, sums in float64."""
    groups = input_groups(model, names, lambda: call(model, batches[0]))
    grams: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def tell(name: str, x: Tensor) -> None:
        rows = input_rows(model.get_submodule(name), told(batch, x))
        grams[name] = grams.get(name, 0) + (rows.T @ rows).double()
        sums[name] = sums.get(name, 0) + rows.abs().sum(0).double()
        counts[name] = counts.get(name, 0) + len(rows)

    with listening(model, [group[0] for group in groups], tell):
        for batch in batches:
            call(model, batch)
    found = {}
    for group in groups:
        first = group[0]
        statistics = Statistics(grams[first], sums[first] / counts[first])
        found.update(dict.fromkeys(group, statistics))
    return found


def fisher(
    model: nn.Module, names: Sequence[str], batches: Sequence[Any], outputs: str, samples: int, seed: int
) -> dict[str, Tensor]:
    """(O, I) mean squared gradient of each weight, float64, over single samples.

    The loss is the negative log-likelihood of a target drawn from the model itself, so that no labels are
    needed: a class for "classes", a unit Gaussian around the output for "values".
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: model.get_submodule(name).weight for name in names}
    sums = {name: torch.zeros(w.flatten(1).shape, dtype=torch.float64) for name, w in weights.items()}
    singles = [single for batch in batches for single in _split(batch)]
    chosen = torch.randperm(len(singles), generator=generator)[:samples].tolist()
    for place in chosen:
        output = main_output(call(model, singles[place]))
        if outputs == "classes":
            logits = output.flatten(0, -2)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = nn.functional.cross_entropy(logits, drawn[:, 0], reduction="sum")
        else:
            loss = told(singles[place], output * torch.randn(output.shape, generator=generator)).sum()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            sums[name] += gradient.flatten(1).double().square()
    return {name: total / len(chosen) for name, total in sums.items()}


def _split(batch: Any) -> list[Any]:
    if isinstance(batch, Tensor):
        return list(batch.split(1))
    if isinstance(batch, dict):
        parts = zip(*(value.split(1) for value in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    return list(zip(*(value.split(1) for value in batch), strict=True))
