"""What every sketched layer can do, whatever it replaces."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigError, ConfigTypeError, RankError

Spec = dict[str, Any]


class SketchedLayer(nn.Module):
    """A low-rank layer that stands in for a dense one.

    A subclass holds ordinary `nn.Linear` / `nn.Conv2d` factors, and is rebuilt without any
    weights by `type(layer)(**layer.sketch_spec())`.

    Attributes:
        scheme: how the weight is stored ("pivoted", "pair", "channel", ...).
        ranks: of the factors.
    """

    scheme: str
    ranks: tuple[int, ...]

    # Which parameters may be another layer's too, as an input factor that several share: all of them. Hugging
    # Face's `save_pretrained` asks every module, writes these once, and refuses what is shared otherwise.
    _tied_weights_keys: ClassVar[dict[str, str]] = {".*": ".*"}

    @abstractmethod
    def sketch_spec(self) -> Spec:
        """The constructor's keyword arguments, all of them JSON values (no device, no dtype)."""

    @abstractmethod
    def to_dense(self) -> nn.Module:
        """The ordinary layer with the factors multiplied out, in float64, then cast back."""

    @property
    @abstractmethod
    def dense_numbers(self) -> int:
        """Numbers the dense layer stores: parameters and buffers."""

    @property
    @abstractmethod
    def dense_macs(self) -> int:
        """Multiply-adds of the dense layer per row, or per output position of a convolution."""

    @property
    def macs(self) -> int:
        """Multiply-adds of this layer: one for each number of its factors, biases aside."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    @property
    def stored_numbers(self) -> int:
        """Numbers this layer stores: parameters and buffers."""
        tensors: list[Tensor] = [*self.parameters(), *self.buffers()]
        return sum(tensor.numel() for tensor in tensors)


def outermost(module: nn.Module, seen: set[int] | None = None) -> Iterator[SketchedLayer]:
    """The sketched layers of a model, each once, without those that are parts of another."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, SketchedLayer):
        yield module
        return
    for child in module.children():
        yield from outermost(child, seen)


def take_over(new: nn.Module, old: nn.Module, trainable: bool) -> None:
    """Give `new` the train/eval mode of `old`, and the `requires_grad` of its weight and of its bias."""
    new.train(old.training)
    for parameter in new.parameters():
        parameter.requires_grad_(trainable)
    old_bias, new_bias = getattr(old, "bias", None), getattr(new, "bias", None)
    if isinstance(old_bias, nn.Parameter) and isinstance(new_bias, nn.Parameter):
        new_bias.requires_grad_(old_bias.requires_grad)


def is_plain(factor: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a factor is no more than the function of its kind on its own parameters."""
    return (
        type(factor) is kind
        and type(factor.weight) is nn.Parameter
        and "forward" not in factor.__dict__  # accelerate wraps it there
        and not (factor._forward_hooks or factor._forward_pre_hooks)
        and not (factor._backward_hooks or factor._backward_pre_hooks)
    )


def check_rank(rank: int, largest: int, what: str) -> None:
    """Raise RankError unless rank is an integer in 1..largest."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= largest:
        raise RankError(f"{what}: rank={rank!r}, wanted an integer in 1..{largest}")


def check_rank_or_ratio(rank: object, ratio: object, what: str) -> None:
    """Raise ConfigError unless exactly one of rank and ratio is given, and ratio is in (0, 1]."""
    if (rank is None) == (ratio is None):
        raise ConfigError(f"{what}: give either rank= or ratio=, got {rank=} and {ratio=}")
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ConfigTypeError(f"{what}: {ratio=} is a {type(ratio).__name__}, wanted a number in (0, 1]")
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"{what}: {ratio=}, wanted 0 < ratio <= 1")


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter of another dtype or device, outside autograd."""
    with torch.no_grad():
        parameter.copy_(values)
