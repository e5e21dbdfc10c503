"""What layers are fitted to, and what a sketch is compared with its model on: data, or inputs made up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.closeness import compare_outputs
from panther_compile.calibration.unlike import MADE_UP_UNLIKE, UNLIKE, off_batch_norms
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigTypeError, DataError, first_line
from panther_compile.models.batches import Call, interleaved
from panther_compile.models.divided import divided
from panther_compile.models.output_kind import check_output, recognize_output
from panther_compile.models.surroundings import without_fast_attention
from panther_compile.models.synthetic import MODEL, make_inputs, texts_beside
from panther_compile.models.watched import copy_sharing
from panther_compile.planning.sites import Found, without_head
from panther_compile.planning.trace import missed_by_run
from panther_compile.records import Closeness
from panther_compile.reporting.tables import counted

SMALLEST, LARGEST = 250_000, 500_000_000  # numbers to be sketched, between which layers are fitted unasked
_FIT, _JUDGE = 10, 2  # batches
_NAMED = 3  # layers, in a warning
LEAST = 5  # parts of the data, if samples of fewer batches can be divided, so that some can be held out


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a model.

    Attributes:
        fit: what layers are fitted to; None for their weights alone.
        judge: the calls on which the sketch is compared with the dense model; empty for those of `fit`.
        what: they are, in words; where there are none, why.
        optional: whether nobody asked for the fit, which is then taken only if it does better than none.
        doubt: what whoever takes them must be warned of; empty if there is nothing.
    """

    fit: Any
    judge: tuple[Call, ...]
    what: str
    optional: bool = False
    doubt: str = ""

    @property
    def source(self) -> str:
        """What the layers are fitted to, for `keep_verdict`."""
        if self.fit is None:
            return "weights"
        return "made-up inputs" if self.judge else "data"

    def judged_on(self, few: Sequence[Call]) -> "Inputs":
        """The same, with the sketch compared on data that is too few to fit to."""
        return replace(self, judge=tuple(few), what="the data given, too few to fit to", optional=False)

    def closeness(
        self,
        model: nn.Module,
        new: Mapping[nn.Module, nn.Module],
        fitted: Sequence[Call],
        config: SketchConfig,
    ) -> Closeness:
        """How close the outputs of a sketch are, see `compare_outputs`.

        Args:
            model: the dense model.
            new: the sketched layers, by the dense ones.
            fitted: the calls of `fit`.
            config: the options.
        """
        calls = self.judge or fitted
        if not calls:
            return Closeness.unknown(self.what)
        what = f"{self.what}, {counted(len(calls), 'batch')}"
        return compare_outputs(model, new, calls, logits=config.logits, inputs=what)


def read_inputs(model: nn.Module, found: Found, data: Any, config: SketchConfig, absent: str) -> Inputs:
    """The data, or where there is none, or `data="model"`, inputs that are made up.

    Args:
        model: the dense model; is not changed.
        found: its sites.
        data: see `sketchify`.
        config: the options.
        absent: why there is no data, in words.

    Raises:
        DataError: inputs were asked for by `data="model"`, and cannot be made up.
        ConfigTypeError: likewise, and the model cannot be copied.
    """
    asked = isinstance(data, str) and data == MODEL
    if data is not None and not asked:
        return Inputs(data, (), "the data it was fitted to")
    if not asked and not config.synthetic:
        return Inputs(None, (), f"{absent}, and synthetic=False")
    fits, dense = asked or is_worth_it(found), config.keeps_all
    batches = _FIT + _JUDGE if fits else _JUDGE
    try:
        made = make_inputs(model, batches, seed=config.seed, sample=fits, progress=config.progress)
    except (DataError, ConfigTypeError) as error:
        if asked:
            raise
        why = f"{absent}, and {error}"
        doubt = f"layers are fitted to their weights alone, and nothing says how close the sketch is: {why}"
        return Inputs(None, (), why, doubt="" if dense else f"{doubt}; give data")
    what, telling, doubt = made.what, made.telling and fits and not dense, ""
    off = off_batch_norms(copy_sharing(model, {}), made.calls) if telling and not asked else 0.0
    if off > MADE_UP_UNLIKE:
        what, telling = f"{what}, which are off them by {off:.2g}, too far to fit layers to", False
    elif off > UNLIKE:
        what = f"{what}, which are off them by {off:.2g}: outputs may be further off on real ones"
        doubt = f"layers are fitted to {what}; give data"
    missed = _missed(model, found, made.calls[:_JUDGE])
    if missed:
        what = f"{what} that never reach {len(missed)} of {len(found.sites)} layers"
        if not (asked or telling or dense or doubt):  # a fit warns of them itself
            some = f"{', '.join(missed[:_NAMED])}{', ...' * (len(missed) > _NAMED)}"
            doubt = f"{absent}, and nothing says how close the sketch is in {some}: it is compared on {what}"
            doubt = f"{doubt}; give data"
    fit = made.calls[_JUDGE:] if asked or telling else None
    optional = fit is not None and not asked
    return Inputs(fit, made.calls[:_JUDGE], what, optional=optional, doubt=doubt)


