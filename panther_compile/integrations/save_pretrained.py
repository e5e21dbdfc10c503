"""What `save_pretrained` of transformers does besides for a model with sketched layers.

transformers tells a quantizer neither the folder, nor when it is written, nor the `state_dict` that it is
given, and does not ask one that it was not told of, as where a part was sketched by itself and put into a
model. So its `save_pretrained` is wrapped.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from panther_compile.integrations.model_card import write_model_card
from panther_compile.integrations.pretrained import SketchedModelQuantizer, register
from panther_compile.kinds.plain_form import check_origins

_theirs = PreTrainedModel.save_pretrained


@functools.wraps(_theirs)
def _save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    check_origins(self)
    register(self)
    quantizer = getattr(self, "hf_quantizer", None)
    if not isinstance(quantizer, SketchedModelQuantizer):
        return _theirs(self, save_directory, is_main_process, state_dict, *args, **options)
    quantizer.given = state_dict
    try:
        result = _theirs(self, save_directory, is_main_process, state_dict, *args, **options)
    finally:
        quantizer.given = None
    if is_main_process and not getattr(self, "_hf_peft_config_loaded", False):
        write_model_card(self, Path(save_directory))
    return result


PreTrainedModel.save_pretrained = _save_pretrained
