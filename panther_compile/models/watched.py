"""Stand-ins that see what reaches a layer, and copies of a model that hold them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.errors import ConfigTypeError
from panther_compile.models.outputs import check_dense, is_transformed
from panther_compile.models.substitute import copied, copies_of_empty, held_tensors, written_tensors

OnInput = Callable[[str, Tensor], None]
OnOutput = Callable[[str, Tensor], Tensor]


class Watched(nn.Module):
    """Calls a layer, and tells of it.

    Attributes:
        layer: that is called; whatever else is read here is read from it.
        on_input: called with the name and the input, before.
        on_output: called with the name and the output, after; gives what is handed on.
        instead: called with the name and the input in place of the layer.
        hidden: whether it was called under a transform of `torch.func`; nothing is told of those calls.
    """

    layer: nn.Module

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.watched_name = name
        self.layer = layer
        self.on_input: OnInput | None = None
        self.on_output: OnOutput | None = None
        self.instead: OnOutput | None = None
        self.hidden = False

    def __getattr__(self, name: str) -> Any:
        """Read from the layer what the replacement has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer."""
        x: Tensor = first_argument(args, kwargs)
        if isinstance(x, Tensor):
            check_dense(x, f"what reaches {self.watched_name or 'the model'}")
            if is_transformed(x):
                self.hidden = True
                return self.layer(*args, **kwargs)  # type: ignore[no-any-return]
        if self.on_input is not None:
            with torch.no_grad():  # where the model differentiates, gradients are on
                self.on_input(self.watched_name, x)
        if self.instead is not None:
            return self.instead(self.watched_name, x)
        out: Tensor = self.layer(*args, **kwargs)
        return out if self.on_output is None else self.on_output(self.watched_name, out)


class Follower(Watched):
    """Calls a layer tied to a watched one; once that is replaced, a layer that shares its factors.

    Args:
        name: name of the layer.
        layer: the dense one.
        leader: what watches the other layer.
        share: makes a replacement from that of the other layer, for the dense one.
    """

    def __init__(
        self, name: str, layer: nn.Module, leader: Watched, share: Callable[[Any, nn.Module], nn.Module]
    ) -> None:
        super().__init__(name, layer)
        self._dense, self._share = (layer,), share
        self._leader, self._first = (leader,), (leader.layer,)  # in tuples: they are no parts of it
        self._follows = self._first

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call what goes with the other layer as it is now."""
        now = (self._leader[0].layer,)
        if now[0] is not self._follows[0]:
            dense = self._dense[0]
            self.layer = dense if now[0] is self._first[0] else self._share(now[0], dense)
            self._follows = now
        return super().forward(*args, **kwargs)


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The input of a layer that is called with these: the first, or what is given by its name there."""
    return args[0] if args else kwargs["input" if "input" in kwargs else next(iter(kwargs))]


@contextmanager
def inputs_seen(modules: Iterable[nn.Module], see: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """While it is open, a function is told of each module that is called, and of its input.

    Args:
        modules: stay in their model, unlike what `Watched` stands for.
        see: called before the module; not under a transform of `torch.func`.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = first_argument(args, kwargs)
        if not (isinstance(given, Tensor) and is_transformed(given)):
            see(module, given)

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class Arrival:
    """What reached a layer with one batch: x in the dense model, z in the sketched one.

    Attributes:
        batch: place of the batch in the data.
        x: the layer's input in the dense model.
        z: likewise, in the sketched one.
        residuals: what the layer's output is added to, in the dense model and in the sketched one, if known.
    """

    batch: int
    x: Tensor
    z: Tensor
    residuals: tuple[Tensor, Tensor] | None = None

    def evened(self) -> "Arrival":
        """Itself; where z is of another length, as speech that a model times may be, with z in place of x."""
        if self.x.shape == self.z.shape:
            return self
        return replace(self, x=self.z, residuals=None)


def rows_of(arrivals: Iterable[Arrival], channel_dim: int) -> int:
    """How many rows of features reached the layer in the sketched model, the features along a dimension."""
    return sum(arrival.z.numel() // arrival.z.shape[channel_dim] for arrival in arrivals)


@dataclass(frozen=True, slots=True)
class Side:
    """A copy of the model, and the replacements that it holds.

    Attributes:
        model: the copy.
        watched: the replacements, by name.
        followers: likewise of the layers that have a weight in common with one of these.
    """

    model: nn.Module
    watched: Mapping[str, Watched]
    followers: Mapping[str, Watched] = field(default_factory=dict)

    @contextmanager
    def seen_by(
        self,
        on_input: OnInput | None = None,
        on_output: OnOutput | None = None,
        names: Iterable[str] | None = None,
    ) -> Iterator[None]:
        """While it is open, those of `watched`, or of some names, call these; see `Watched`."""
        every = {**self.followers, **self.watched}
        seen = [every[name] for name in (self.watched if names is None else names)]
        for one in seen:
            one.on_input, one.on_output = on_input, on_output
        try:
            yield
        finally:
            for one in seen:
                one.on_input = one.on_output = None


def put_layers(side: Side, layers: Mapping[str, nn.Module]) -> None:
    """Put layers, by name, where those of a watched model are."""
    for name, layer in layers.items():
        side.watched[name].layer = layer


def copy_sharing(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module tree in eval mode that shares what no run changes, with modules replaced.

    Tensors that a run may write into, see `written_tensors`, are the copy's own.

    Args:
        model: is not changed.
        new: the replacements.

    Raises:
        ConfigTypeError: the model cannot be copied, or a run would change it: it has lazy layers.
    """
    held = list(held_tensors(model))
    if any(isinstance(tensor, UninitializedTensorMixin) for tensor in held):
        raise ConfigTypeError(
            f"{type(model).__name__} has lazy layers, whose sizes a run of its copy would decide: run one "
            "batch through the model first"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in held}
    memo |= {id(tensor): _own(tensor) for tensor in written_tensors(model, held)}
    memo |= copies_of_empty(model)
    memo |= {id(old): replacement for old, replacement in new.items()}
    return copied(lambda given: copy.deepcopy(given, memo).eval(), model, ", which data= needs")


def _own(tensor: Tensor) -> Tensor:
    """A copy of what a module holds."""
    made = tensor.detach().clone()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
