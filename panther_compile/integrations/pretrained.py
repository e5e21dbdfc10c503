"""`save_pretrained` and `from_pretrained` of transformers, for models with sketched layers.

transformers asks the quantizer of a model what to write beside the weights, and the quantizer that
`config.json` names what to change in a fresh model before the weights are loaded. Ours writes the
`sketch_spec` of each sketched layer, and puts empty ones of those specs in the place of the dense layers.

    save_pretrained    config.json: quantization_config: {quant_method: panther_compile, layers: [...], ...}
                       model.safetensors: the factors; the record of `sketch_report` in its header
                       README.md: see save_pretrained.py, model_card.py
    from_pretrained    model on the meta device ──► empty layers of the specs ──► weights, as of any model

It is registered when transformers is imported, before or after panther_compile. Where panther_compile is not
imported, or a part with a config of its own is loaded, transformers would leave the layers dense, and draw
them at random. So that it refuses instead, an empty tensor, whose size fits no model, is saved under the name
of each dense weight.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from panther_compile.api import densify
from panther_compile.checkpoint import (
    SavedLayer,
    empty_layers,
    layers_to_json,
    record_from_json,
    record_to_json,
)
from panther_compile.errors import CheckpointError, CheckpointMismatchError
from panther_compile.integrations.conversions import keep_apart, without_sketched
from panther_compile.integrations.saved_config import check_format, models_within, parameter_aliases
from panther_compile.kinds.registry import kind_of
from panther_compile.layers.base import SketchedLayer, check_held, keeps_numbers_elsewhere, outermost
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.layers.own_weights import OneLayer, OwnWeight
from panther_compile.models.substitute import replace_inside
from panther_compile.names import dotted, owner_of
from panther_compile.planning.own_weights import lift_own_weights, lower_own_weights
from panther_compile.records import RECORD_ATTRIBUTE, keep_record, on_record_change
from panther_compile.typed_json import read_record

METHOD, VERSION = "panther_compile", 1
LOADING = "import panther_compile (pip install panther-compile) before from_pretrained"
RECORD_KEY = "panther_compile.record"


@register_quantization_config(METHOD)
class SketchedModelConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The sketch of a model, as its `config.json` holds it.

    Args:
        layers: name, type and `sketch_spec` of each sketched layer.
        aliases: of parameters that several layers share, {other name: first name}.
        model: the class that was saved.
        version: of this format.
        ignored: names of the tensors of `empty_weights`.
        base: the name of the dense model; empty if unknown.
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
        ignored: list[str] | None = None,
        base: str = "",
        **others: Any,
    ) -> None:
        check_format(version, VERSION)
        self.quant_method = METHOD  # type: ignore[assignment]
        self.loading = LOADING
        self.version, self.model, self.base = version, model, base
        self.layers, self.aliases, self.ignored = layers, dict(aliases), ignored or []


@register_quantizer(METHOD)
class SketchedModelQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls a quantizer; the layers of its models are ordinary ones, of any dtype."""

    requires_calibration = True  # from_pretrained makes no sketch of a dense model
    given: Mapping[str, Tensor] | None = None  # the state_dict that save_pretrained is asked to write

    def __init__(self, quantization_config: Any = None, **options: Any) -> None:
        super().__init__(quantization_config, **options)

    def is_serializable(self) -> bool:
        """True: see `get_state_dict_and_metadata`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True: the factors are ordinary parameters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Mapping[str, Tensor] | None, dict[str, str]]:
        """Put the sketch of a model into its config, which is about to be written; give what else is."""
        layers = list(outermost(model))
        if self.given is None and not getattr(model, "_hf_peft_config_loaded", False):
            check_held(model, "call save_pretrained")
        keep_apart(model)
        written = model.state_dict() if self.given is None else self.given
        for name, tensor in written.items():
            if keeps_numbers_elsewhere(tensor) and not isinstance(tensor, DTensor):
                raise CheckpointError(
                    f"{name} is a {type(tensor).__name__}, and config.json can say that a model is sketched "
                    "or that it is quantized, not both: save the model before it is quantized, and do that "
                    "again after from_pretrained; or keep its state_dict with torch.save"
                )
        refused, aliases = empty_weights(model), _aliases(model)
        model.config.quantization_config = self.quantization_config = SketchedModelConfig(
            layers_to_json(model, layers),
            aliases,
            type(model).__name__,
            ignored=list(refused),
            base=base_name(model.config),
        )
        if getattr(model, "_hf_peft_config_loaded", False):
            return self.given, {}  # only adapters are written
        record = record_to_json(vars(model).get(RECORD_ATTRIBUTE))
        metadata = {} if record is None else {RECORD_KEY: json.dumps(record)}
        state = {name: tensor for name, tensor in written.items() if name not in aliases}
        return {**state, **refused}, metadata

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Conversions that leave tensors of sketched layers alone; early transformers 5 give no model."""
        kept = without_sketched(model[0], weight_conversions) if model else weight_conversions
        updated: list[Any] = super().update_weight_conversions(kept, *model)
        return updated

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **others: Any
    ) -> Any:
        """Put the empty sketched layers into a model on the meta device."""
        sketch: Any = self.quantization_config
        lift_own_weights(model)
        names = _Names(model)
        where = f"config.json of {getattr(model.config, 'name_or_path', '') or type(model).__name__}"
        here = {
            entry["name"]: {**entry, "name": name}
            for entry in sketch.layers
            if (name := names.of_module(entry["name"])) is not None
        }
        if not here:
            raise CheckpointMismatchError(
                f"{where} is a sketch of a {sketch.model}; a {type(model).__name__} has none of its "
                f"{len(sketch.layers)} sketched layers, as {sketch.layers[0]['name']!r}"
            )
        saved = [read_record(SavedLayer, entry, where) for entry in here.values()]
        new = empty_layers(model, saved, sketch.model, where)
        _check_factors_are_there(dict(zip(here, new.values(), strict=True)), checkpoint_files, where)
        new |= _tied_to(model, new)
        _lend(model, new.values())
        replace_inside(model, new)
        lower_own_weights(model)
        turn_off_nested_tensors(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        aliases = {names.of_tensor(other): names.of_tensor(first) for other, first in sketch.aliases.items()}
        aliases = _aliases(model) | aliases
        _tie(model, {a: b for a, b in aliases.items() if a in parameters and b in parameters})
        ignored = {re.escape(form(name)) + "$" for name in sketch.ignored for form in (str, names.of_tensor)}
        model._keys_to_ignore_on_load_unexpected = ignored | set(
            model._keys_to_ignore_on_load_unexpected or ()
        )
        complete = len(here) == len(sketch.layers) and not names.shifted
        self._record = _read_record(checkpoint_files) if complete else None
        return model

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Leave a model that can be trained, cast and moved as any other."""
        _take_back(model)
        model.is_quantized = False  # what it is True for: half() and float() are refused
        del model.quantization_method
        for module in _pretrained_models(model):
            module.config._is_quantized = False
        keep_record(model, self.__dict__.pop("_record", None))
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """See `densify`."""
        return densify(model, inplace=True)  # in the dtypes that it has


class _Names:
    """Names of a saved model in the one that is loaded: with a head or without, as transformers allows."""

    def __init__(self, model: Any) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._children = {name for name, _ in model.named_children()}
        self._prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        self.shifted = False

    def of_module(self, name: str) -> str | None:
        """The module of a name; None if there is none, as of a head that the model lacks."""
        found = self.of_tensor(name)
        self.shifted |= found != name and found in self._modules
        return found if found in self._modules else None

    def of_tensor(self, name: str) -> str:
        """What a tensor or a module is called here, if it is here."""
        if name.partition(".")[0] in self._children:
            return name
        has_base = self._prefix.removesuffix(".") in self._children
        return self._prefix + name if has_base else name.removeprefix(self._prefix)


def register(model: nn.Module) -> None:
    """Have `save_pretrained` write the sketch of every transformers model within a model, and of no other."""
    for module in _pretrained_models(model):
        ours = isinstance(getattr(module, "hf_quantizer", None), SketchedModelQuantizer)
        if next(outermost(module), None) is not None:
            if getattr(module, "hf_quantizer", None) is None:
                module.hf_quantizer = SketchedModelQuantizer()
            _tie(module, _aliases(module))
        elif ours:
            del module.hf_quantizer
            _tie_as_dense(module)
        kept = getattr(module.config, "quantization_config", None)
        if isinstance(kept, SketchedModelConfig) and next(outermost(module), None) is None:
            del module.config.quantization_config


def _pretrained_models(model: nn.Module) -> Iterator[Any]:
    return models_within(model, "transformers.modeling_utils", "PreTrainedModel")


def _aliases(model: Any) -> dict[str, str]:
    """The parameters that have several names; the first is that of the model without a head."""
    return parameter_aliases(model, model.base_model_prefix)


def _tied_to(model: Any, new: Mapping[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
    """Sketched layers for heads that are tied to a sketched table, where the saved model had none."""
    tied: dict[nn.Module, nn.Module] = {}
    for other, first in getattr(model, "all_tied_weights_keys", {}).items():
        table, layer = _owner_of_weight(model, first), _owner_of_weight(model, other)
        sketched = None if table is None or layer in new else new.get(table)
        if table is not None and layer is not None and isinstance(sketched, SketchedLayer):
            kind = kind_of(table)
            if kind.can_share(table, layer):
                tied[layer] = kind.share(sketched, layer)
    return tied


def _owner_of_weight(model: nn.Module, name: str) -> nn.Module | None:
    """The layer whose `weight` has a name, or the one that stands for it; None for other parameters."""
    owner, leaf = owner_of(model, name)
    if leaf != "weight":
        return None
    return owner.weight.layer if isinstance(owner.weight, OneLayer) else owner


_OWN_TIES = "_panther_dense_ties"  # what a model had of its own to say of ties, before it was sketched


def _tie(model: Any, aliases: Mapping[str, str]) -> None:
    """Tell transformers which parameters are tied: its own list has names of weights that are gone."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    listed = getattr(model, "all_tied_weights_keys", {})
    vars(model).setdefault(_OWN_TIES, (dict(listed), vars(model).get("_tied_weights_keys")))
    kept = {a: b for a, b in listed.items() if a in parameters and b in parameters}
    more = {a: b for a, b in aliases.items() if kept.get(b) != a}
    model.all_tied_weights_keys = {**kept, **more}
    # A property has patterns, which know the names of factors too.
    is_property = isinstance(getattr(type(model), "_tied_weights_keys", None), property)
    if len(kept) < len(listed) and not is_property:
        model._tied_weights_keys = dict(model.all_tied_weights_keys)


def _tie_as_dense(model: Any) -> None:
    """Tell transformers what it knew before a model was sketched, which is dense again."""
    if _OWN_TIES in vars(model):
        model.all_tied_weights_keys, own = vars(model).pop(_OWN_TIES)
        vars(model).pop("_tied_weights_keys", None)
        if own is not None:  # not that of its class
            model._tied_weights_keys = own


def base_name(config: Any) -> str:
    """The name of the dense model on the hub, or of its folder alone; empty if unknown."""
    known = getattr(config, "quantization_config", None)
    if isinstance(known, SketchedModelConfig):
        return known.base
    name = str(getattr(config, "name_or_path", "") or "")
    return Path(name).name if Path(name).is_dir() else name


def empty_weights(model: nn.Module) -> dict[str, Tensor]:
    """An empty tensor under the name of each dense weight: whoever loads dense layers is refused."""
    layers, found = set(outermost(model)), dict[str, Tensor]()
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, OwnWeight) and not layers.isdisjoint(module.modules()):
            inside, found[name] = (*inside, f"{name}."), torch.empty(0)
        elif isinstance(module, SketchedLayer) and module in layers and not name.startswith(inside):
            found[dotted(name, module.dense_weight)] = torch.empty(module.empty_shape)
    return found


