"""The options of `sketchify`, checked once, where they enter."""

import fnmatch
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias, TypedDict, TypeGuard, cast

import torch
from torch import nn

from panther_compile.errors import ConfigError, ConfigTypeError, check_choice, first_line
from panther_compile.factorization.factorize import METHODS
from panther_compile.factorization.sketches import SKETCH_KINDS

Selector: TypeAlias = str | re.Pattern[str] | type[nn.Module] | Callable[[nn.Module, str], bool]
"""A glob on the module name ("encoder.*"), a compiled regex (fullmatch), a module type, or a function
of (module, fully qualified name)."""

ATTENTIONS = ("exact", "favor")
OBJECTIVES = ("size", "latency", "cache", "int8")
OUTPUTS = {"auto": None, "logits": True, "features": False}  # whether they are logits
Logits = bool | None | frozenset[str]
"""Whether the tensors of a result are logits, or the keys of those that are; None: those called so."""
REFINEMENTS = ("none", "block", "kl")
MAX_SEED = 2**62  # what a generator takes, less what a layer's name adds


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """Options of `sketchify` and `plan_sketch`.

    Args:
        ratio: stored numbers of the replaced layers over their dense count, in (0, 1]; or a mapping from
            selector to ratio, where the first match counts, each entry is a budget of its own, and layers
            that match none stay dense.
        include: one selector or several; only layers that match one are sketched. The default is every
            layer but embeddings, the output head, and layers tied to either.
        exclude: one selector or several; layers that match one are left alone.
        method: "auto", "svd" or "randomized".
        sketch: test matrix of the randomized method: "gaussian", "sign", "srht", "countsketch", "sjlt".
        attention: "exact", or "favor" for random-feature attention in nn.MultiheadAttention.
        features: random features of `attention="favor"`.
        min_params: layers whose weight is smaller stay dense.
        round_rank_to: ranks, and widths of narrow layers, are multiples of this, and layers too small for one
            stay dense; None takes ranks that are fast where these are fine enough for the budget, multiples
            of 8 on a CPU, of 16 and for large layers 64 on CUDA.
        allow_slower: sketch layers also where that is predicted to run slower than 0.9 of the dense speed
            (small ones, some convolutions); by default they stay dense.
        objective: "size"; "latency" to time layers here and keep those dense whose sketch does not pay;
            "cache" to have keys and values of a decoder made of few numbers, which a `LatentCache` keeps;
            "int8" for `prepare_int8` and then="int8": ratio is of the predicted time of the linear layers'
            int8 products, not of numbers, features are left out rather than ranks, and others stay dense.
        inplace: change the model given, in place of a copy.
        seed: seed of every random number drawn.
        progress: show a progress bar; None shows one on a terminal.
        device: where to factorize; each layer is given back where it was.
        output: what the model's result is, to those who compare: "logits", "features", "auto", to see for
            oneself, or a frozenset of the keys of those of its tensors that are logits, "[0]" for the first
            of a tuple; the report says what it was taken for, and why.
        refine: "block" or "kl" heals the layers that were fitted on the same data, see `heal`, and none that
            were sketched before; "none" leaves them at the closed forms.
        refine_steps: of healing.
        synthetic: whether inputs may be made up where 0.25 to 500 million numbers are to be sketched: without
            data to compare outputs on, and to fit layers to if the model says enough of them; beside data
            texts that a causal language model samples, for what it is asked besides, and for encoders texts
            that are spliced of parts of the data.
        narrow: whether data may also leave features out that one layer hands another, see `NarrowLinear`.
        cache_ratio: with `objective="cache"`: the numbers of a token that are kept over those of the dense
            model, in (0, 1]; None lets the weights that write them have the same share of their numbers as
            the others. Whatever they store, all together keep to `ratio`.

    Raises:
        ConfigError: an option is out of range, or two options conflict.
        ConfigTypeError: an option has the wrong type.
    """

    ratio: float | Mapping[Selector, float] = 0.5
    include: Selector | Sequence[Selector] | None = None
    exclude: Selector | Sequence[Selector] | None = None
    method: str = "auto"
    sketch: str = "gaussian"
    attention: str = "exact"
    features: int = 256
    min_params: int = 4096
    round_rank_to: int | None = None
    allow_slower: bool = False
    objective: str = "size"
    inplace: bool = False
    seed: int = 0
    progress: bool | None = None
    device: torch.device | str | None = None
    output: str | frozenset[str] = "auto"
    refine: str = "none"
    refine_steps: int = 200
    narrow: bool = True
    synthetic: bool = True
    cache_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        if isinstance(self.ratio, Mapping):
            if not self.ratio:
                raise ConfigError("ratio={}: wanted at least one selector")
            for selector in self.ratio:
                _check_selector("ratio", selector)
            self._set("ratio", {one: _read_ratio(f"ratio[{one!r}]", own) for one, own in self.ratio.items()})
        else:
            self._set("ratio", _read_ratio("ratio", self.ratio))
        for option in ("include", "exclude"):
            for selector in selectors(getattr(self, option)):
                _check_selector(option, selector)
        check_choice("method", self.method, METHODS)
        if not is_keys(self.output):
            check_choice("output", self.output, tuple(OUTPUTS))
        check_choice("refine", self.refine, REFINEMENTS)
        check_choice("sketch", self.sketch, SKETCH_KINDS)
        check_choice("attention", self.attention, ATTENTIONS)
        if self.sketch != "gaussian" and self.method == "svd":
            raise ConfigError(
                f"sketch={self.sketch!r} conflicts with method={self.method!r}, which draws no test matrix"
            )
        for option, least in (("refine_steps", 1), ("features", 1), ("min_params", 0), ("seed", 0)):
            self._set(option, read_integer(option, getattr(self, option), least))
        if self.round_rank_to is not None:
            self._set("round_rank_to", read_integer("round_rank_to", self.round_rank_to, 1))
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed={self.seed!r}, wanted at most {MAX_SEED}")
        check_type("allow_slower", self.allow_slower, bool)
        check_choice("objective", self.objective, OBJECTIVES)
        if self.allow_slower and self.objective == "latency":
            raise ConfigError("allow_slower=True conflicts with objective='latency', under which nothing is")
        if self.cache_ratio is not None:
            self._set("cache_ratio", _read_ratio("cache_ratio", self.cache_ratio))
            if self.objective != "cache" or isinstance(self.ratio, Mapping):
                raise ConfigError(
                    f"cache_ratio={self.cache_ratio!r} is for objective='cache' and a single ratio, got "
                    f"objective={self.objective!r}, ratio={self.ratio!r}"
                )
        check_type("inplace", self.inplace, bool)
        check_type("narrow", self.narrow, bool)
        check_type("synthetic", self.synthetic, bool)
        if self.progress is not None:
            check_type("progress", self.progress, bool)
        if self.device is not None:
            check_type("device", self.device, torch.device, str)
            check_device(self.device)

    def _set(self, option: str, value: object) -> None:
        """Take an option as it was read: numbers are Python's own."""
        object.__setattr__(self, option, value)

    def ratios(self) -> tuple[tuple[Selector, float], ...]:
        """(selector, ratio) of each budget, in order; one that matches everything if ratio is a number."""
        if isinstance(self.ratio, Mapping):
            return tuple(self.ratio.items())
        return (("*", float(self.ratio)),)

    @property
    def keeps_all(self) -> bool:
        """Whether no layer is to become smaller: every budget is 1."""
        return all(ratio == 1.0 for _, ratio in self.ratios())

    @property
    def logits(self) -> Logits:
        """Tensors of the model's results that are logits."""
        return logits_of(self.output)


