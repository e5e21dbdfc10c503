"""A Hugging Face folder sketched with data, for models that are larger than memory.

The stages are those of `sketchify`; where their tensors are is what differs.

    dense weights                  mapped from the folder, read block by block as the model runs
    statistics, factors, trials    in temporary files, mapped
    what a batch leaves            in memory: its activations, of the whole model where gradients are taken
"""

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.integrations.folder_files import copy_beside
from panther_compile.integrations.folders import stored_model
from panther_compile.integrations.stored_weights import SHARD_BYTES, StoredWeights
from panther_compile.memory import freed_given_back
from panther_compile.models.batches import Data
from panther_compile.records import SketchPlan
from panther_compile.sketching import learn_and_make, prepare, put_in_place
from panther_compile.tensors_on_disk import TensorsOnDisk


def sketch_with_data(
    source: Path,
    target: Path,
    scratch: Path,
    data: Data | str,
    config: SketchConfig,
    plan: SketchPlan | None,
    resume: str | PathLike[str] | None,
) -> SketchPlan:
    """Fit the layers of a folder's model to data, and write the folder of the sketch.

    Args:
        source: of the dense model.
        target: a new folder.
        scratch: for temporary files.
        data: see `sketchify`.
        config: the options.
        plan: to be carried out, or None.
        resume: see `sketchify`.

    Returns:
        The plan that was carried out.

    Raises:
        ModelSourceError: the folder holds no model of transformers in safetensors.
    """
    with freed_given_back(), TensorsOnDisk(scratch) as disk:
        model = _mapped_model(source, disk)
        prepared = replace(prepare(model, config, recipe=plan), disk=disk)
        learnt, made = learn_and_make(prepared, config, data, resume, None)
        small: Any = put_in_place(model, learnt, made)
        target.mkdir()
        copy_beside(source, target)
        small.save_pretrained(target, max_shard_size=SHARD_BYTES)
    return made.plan


def _mapped_model(folder: Path, disk: TensorsOnDisk) -> nn.Module:
    """The model of a folder; its matrices are mapped from there, where they are stored as they are used."""
    model = stored_model(folder, dense=True, use_safetensors=True)
    # transformers has mapped the files too, but the pages of what it has mapped cannot be given back.
    StoredWeights(folder, model).map_matrices(model, disk)
    return model
