"""The contract: what a kind of dense layer answers, so that the rest of the library need not ask which it is.

    matches, why_not            is a module of this kind, and can it be sketched?
    parts, assemble             the dense layers of one weight each that it is made of, and the way back
    may_share, sketch_together  parts that may store one factor in common
    unit, sketch, empty, share  of a layer of one weight: schemes and ranks, a sketch, its shape alone, ties
    view                        what data sees of it: rows of input times a matrix
    functionals                 functional calls of a graph that compute it
    onnx                        nodes of an ONNX file that compute it

A kind of one weight derives from `Kind` and leaves `parts` and `assemble` as they are; its layers are called
with one tensor. A kind that is made of several weights, as attention is, derives from `CompositeKind` and
gives its parts, which are layers of other kinds. `registry.py` lists the kinds; what a kind does not answer
is said in reports.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.kinds.plain_form import plain_form
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice, Fitted, Unit


@dataclass(frozen=True, slots=True)
class Functional:
    """Functional calls that compute what a layer of a kind computes.

    Attributes:
        targets: the functions, `F.linear` and `torch.ops.aten.linear.default` for one.
        arguments: names of their arguments in order: "input", "weight", "bias", then options.
        build: makes of the weight, whether there is a bias, and the options given a layer on the meta device,
            whose parameters are then replaced; None if no layer computes the call.
        bias_may_be_computed: whether a bias that is no parameter can be added behind the layer.
    """

    targets: tuple[Callable[..., Any], ...]
    arguments: tuple[str, ...]
    build: Callable[[Tensor, bool, Mapping[str, Any]], nn.Module | None]
    bias_may_be_computed: bool = False


@dataclass(frozen=True, slots=True)
class OnnxForm:
    """Nodes of an ONNX file that compute what a layer of a kind computes, without its bias.

    Attributes:
        operators: op types.
        dims: number of the weight's dimensions.
        wanted: what such a weight is called in messages ("a matrix").
        build: from the weight as the kind keeps it and the attributes of the node, the layer without a bias,
            or the reason why there is none.
        flat: whether the weight is a matrix that a node may read transposed.
        is_table: whether a node looks rows of the weight up, its first input, along its first axis.
        pads_input: whether the node's padding is of its input.
        fit: where the kind's view is no matrix: from the layer that `build` made, whether the node has a
            bias, the name, choice and options, and what reached the node, padded: the replacement, what to
            add to the bias (O,) or None, and the relative error of the output.
    """

    operators: tuple[str, ...]
    dims: int
    wanted: str
    build: Callable[[Tensor, Mapping[str, Any]], nn.Module | str]
    flat: bool = False
    is_table: bool = False
    pads_input: bool = True
    fit: (
        Callable[
            [nn.Module, bool, str, Choice, SketchConfig, Sequence[Arrival]],
            tuple[SketchedLayer, Tensor | None, float],
        ]
        | None
    ) = None


class Kind(ABC):
    """One kind of dense layer. Kinds hold no state.

    Attributes:
        wanted: what it is called where a message lists what can be sketched.
        layers: the sketched layers that it makes; saved models name them.
        unless_included: why layers of this kind are left alone unless `include` selects them, or None.
        may_be_head: whether the last layer of this kind may be a model's output head.
        why_no_ties: why layers of this kind that share a weight stay dense, or None.
    """

    wanted: ClassVar[str]
    layers: ClassVar[tuple[type[SketchedLayer], ...]]
    unless_included: ClassVar[str | None] = None
    may_be_head: ClassVar[bool] = False
    why_no_ties: ClassVar[str | None] = None
    functionals: ClassVar[tuple[Functional, ...]] = ()
    onnx: ClassVar[OnnxForm | None] = None

    @abstractmethod
    def matches(self, module: nn.Module) -> str | None:
        """What reports call the module ("Linear"), or None if it is not of this kind."""

    @abstractmethod
    def why_not(self, module: nn.Module) -> str | None:
        """Why a module of this kind must be left alone, or None if it can be sketched."""

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """The dense layers of one weight each that the module is made of, by a suffix of its name."""
        return {"": plain_form(module)}

    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """The module with other layers in the place of its parts, dense ones among them.

        Args:
            module: the dense one; gives everything but the parts, and is left as it is.
            parts: layers by the suffixes of `parts`; not copied.
            config: the options; None for the arithmetic of the dense module.
        """
        return parts[""]

    @abstractmethod
    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """The weight of a layer and the ways to store it; `energies` asks for their spectra."""

    @abstractmethod
    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """The replacement of a layer from its weight alone, and what came of it."""

    @abstractmethod
    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """The replacement of a layer by its shape alone: initial numbers, or none on the meta device."""

    def view(self, module: nn.Module) -> LinearView | str:
        """What data sees of a layer, or why data leaves it alone."""
        return "layers of its kind are no matrix on rows of input"

    def may_share(self, module: nn.Module) -> Sequence[tuple[str, ...]]:
        """Sets of parts that may store one factor in common, linear layers of one shape; none by default."""
        return ()

    def sketch_together(
        self, parts: Mapping[str, nn.Module], choice: Choice, config: SketchConfig
    ) -> dict[str, tuple[SketchedLayer, Fitted]]:
        """The replacements of such parts, by name, which store one factor in common."""
        raise NotImplementedError(f"{type(self).__name__} shares no factors")

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """Whether `other`, which has the same weight as `module`, can use the factors of its replacement."""
        return False

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """The replacement of `other`, with the factors of `layer`."""
        raise NotImplementedError(f"{type(self).__name__} shares no factors")


class CompositeKind(Kind):
    """A kind of module with several weights, each treated as a layer of another kind."""

    @abstractmethod
    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """See `Kind.parts`."""

    @abstractmethod
    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """See `Kind.assemble`."""

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """Refuse: its parts have units."""
        raise AssertionError("a composite kind is planned by its parts")

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """Refuse: its parts are sketched."""
        raise AssertionError("a composite kind is sketched by its parts")

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """Refuse: its parts are made empty."""
        raise AssertionError("a composite kind is made of its parts")