def logits_of(output: str | frozenset[str]) -> Logits:
    """Tensors of a result that are logits, by the option `output`."""
    return OUTPUTS[output] if isinstance(output, str) else output


def is_keys(output: object) -> bool:
    """Whether an option `output` lists keys of a result's tensors."""
    return isinstance(output, frozenset) and bool(output) and all(isinstance(one, str) for one in output)


def selectors(given: Selector | Sequence[Selector] | None) -> tuple[Selector, ...]:
    """One selector, several or None, as a tuple."""
    if given is None:
        return ()
    if isinstance(given, list | tuple | set | frozenset):
        return tuple(given)
    return (given,)  # type: ignore[return-value]


OF_CLASS = "_panther_of_class"  # where a layer keeps the class of the module whose weight it stands for


def selects(selector: Selector, module: nn.Module, name: str) -> bool:
    """Whether a selector picks the module of this fully qualified name."""
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, re.Pattern):
        return selector.fullmatch(name) is not None
    if isinstance(selector, type):
        return isinstance(module, selector) or issubclass(vars(module).get(OF_CLASS, type(module)), selector)
    return bool(selector(module, name))


def _read_ratio(option: str, given: object) -> float:
    ratio = read_number(option, given, "a number in (0, 1]")
    if math.isnan(ratio) or not 0.0 < ratio <= 1.0:
        raise ConfigError(f"{option}={given!r}, wanted a number in (0, 1]")
    return ratio


