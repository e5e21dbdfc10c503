"""`save_pretrained` and `from_pretrained` of diffusers, for models with sketched layers.

As for transformers (pretrained.py): the config of a model holds the `sketch_spec` of each sketched layer, and
a quantizer that it names puts empty ones into a fresh model before the weights are loaded. diffusers writes
the config before it asks the quantizer, so the sketch is put there when the model is made and, by
diffusion_mixin.py, when it is saved. Where
panther_compile is not imported, diffusers refuses the config and names it.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any

from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import nn

from panther_compile.api import densify
from panther_compile.checkpoint import SavedLayer, empty_layers, layers_to_json
from panther_compile.errors import CheckpointMismatchError
from panther_compile.integrations.saved_config import check_format, models_within, parameter_aliases
from panther_compile.layers.base import outermost
from panther_compile.models.substitute import replace_inside
from panther_compile.names import owner_of
from panther_compile.planning.own_weights import lift_own_weights, lower_own_weights
from panther_compile.records import keep_record, on_record_change
from panther_compile.typed_json import read_record

VERSION = 1
KEY = "quantization_config"


class Method(enum.StrEnum):
    """The name of the sketch in a config, of the kind that diffusers has for it."""

    SKETCHED = "panther_compile"


class DiffusionSketchConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The sketch of a model, as its `config.json` holds it.

    Args:
        layers: name, type and `sketch_spec` of each sketched layer.
        aliases: of parameters that several layers share, {other name: first name}.
        model: the class that was saved.
        version: of this format.
        **others: what is for readers of the file.

    Raises:
        CheckpointVersionError: a newer version wrote it.
    """

    def __init__(
        self,
        layers: list[dict[str, Any]],
        aliases: Mapping[str, str],
        model: str,
        version: int = VERSION,
        **others: Any,
    ) -> None:
        check_format(version, VERSION)
        self.quant_method = Method.SKETCHED  # type: ignore[assignment]
        self.version, self.model = version, model
        self.layers, self.aliases = layers, dict(aliases)

    def to_diff_dict(self) -> dict[str, Any]:
        """All of it."""
        return self.to_dict()


class DiffusionSketchQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """What diffusers calls a quantizer; the layers of its models are ordinary ones, of any dtype."""

    requires_calibration = True  # from_pretrained makes no sketch of a dense model
    use_keep_in_fp32_modules = True

    @property
    def is_serializable(self) -> bool:
        """True."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True."""
        return True

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors without those that have another name too: safetensors refuses them."""
        sketch: Any = self.quantization_config
        return {name: value for name, value in state_dict.items() if name not in sketch.aliases}, {}

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Tied tensors are not missing; a factor must not be."""
        sketch: Any = self.quantization_config
        missing = [name for name in missing_keys if name not in sketch.aliases]
        inside = tuple(f"{entry['name']}." for entry in sketch.layers)
        factor = next((name for name in missing if name.startswith(inside)), None)
        if factor is not None:
            raise CheckpointMismatchError(
                f"config.json of {type(model).__name__}: the weights have no {factor}, a factor of the "
                "sketch that it tells of; they are of another state of the model"
            )
        return missing

    def check_if_quantized_param(self, *args: Any, **others: Any) -> bool:
        """No: diffusers sets every tensor itself."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **others: Any) -> None:
        sketch: Any = self.quantization_config
        put_layers(model, sketch)

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Tie what was tied, and leave a model that can be trained, cast and moved as any other."""
        sketch: Any = self.quantization_config
        tie(model, sketch)
        model.is_quantized = False
        del model.quantization_method
        keep_record(model, None)
        return model

    def _dequantize(self, model: Any) -> Any:
        """See `densify`."""
        return densify(model, inplace=True)


def put_layers(
    model: nn.Module, sketch: DiffusionSketchConfig, fill: Callable[[nn.Module], object] = id
) -> None:
    """Put the layers that a sketch tells of in the place of dense ones.

    Args:
        model: is changed.
        sketch: of a model of its class.
        fill: what to do with each layer, which is on the meta device, before.
    """
    where = f"config.json of {type(model).__name__}"
    saved = [read_record(SavedLayer, entry, where) for entry in sketch.layers]
    lift_own_weights(model)
    new = empty_layers(model, saved, sketch.model, where)
    for layer in new.values():
        fill(layer)
    replace_inside(model, new)
    lower_own_weights(model)


def tie(model: nn.Module, sketch: DiffusionSketchConfig) -> None:
    """Have the parameters of several names that a sketch tells of be one each."""
    for other, first in sketch.aliases.items():
        setattr(*owner_of(model, other), model.get_parameter(first))


def register(model: nn.Module) -> None:
    """Put the sketch of every diffusers model within a model into its config; take it out of dense ones."""
    for module in models_within(model, "diffusers.models.modeling_utils", "ModelMixin"):
        layers = list(outermost(module))
        kept = dict(module.config)
        if layers:
            sketch = DiffusionSketchConfig(
                layers_to_json(module, layers), parameter_aliases(module), type(module).__name__
            )
            module.hf_quantizer = DiffusionSketchQuantizer(sketch)
            kept[KEY] = sketch
        elif isinstance(kept.get(KEY), DiffusionSketchConfig):
            vars(module).pop("hf_quantizer", None)
            del kept[KEY]
        module._internal_dict = FrozenDict(kept)


auto.AUTO_QUANTIZER_MAPPING[Method.SKETCHED.value] = DiffusionSketchQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[Method.SKETCHED.value] = DiffusionSketchConfig
on_record_change.append(register)