@without_fast_attention()
def _missed(model: nn.Module, found: Found, calls: Sequence[Call]) -> list[str]:
    """Names of the layers to be sketched that none of the calls comes to, as images in a call of texts."""

    def run(copied: nn.Module) -> None:
        for call in calls:
            call.run(copied)

    names = [site.name for site, _ in found.sites]
    return missed_by_run(copy_sharing(model, {}), names, run)


def with_texts_beside(
    model: nn.Module, found: Found, calls: Sequence[Call], config: SketchConfig
) -> tuple[list[Call], str]:
    """Data, and in between texts that are made up, of a model that reads texts; in words, what they are.

    Data shows what a model is asked for, such texts what else it can do: fitted to the one alone, layers
    forget the other. See `models.synthetic.texts_beside`. Where they cannot be made up, the words say why.

    Args:
        model: the dense model; is not changed.
        found: its sites.
        calls: the data.
        config: the options.
    """
    tokens = sum(_tokens(call) for call in calls)
    if config.keeps_all or not tokens or not config.synthetic or not is_worth_it(found):
        return list(calls), ""
    try:
        texts = texts_beside(model, calls, tokens, seed=config.seed, progress=config.progress)
    except (DataError, ConfigTypeError) as error:
        reads = any(one.dim() > 1 for call in calls for one in _integers(call))  # no labels
        return list(calls), f", no texts beside: {first_line(error)}" if reads else ""
    if texts is None:
        return list(calls), ""
    parts = divided(copy_sharing(model, {}), calls, LEAST)
    return list(interleaved(parts, texts.calls)), f", beside {texts.what}"


def _tokens(call: Call) -> int:
    """The largest number of integers in one of its tensors."""
    return max((one.numel() for one in _integers(call)), default=0)


def _integers(call: Call) -> list[Tensor]:
    return [one for one in call.tensors if one.dim() and one.dtype in (torch.int32, torch.int64)]


def is_worth_it(found: Found) -> bool:
    """Whether enough numbers are to be sketched, and not too many, to fit them to what is made up unasked."""
    return SMALLEST <= found.numbers <= LARGEST


def read_output(
    model: nn.Module, found: Found, calls: Sequence[Call], config: SketchConfig
) -> tuple[str, SketchConfig, Found]:
    """What the result is taken for, in words; the options, and the sites without the head, in that light.

    Args:
        model: the dense model; is not changed.
        found: its sites.
        calls: of it; if there are none, nothing is said.
        config: the options; where `output` is "auto", logits are recognised.

    Raises:
        ConfigError: `output` has a key of no tensor of the results.
        ConfigTypeError: the model cannot be copied.
    """
    if not calls or config.output == "features":
        return "", config, found
    check_output(model, calls, config.output)
    kind = recognize_output(model, calls)
    asked = config.output != "auto"
    if asked or kind.has_logits:
        found = without_head(model, found, kind.head, config)
    if asked:
        keys = "" if isinstance(config.output, str) else f"{', '.join(sorted(config.output))} of "
        return f"{keys}results taken for logits, as asked", config, found
    taken = "logits" if kind.has_logits else "features"
    return f"results taken for {taken}: {kind.why}", replace(config, output=kind.output), found
