"""What models of diffusers do besides where layers are sketched.

`save_pretrained` writes the sketch that the model is now: adapters may have been merged into it, or a part
sketched by itself. `from_config` makes a sketched model of the config of one, as `EMAModel.save_pretrained`
asks for.
"""

import functools
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from panther_compile.errors import CheckpointError
from panther_compile.integrations.diffusion import (
    KEY,
    DiffusionSketchConfig,
    Method,
    put_layers,
    register,
    tie,
)
from panther_compile.kinds.plain_form import check_origins
from panther_compile.layers.base import check_held

_theirs = ModelMixin.save_pretrained


@functools.wraps(_theirs)
def _save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
    check_origins(self)
    register(self)
    check_held(self, "call save_pretrained")
    return _theirs(self, *args, **options)


def _from_config(cls: Any, config: Any = None, *args: Any, **options: Any) -> Any:
    """See diffusers; factors of a sketch begin with the initial values of layers of their kinds.

    Raises:
        CheckpointError: a layer has buffers, as a narrow one, which the config does not tell.
    """
    found = super(ModelMixin, cls).from_config(config, *args, **options)  # type: ignore[misc]
    model = found[0] if isinstance(found, tuple) else found
    sketch = config.get(KEY) if isinstance(config, dict) else None
    if isinstance(sketch, dict) and sketch.get("quant_method") == Method.SKETCHED.value:
        sketch = DiffusionSketchConfig(**sketch)
    device = next(model.parameters()).device
    if isinstance(sketch, DiffusionSketchConfig) and device.type != "meta":  # else from_pretrained does it
        put_layers(model, sketch, lambda layer: _initialize(layer, device))
        tie(model, sketch)
        register(model)
    return found


def _initialize(layer: nn.Module, device: torch.device) -> None:
    if any(buffer.numel() for buffer in layer.buffers()):
        raise CheckpointError(
            f"from_config of a sketch with a {type(layer).__name__}: a config does not tell its buffers, as "
            "which features narrow layers keep; use from_pretrained, or sketch with narrow=False"
        )
    for part in layer.to_empty(device=device).modules():
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()


_mixin: Any = ModelMixin
_mixin.save_pretrained = _save_pretrained
_mixin.from_config = classmethod(_from_config)
