"""Data of the command line, read from files: arrays, or text."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from panther_compile.errors import ConfigError, DataError, first_line


def read_batches(path: str | os.PathLike[str], batch_size: int) -> list[dict[str, Any]]:
    """The batches of a .npz file: arrays by the name of an input, cut along their first axis.

    Args:
        path: written by `numpy.savez`.
        batch_size: samples in a batch; the last one may have fewer.

    Raises:
        ConfigError: the batch size is not positive.
        DataError: the file cannot be read, or its arrays differ in their number of samples.
    """
    if batch_size < 1:
        raise ConfigError(f"batch size {batch_size}, wanted at least 1")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    # An .npy file gives an array, which cannot be entered; pickles and broken archives raise the others.
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}, wanted a .npz file of arrays by input name: {error}") from error
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items()) or "no array"
        raise DataError(f"{path}: wanted one number of samples, along the first axis; found {found}")
    samples = next(iter(lengths.values()))
    return [
        {name: array[begin : begin + batch_size] for name, array in arrays.items()}
        for begin in range(0, samples, batch_size)
    ]


def read_tensors(
    path: str | os.PathLike[str], batch_size: int
) -> list[dict[str, Tensor]] | list[tuple[Tensor, ...]]:
    """The same as keyword arguments of a torch model, or of arrays without names as arguments in their order.

    Raises as `read_batches`.
    """

    def tensor(name: str, array: np.ndarray) -> Tensor:
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:  # of texts or dates, or in another order of bytes
            raise DataError(f"{path}: {name} is {array.dtype}, of which torch makes no tensor") from error

    batches = [
        {name: tensor(name, array) for name, array in batch.items()}
        for batch in read_batches(path, batch_size)
    ]
    order = [f"arr_{place}" for place in range(len(batches[0]))]  # as savez calls what it is given no name of
    if set(order) == batches[0].keys():
        return [tuple(batch[name] for name in order) for batch in batches]
    return batches


def read_text(
    path: str | os.PathLike[str], model_folder: str | os.PathLike[str], length: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """A text file as token ids (B, length), by the tokenizer in the folder of a Hugging Face model.

    What is left at the end, shorter than a piece, is not used.

    Raises:
        ConfigError: transformers is missing, the folder has no tokenizer, or a size is not positive.
        DataError: the file cannot be read, or holds fewer tokens than one piece.
    """
    if batch_size < 1 or length < 1:
        raise ConfigError(f"batch size {batch_size}, length {length}: wanted at least 1")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}, wanted UTF-8 text: {first_line(error)}") from error
    try:
        from transformers import AutoTokenizer  # the command line works without it

        tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError) as error:  # KeyError of an incomplete tokenizer.json
        raise ConfigError(
            f"text needs the tokenizer of a Hugging Face model, none in {model_folder}: {first_line(error)}"
        ) from error
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    if len(ids) < length:
        raise DataError(f"{path} holds {len(ids)} tokens, wanted at least {length}")
    pieces = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": batch} for batch in pieces.split(batch_size)]
