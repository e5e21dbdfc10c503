"""What every sketched layer can do, whatever it replaces."""

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from panther_compile.config import read_number
from panther_compile.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    FactoredWeightError,
    LayerError,
    NoTargetError,
    RankError,
    WeightError,
)
from panther_compile.factorization.values import check_loaded, check_values
from panther_compile.names import dotted

Spec = dict[str, Any]
_FACTORS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


class SketchedLayer(nn.Module):
    """A low-rank layer that stands in for a dense one.

    A subclass holds ordinary `nn.Linear` / `nn.Conv2d` factors, and is rebuilt without any
    weights by `type(layer)(**layer.sketch_spec())`.

    Attributes:
        scheme: how the weight is stored ("pivoted", "pair", "channel", ...).
        ranks: ranks of the factors.
        stages: names of the factors, in the order in which they run; none of a layer of several weights.
        dense_type: the class of torch that it stands for, with sizes of the same names; `nn.Module` if none.
        rank_first: whether the weight of its last factor has the rank as its first dimension, not its second.
        no_factors: names of submodules that are neither factors nor layers that hold some.
        not_shown: names in `sketch_spec` that `print(model)` leaves out.
        dense_weight: what the dense layer calls its weight, or the first of several.
        empty_shape: shape of the empty tensor that a file holds under that name; loaders may slice it.
    """

    scheme: str
    ranks: tuple[int, ...]
    stages: tuple[str, ...] = ()
    dense_type: ClassVar[type[nn.Module]] = nn.Module
    rank_first: ClassVar[bool] = False
    no_factors: ClassVar[frozenset[str]] = frozenset()
    not_shown: ClassVar[Collection[str]] = ()

    @property
    def dense_weight(self) -> str:
        """See above."""
        return "weight"

    @property
    def empty_shape(self) -> tuple[int, ...]:
        """See above."""
        return (0,)

    @property
    def multiplies_out(self) -> bool:
        """Whether the dense weight is made of the factors at each call, as running them would take longer."""
        return False

    # Which parameters may be another layer's too, as an input factor that several share: all of them. Hugging
    # Face's `save_pretrained` asks every module, writes these once, and refuses what is shared otherwise.
    _tied_weights_keys: ClassVar[dict[str, str]] = {".*": ".*"}

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a new weight or bias: there is no such tensor, but factors of it."""
        if isinstance(value, Tensor):
            self._check_own(name, "set")
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse what `torch.nn.utils.prune` would keep a weight or bias under, likewise."""
        self._check_own(name.removesuffix("_orig"), "pruned")
        super().register_parameter(name, param)

    def _check_own(self, name: str, done: str) -> None:
        """Raise FactoredWeightError if a tensor is made of the layer's parts."""
        if isinstance(getattr(type(self), name, None), property):
            raise FactoredWeightError(
                f"{type(self).__name__}.{name} cannot be {done}: it is made of the layer's parts when it "
                "is read. Their parameters can be; or make the layer dense first: "
                "panther_compile.densify(model)"
            )

    def __prepare_scriptable__(self) -> Any:
        """Say why `torch.jit.script` cannot take the layer, which it would in a riddle."""
        raise LayerError(
            f"torch.jit.script cannot read {type(self).__name__}: use torch.jit.trace, torch.export or "
            "torch.compile, or script what densify gives"
        )

    @abstractmethod
    def sketch_spec(self) -> Spec:
        """The constructor's keyword arguments, all of them JSON values (no device, no dtype)."""

    def extra_repr(self) -> str:
        """The constructor's arguments and the stored share, as `print(model)` shows them."""
        spec = {name: value for name, value in self.sketch_spec().items() if name not in self.not_shown}
        shown = [f"{name}={value}" for name, value in spec.items()]
        return f"{', '.join(shown)}, stored={self.stored_numbers / self.dense_numbers:.3f}"

    def adopt(self, dense: nn.Module) -> Self:
        """Take from the layer that is replaced what no spec holds, without changing it: nothing, as a rule.

        Raises:
            CheckpointMismatchError: it is none that this layer replaces.
        """
        return self

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

    def weight_error(self, weight: Tensor, generator: torch.Generator) -> float | None:
        """Relative Frobenius error of the weight as stored.

        Args:
            weight: the dense one, in the shape of this layer's `weight` or flattened to a matrix.
            generator: generator of random probes, where the error is estimated.

        Returns:
            None where other weights than the dense layer's do the same.
        """
        stored: Tensor = self.weight  # type: ignore[assignment]
        wanted = weight.detach().double()
        size = torch.linalg.vector_norm(wanted)
        distance = torch.linalg.vector_norm(wanted - stored.detach().double().reshape(wanted.shape))
        return float(distance / size) if size > 0 else 0.0

    @property
    def macs(self) -> int:
        """Multiply-adds of this layer: one for each number of its factors, biases aside."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    @property
    def stored_numbers(self) -> int:
        """Numbers this layer stores: parameters and buffers."""
        tensors: list[Tensor] = [*self.parameters(), *self.buffers()]
        return sum(tensor.numel() for tensor in tensors)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Note the spec beside torch's version number: layers of two specs may be alike in all shapes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]]["sketch_spec"] = self.sketch_spec()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Refuse the weight of the dense layer, and factors of another form; pass over the empty weight.

        `save_pretrained` leaves an empty one.
        """
        for name in _DENSE_WEIGHTS:
            dense = state_dict.get(prefix + name)
            if dense is None:
                continue
            if dense.numel() > 0:
                raise CheckpointMismatchError(
                    f"{prefix}{name} {tuple(dense.shape)} is the weight of a dense layer, and here is a "
                    f"{type(self).__name__}: load it into the "
                    "dense model and call sketchify, or load project_state_dict(model, state_dict)"
                )
            del state_dict[prefix + name]
        self._check_spec(prefix, local_metadata.get("sketch_spec"))
        self._check_slice(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def _pivot_at(self, start: int, device: torch.device | str | None) -> None:
        """Note where the slice of pivots begins; an empty buffer marks the trailing one.

        Factors of the leading and of the trailing slice have the same shapes, and a file may hold tensors
        alone. The buffer is on the device of the factors, or on the CPU if they are on the meta device.
        """
        self.start = start
        if start:
            place = None if device is None or torch.device(device).type == "meta" else device
            self.register_buffer(_TRAILING, torch.empty(0, dtype=torch.uint8, device=place))

    def put_marks_beside(self, factor: Tensor) -> None:
        """Move the buffer of `_pivot_at` to the device of a factor that was put into the layer."""
        if (mark := self._buffers.get(_TRAILING)) is not None:
            self._buffers[_TRAILING] = mark.to(factor.device)

    def _check_slice(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Refuse factors whose pivots are said to be the trailing inputs, where they are not.

        A missing buffer says nothing: parameters may be given alone, and `accelerate` writes the first of all
        empty tensors alone.
        """
        name, here = prefix + _TRAILING, self._buffers.get(_TRAILING)
        if here is not None:
            state_dict.setdefault(name, here)
        elif name in state_dict:
            raise CheckpointMismatchError(
                f"{prefix[:-1] or type(self).__name__}: these factors are of another sketch, whose pivots "
                "are the trailing inputs, here the leading ones: load them by load_sketched, or into a "
                "sketch of the same weights"
            )

    def _check_spec(self, prefix: str, saved: Spec | None) -> None:
        """Refuse factors that were saved by a layer of another spec; one that is not known passes."""
        shown = "" if saved is None else difference_of_specs(saved, self.sketch_spec())
        if shown:
            raise CheckpointMismatchError(
                f"{prefix[:-1] or type(self).__name__}: {shown}: load "
                "them by load_sketched, or into a sketch of the same weights"
            )


def difference_of_specs(saved: Spec, own: Spec) -> str:
    """Why factors that were saved are not those of a layer, in words; empty if they may be.

    Args:
        saved: the spec of the layer that saved them; as JSON has it, or not.
        own: of the layer that is here.
    """
    saved, own = (json.loads(json.dumps(one)) for one in (saved, own))
    differ = [key for key in {**own, **saved} if saved.get(key) != own.get(key)]
    shown = ", ".join(f"{key} {_short(saved.get(key))}, here {_short(own.get(key))}" for key in differ)
    return f"these factors are of another sketch ({shown})" if differ else ""


def _short(value: object) -> str:
    """A value on a line of an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


_TRAILING = "trailing"
_DENSE_WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight")


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


def sketched_layers(model: nn.Module, advice: str = "call sketchify first") -> list[SketchedLayer]:
    """The same; raises NoTargetError, with advice, if there are none."""
    layers = list(outermost(model))
    if not layers:
        said = f": {advice}" if advice else ""
        raise NoTargetError(f"{type(model).__name__} holds no sketched layer{said}")
    return layers


def spec_of_part(part: nn.Module) -> Spec | None:
    """The spec of a part, None for one that is dense; see `parts.part_of_spec`."""
    return part.sketch_spec() if isinstance(part, SketchedLayer) else None


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
    return is_called_plainly(factor, kind) and type(factor.weight) is nn.Parameter


def is_called_plainly(factor: nn.Module, kind: type[nn.Module]) -> bool:
    """The same whatever the weight's type: while a graph is captured, all weights are of another."""
    return (
        type(factor) is kind
        and "forward" not in factor.__dict__  # accelerate wraps it there
        and not (factor._forward_hooks or factor._forward_pre_hooks)
        and not (factor._backward_hooks or factor._backward_pre_hooks)
    )


def keeps_numbers_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are in other tensors, as quantizers' and FSDP2's are."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_weights(model: nn.Module, action: str) -> None:
    """Check that the factors of a model's sketched layers are layers that hold a weight.

    Args:
        model: with sketched layers.
        action: what is to be done before they are quantized, in words.

    Raises:
        WeightError: one is of another class, as quantizers put in their place.
    """
    for name, layer in model.named_modules():
        for key, part in layer.named_children() if isinstance(layer, SketchedLayer) else ():
            if isinstance(part, SketchedLayer | nn.ModuleList) or key in layer.no_factors:
                continue
            if not isinstance(getattr(part, "weight", None), Tensor):
                raise WeightError(
                    f"{dotted(name, key)} is a {type(part).__name__}, whose weight is no tensor: {action} "
                    "before it is quantized"
                )


def check_factors(model: nn.Module, action: str, *, numbers: bool = False) -> None:
    """Check that the factors of a model's sketched layers are tensors to compute with.

    Args:
        model: with sketched layers.
        action: what is to be done before they are quantized or sharded, in words.
        numbers: whether they must be loaded and finite; else they must be loaded only where accelerate keeps
            them on disk, and a skeleton passes.

    Raises:
        WeightError: one is not.
    """
    check_weights(model, action)
    for name, layer in model.named_modules():
        for key, parameter in layer.named_parameters() if isinstance(layer, SketchedLayer) else ():
            full = dotted(name, key)
            if keeps_numbers_elsewhere(parameter):
                raise WeightError(
                    f"{full} is a {type(parameter).__name__}: {action} before it is quantized or sharded"
                )
            if numbers:
                check_values(parameter, full)
            elif any("_hf_hook" in vars(part) for part in layer.modules()):
                check_loaded(parameter, full)


def check_held(model: nn.Module, action: str) -> None:
    """Check that each factor of a model's sketched layers holds its weight as a parameter.

    Args:
        model: with sketched layers.
        action: what is to be done once they do, in words.

    Raises:
        CheckpointError: one is pruned or parametrized, which no spec says.
    """
    for name, layer in model.named_modules():
        for key, part in layer.named_modules() if isinstance(layer, SketchedLayer) else ():
            if isinstance(part, _FACTORS) and "weight" not in part._parameters:
                raise CheckpointError(
                    f"{dotted(name, key)} makes its weight of other tensors: {action} after "
                    "torch.nn.utils.prune.remove or parametrize.remove_parametrizations"
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
    if not 0.0 < read_number(f"{what}: ratio", ratio, "a number in (0, 1]") <= 1.0:
        raise ConfigError(f"{what}: {ratio=}, wanted 0 < ratio <= 1")


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter of another dtype or device, outside autograd."""
    with torch.no_grad():
        parameter.copy_(values)
