"""What the benchmark needs to know of a model."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import panther_compile as pc


@dataclass(frozen=True)
class Subject:
    """A trained model, what it is calibrated with, and how it is judged.

    Attributes:
        title: for the report.
        model: dense, in eval mode.
        blocks: names of the modules that feed one another in a chain and hold every replaced layer; empty
            if the model has no such chain.
        calibration: (domain, seed) to a list of batches of model inputs; the domain is "in" or "off".
        in_domain, off_domain: what they are, in words.
        healing: the same for healing, where there may be more data.
        healed_on: what that is, in words.
        heal_steps: to heal for.
        evaluate: quality of a model on held-out data; never seen in calibration.
        metrics: what `evaluate` measures, the most telling one first, and whether higher is better.
        outputs: what the model computes: "classes" are logits with the classes last, "values" the rest.
        options: of `plan_sketch` and `sketchify`.
        remark: on how to read the metrics, a sentence.
    """

    title: str
    model: nn.Module
    blocks: tuple[str, ...]
    calibration: Callable[[str, int], list[Any]]
    in_domain: str
    off_domain: str
    healing: Callable[[str, int], list[Any]]
    healed_on: str
    heal_steps: int
    evaluate: Callable[[nn.Module], dict[str, float]]
    metrics: Mapping[str, bool]
    outputs: str
    options: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""


@torch.inference_mode()
def classify(model: nn.Module, images: Tensor) -> Tensor:
    """Log-probabilities."""
    return torch.cat([model(batch).log_softmax(-1) for batch in images.split(200)])


def kept(folder: Path | None, dense: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """The sketch that a folder holds, or else one that is made, which it holds then; None holds none."""
    if folder is not None and folder.exists():
        return pc.load_sketched(copy.deepcopy(dense), folder).eval()
    model = make()
    if folder is not None:
        pc.save_sketched(model, folder)
    return model


def kept_sketch(subject: Subject, ratio: float, folder: Path, **options: Any) -> nn.Module:
    """The sketch that the folder holds, or else one fitted to the subject's data; see `kept`."""

    def make() -> nn.Module:
        return pc.sketchify(subject.model, ratio, data=subject.calibration("in", 0), **options)

    return kept(folder, subject.model, make)