def _check_selector(option: str, selector: object) -> None:
    if isinstance(selector, type) and not issubclass(selector, nn.Module):
        raise ConfigTypeError(f"{option}: {selector.__name__} is not a module type")
    if isinstance(selector, nn.Module):
        raise ConfigTypeError(
            f"{option}: given a {type(selector).__name__} itself, wanted its name or its type"
        )
    if isinstance(selector, re.Pattern) and not isinstance(selector.pattern, str):
        raise ConfigTypeError(f"{option}: {selector!r} is of bytes, wanted a regex of text")
    if not isinstance(selector, str | re.Pattern | type) and not callable(selector):
        raise ConfigTypeError(
            f"{option}: {selector!r} is a {type(selector).__name__}, wanted a glob string, a compiled "
            "regex, a module type, or a function of (module, name)"
        )
    if not isinstance(selector, str | re.Pattern | type) and not _takes_two(selector):
        raise ConfigTypeError(
            f"{option}: {selector!r} takes {inspect.signature(selector)}, wanted a function f(module, name)"
        )


def _takes_two(function: Callable[..., object]) -> bool:
    """Whether a function can be called with two arguments; True where Python cannot tell."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one that is written in C
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def is_integer(given: object) -> TypeGuard[int]:
    """Whether it is an integer, of Python or numpy, and no truth."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def read_integer(option: str, given: object, least: int | None = None) -> int:
    """An integer as Python's own, also where it is numpy's.

    Args:
        option: its name.
        given: for it.
        least: that it may be, if anything.

    Raises:
        ConfigError: it is less.
        ConfigTypeError: it is no integer, or a truth.
    """
    if not is_integer(given):
        raise ConfigTypeError(f"{option}={given!r} is a {type(given).__name__}, wanted an integer")
    if least is not None and given < least:
        raise ConfigError(f"{option}={given!r}, wanted at least {least}")
    return int(given)


def read_number(option: str, given: object, wanted: str = "a number") -> float:
    """A number as Python's own, also where it is numpy's.

    Args:
        option: its name.
        given: for it.
        wanted: in words.

    Raises:
        ConfigTypeError: it is none, or a truth.
    """
    if isinstance(given, bool) or not isinstance(given, Real):
        raise ConfigTypeError(f"{option}={given!r} is a {type(given).__name__}, wanted {wanted}")
    return given if isinstance(given, int) else float(given)


def check_device(device: torch.device | str) -> None:
    """Raise ConfigError unless it can be computed on."""
    try:
        torch.zeros(1, device=device)
    # torch raises AssertionError where it was built without the device's backend.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"device={str(device)!r} cannot be used here: {first_line(error)}") from error
    if torch.device(device).type == "meta":
        raise ConfigError("device='meta' holds no numbers, wanted a device that computes")


def check_type(option: str, given: object, *wanted: type) -> None:
    """Raise ConfigTypeError unless an option is of a type that it has."""
    if not isinstance(given, wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        raise ConfigTypeError(f"{option}={given!r} is a {type(given).__name__}, wanted {names}")


def check_is_module(argument: str, given: object) -> None:
    """Raise ConfigTypeError unless an argument is a module."""
    if not isinstance(given, nn.Module):
        raise ConfigTypeError(f"{argument} is a {type(given).__name__}, wanted an nn.Module")


def read_options(
    option: str, given: object, takes: Callable[..., object], *, but: str = ""
) -> dict[str, Any]:
    """Options that are handed on to a function, by the names of its keyword arguments.

    Args:
        option: that holds them.
        given: for it; None is none.
        takes: the function.
        but: one of its keyword arguments that is given elsewhere.

    Raises:
        ConfigTypeError: it is no mapping, or has another name.
    """
    if given is None:
        return {}
    check_type(option, given, Mapping)
    options = dict(cast(Mapping[str, Any], given))
    parameters = inspect.signature(takes).parameters.values()
    known = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} - {but}
    if unknown := [str(name) for name in options if name not in known]:
        raise ConfigTypeError(
            f"{option}: unknown option {', '.join(unknown)}; those of {getattr(takes, '__name__', takes)} "
            f"here are {', '.join(sorted(known))}"
        )
    return options


def check_has_data(data: object, asked: Mapping[str, bool]) -> None:
    """Raise ConfigError for an option that is asked for and needs data, where there is none."""
    for option, given in asked.items():
        if given and data is None:
            raise ConfigError(f"{option} needs data=, inputs of the model to fit it to")


class SketchOptions(TypedDict, total=False):
    """The keyword options of `sketchify` and `plan_sketch`: see `SketchConfig`."""

    include: Selector | Sequence[Selector] | None
    exclude: Selector | Sequence[Selector] | None
    method: str
    sketch: str
    attention: str
    features: int
    min_params: int
    round_rank_to: int | None
    allow_slower: bool
    objective: str
    inplace: bool
    seed: int
    progress: bool | None
    device: torch.device | str | None
    output: str | frozenset[str]
    refine: str
    refine_steps: int
    narrow: bool
    synthetic: bool
    cache_ratio: float | None