def _lend(model: Any, layers: Iterable[nn.Module]) -> None:
    """While transformers loads, give its classes what they take for granted of dense layers.

    Some write into the biases of all layers below them, or reset layers by their method; and some have a
    `tie_weights` of their own that ties nothing. What is lent is thrown away; `_take_back` ends it.
    """
    layers = set(layers)
    factors = (part for layer in layers for part in layer.modules())
    parts = {part for part in factors if part._parameters.get("bias", part) is None}
    for one in _pretrained_models(model):
        one._init_weights = partial(_init_weights, one._init_weights, parts, layers)
        one.tie_weights = partial(_tie_weights, one)


def _init_weights(
    write: Callable[[nn.Module], None], parts: set[nn.Module], layers: set[nn.Module], module: nn.Module
) -> None:
    """Write the initial values of a module, while those of the parts that are below it have biases.

    Sketched layers that it resets stay as they are: they hold what was loaded.
    """
    below = [part for part in module.modules() if part in parts]
    reset = [part for part in module.modules() if part in layers and not hasattr(part, "reset_parameters")]
    for part in below:
        part.bias = nn.Parameter(torch.empty(len(part.weight)))  # type: ignore[arg-type]
    for part in reset:
        part.reset_parameters = lambda: None  # type: ignore[assignment]
    try:
        write(module)
    finally:
        for part in below:
            part.bias = None  # type: ignore[assignment]
        for part in reset:
            del part.reset_parameters


