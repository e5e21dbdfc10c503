"""Which cases `kernels.py` times, and in which order: the most telling first."""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from kernel_cases import (
    ATTENTION,
    CHEAP,
    COMPILED,
    CONV2D,
    FIRST_RATIOS,
    IMAGES,
    LENGTHS,
    LINEAR,
    LOW,
    MODELS,
    PROJECTIONS,
    RATIOS,
    ROWS,
    Case,
    attention_case,
    conv2d_case,
    linear_case,
    projections_case,
)
from kernel_models import model_cases


def all_cases(models: Sequence[str] = (), rows: Sequence[int] = (), *, quick: bool = False) -> Iterator[Case]:
    """Every case of some models (none given: all), at some rows; `quick`: one shape of each kind."""
    few = 1 if quick else None
    rows = rows or ((1, 64) if quick else ROWS)
    ratios = FIRST_RATIOS[:1] if quick else RATIOS
    for model in models or (("BERT-base", "ResNet-50") if quick else MODELS):
        for shape, row, ratio, form in itertools.product(
            LINEAR.get(model, ())[:few], rows, ratios, ("pair", "pivoted")
        ):
            yield linear_case(model, *shape, row, ratio, form)
        for row, ratio in itertools.product(rows, ratios) if model in PROJECTIONS else ():
            yield projections_case(model, *PROJECTIONS[model], row, ratio)
        for length, causal in itertools.product(LENGTHS[:few], (False, True)) if model in ATTENTION else ():
            yield attention_case(model, length, causal)
        shapes = CONV2D.get(model, ())
        for conv, images, ratio in itertools.product(shapes[3:4] if quick else shapes, IMAGES[:few], ratios):
            yield conv2d_case(model, conv, images, ratio)
        yield from model_cases(model, quick=quick)


def interleaved(cases: Sequence[Case]) -> list[Case]:
    """Every shape and form in turn, its sizes in a drawn order, so that any beginning is a fair sample."""
    groups = defaultdict(list)
    for case in random.Random(0).sample(list(cases), len(cases)):
        groups[tuple(case.labels[key] for key in ("op", "model", "shape", "form"))].append(case)
    turns = itertools.zip_longest(*groups.values())
    return [case for turn in turns for case in turn if case is not None]


def shows_low_precision(case: Case) -> bool:
    """Whether int8 and fp8 are tried on it early: one row and many, half the numbers, as sketchify has it."""
    telling = case.labels["op"] == "multi_linear" or case.labels["form"] == "pivoted"
    return telling and case.labels["ratio"] == 0.5 and case.vectors in (1, 4096)


def in_order(cases: Sequence[Case], *, compiled: bool) -> Iterator[tuple[Case, str]]:
    """Cases with CHEAP, LOW or COMPILED, what is to be timed now: tier by tier, within it cheap first."""
    for tier in (0, 1):
        batch = interleaved([case for case in cases if case.tier == tier])
        low = [
            case for case in cases if case.quantize and (case.tier or not shows_low_precision(case)) == tier
        ]
        yield from ((case, CHEAP) for case in batch)
        yield from ((case, LOW) for case in interleaved(low) if compiled)
        yield from ((case, COMPILED) for case in batch if compiled and case.compiled)
