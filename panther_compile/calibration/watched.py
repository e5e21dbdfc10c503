"""Stand-ins that see what reaches a layer, and copies of a model that hold them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from panther_compile.substitute import copied, held_tensors

OnInput = Callable[[str, Tensor], None]
OnOutput = Callable[[str, Tensor], Tensor]


class Watched(nn.Module):
    """Calls a layer, and tells of it.

    Attributes:
        layer: that is called; whatever else is read here is read from it.
        on_input: called with the name and the input, before.
        on_output: called with the name and the output, after; gives what is handed on.
        instead: called with the name and the input in place of the layer.
    """

    layer: nn.Module

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.watched_name = name
        self.layer = layer
        self.on_input: OnInput | None = None
        self.on_output: OnOutput | None = None
        self.instead: OnOutput | None = None

    def __getattr__(self, name: str) -> Any:
        """Read from the layer what the stand-in has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layer"], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer."""
        if self.on_input is not None:
            self.on_input(self.watched_name, x)
        if self.instead is not None:
            return self.instead(self.watched_name, x)
        out: Tensor = self.layer(x, *args, **kwargs)
        return out if self.on_output is None else self.on_output(self.watched_name, out)


@dataclass(frozen=True, slots=True)
class Side:
    """A copy of the model, and the stand-ins that it holds."""

    model: nn.Module
    watched: Mapping[str, Watched]


def copy_sharing(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module tree in eval mode that shares every tensor, with modules replaced.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in held_tensors(model)}
    memo |= {id(old): replacement for old, replacement in new.items()}
    return copied(lambda given: copy.deepcopy(given, memo), model, ", which data= needs").eval()