def _tie_weights(model: Any, *args: Any, **options: Any) -> None:
    """Tie the factors that layers share, then do what the class of the model does.

    Which function that is, is looked up now: transformers turns it off while it builds a model.
    """
    usual = sys.modules["transformers.modeling_utils"].PreTrainedModel.tie_weights
    usual(model, *args, **options)
    if type(model).tie_weights is not usual:
        type(model).tie_weights(model, *args, **options)


def _take_back(model: nn.Module) -> None:
    """End what `_lend` began."""
    for one in _pretrained_models(model):
        for name in ("_init_weights", "tie_weights"):
            vars(one).pop(name, None)


def _check_factors_are_there(
    layers: Mapping[str, nn.Module], files: Sequence[str] | None, where: str
) -> None:
    """Raise CheckpointMismatchError where the files hold no factor of layers, given by their saved names."""
    held: set[str] = set()
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            return
        with safe_open(file, framework="pt") as stream:
            held.update(stream.keys())
    ends = tuple(  # transformers has names of its own for what holds a layer
        f".{key}"
        for layer in layers.values()
        for key, tensor in layer.state_dict().items()
        if tensor.dim() > 1 and key != "weight"
    )
    if held and ends and not any(f".{name}".endswith(ends) for name in held):
        raise CheckpointMismatchError(
            f"{where} says that {next(iter(layers))} is sketched, among {len(layers)}, and the files hold no "
            "factors: a dense model of that config was saved; take quantization_config out of config.json"
        )


def _read_record(files: list[str] | None) -> Any:
    for file in files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as stream:
                text = (stream.metadata() or {}).get(RECORD_KEY)
            return None if text is None else record_from_json(json.loads(text), str(file))
    return None


on_record_change.append(register)
