"""What lies beside the weights of a model in its folder: tokenizers, templates, other modules."""

import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from panther_compile.checkpoint import PLAN_FILE
from panther_compile.integrations.model_card import CARD

_OWN = ("config.json", CARD, PLAN_FILE)  # of one folder alone
MODULES = "modules.json"  # of sentence-transformers: in which folders the other parts of a model are
_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".ot", ".pt", ".pth", ".ckpt", ".onnx", ".gguf")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy what lies beside the weights of a model, but for its card and the plan of a sketch.

    Other forms of the same weights are left out, and so are folders that hold weights, hidden ones too, but
    for those that `modules.json` names: a linear layer behind a sentence encoder is part of the model.
    """
    parts = _parts(source)
    for one in source.iterdir():
        if one.is_file() and not _is_weights(one) and one.name not in _OWN:
            shutil.copy2(one, folder / one.name)
        elif one.is_dir() and (one.name in parts or _is_plain(one)):
            shutil.copytree(one, folder / one.name)


def _parts(source: Path) -> set[str]:
    """The folders that hold other parts of a model than the one whose weights are beside them."""
    try:
        listed: Any = json.loads((source / MODULES).read_text())
    except (OSError, ValueError):
        return set()
    entries = listed if isinstance(listed, list) else []
    paths = [one.get("path") for one in entries if isinstance(one, dict)]
    return {PurePosixPath(one).parts[0] for one in paths if isinstance(one, str) and PurePosixPath(one).parts}


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json")


def _is_plain(folder: Path) -> bool:
    return not folder.name.startswith(".") and not any(map(_is_weights, folder.rglob("*")))
