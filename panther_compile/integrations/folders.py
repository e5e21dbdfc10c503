"""The model of a Hugging Face folder: with its weights, or without any on the meta device."""

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from panther_compile.errors import ModelSourceError, check_whole, no_model


def empty_model(folder: Path, *, dense: bool) -> nn.Module:
    """The model of a folder's config, on the meta device.

    Args:
        folder: with a config.json.
        dense: whether to refuse one that is quantized, or sketched, or has an adapter beside it.

    Raises:
        ModelSourceError: the folder has no config that transformers can make a model of, or one refused.
    """
    config, made = _architecture(folder, dense=dense)
    try:
        with torch.device("meta"):
            model = made.from_config(config) if made is transformers.AutoModel else made(config)
    except (OSError, ValueError, KeyError) as error:
        raise no_model(folder, error) from error
    return cast(nn.Module, model.eval())


def stored_model(folder: Path, *, dense: bool, **options: Any) -> nn.Module:
    """The model of a folder, with its weights; one that lacks some is refused.

    Args:
        folder: as `from_pretrained` reads it.
        dense: see `empty_model`.
        **options: of `from_pretrained`.

    Raises:
        ModelSourceError: see `empty_model`; or weights are missing, or cannot be read.
    """
    config, made = _architecture(folder, dense=dense)
    try:
        model, info = made.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
    # RuntimeError: weights of other sizes than the config says.
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        raise no_model(folder, error) from error
    if _is_dense(config):  # a quantizer of transformers sees to its own
        check_whole(folder, info["missing_keys"])
    return cast(nn.Module, model.eval())


def _architecture(folder: Path, *, dense: bool) -> tuple[Any, Any]:
    """The config of a folder, and the class that it names of transformers, AutoModel if it names none."""
    if not (folder / "config.json").is_file():  # transformers would look for it on its hub
        raise ModelSourceError(f"{folder} is no Hugging Face model: it has no config.json")
    if dense and (folder / "adapter_config.json").is_file():
        raise ModelSourceError(
            f"{folder} holds an adapter beside the model, which from_pretrained puts on it: call "
            "merge_and_unload, and sketch a folder of what comes of it"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise no_model(folder, error) from error
    if dense and not _is_dense(config):
        raise ModelSourceError(f"{folder} is quantized, or sketched already: wanted dense weights")
    if not config.architectures:
        return config, transformers.AutoModel
    name = config.architectures[0]
    if not hasattr(transformers, name):
        raise ModelSourceError(
            f"{folder} holds a {name}, as its config.json says, and transformers {transformers.__version__} "
            "has no such class: load it by its own code, and sketch the model in memory"
        )
    return config, getattr(transformers, name)


def _is_dense(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is None
