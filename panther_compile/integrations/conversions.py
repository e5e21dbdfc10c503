"""Weights that transformers merges or splits between a file and a model, where the model has sketched layers.

A converter of transformers makes one tensor of several, or several of one, as of a file's `Wqkv` the weights
of `q_proj`, `k_proj` and `v_proj`. What it would do to the factors of a sketched layer is wrong, and so it is
left out, in saving and in loading: all of its tensors are in the file under the names that the model has.
"""

from collections.abc import Sequence
from typing import Any

from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from panther_compile.layers.base import outermost

_PREFIX_CHANGE: Any = getattr(core_model_loading, "PrefixChange", ())  # not in the first of transformers 5


def without_sketched(model: Any, conversions: Sequence[Any]) -> list[Any]:
    """The conversions without the converters that touch a tensor of a sketched layer.

    Args:
        model: has the sketched layers.
        conversions: of transformers, as `get_model_conversion_mapping` gives them.
    """
    layers = set(outermost(model))
    tensors = [
        f"{name}.{part}" for name, one in model.named_modules() if one in layers for part in one.state_dict()
    ]

    def touches(converter: WeightConverter) -> bool:
        undone = converter.reverse_transform()
        return any(rename_source_key(tensor, [], [undone])[1] is not None for tensor in tensors)

    return [one for one in conversions if not (isinstance(one, WeightConverter) and touches(one))]


def keep_apart(model: Any) -> None:
    """Have `save_pretrained` leave the tensors of a model's sketched layers as they are."""
    loaded_by = vars(model).get("_weight_conversions")
    found = get_model_conversion_mapping(model, add_legacy=False) if loaded_by is None else loaded_by
    kept = without_sketched(model, found)
    if len(kept) == len(found):
        return
    if loaded_by is None:  # transformers leaves these out of a model that was not loaded
        kept = [one for one in kept if not isinstance(one, _PREFIX_CHANGE)]
    model._weight_conversions = kept
