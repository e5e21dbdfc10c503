"""nn.Linear becomes SketchedLinear.

Before:
    %fc : call_module[target=fc](args = (%x,))      fc: Linear(in_features=I, out_features=O)
After:
    %fc : call_module[target=fc](args = (%x,))      fc: SketchedLinear(down: Linear, up: Linear)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.factorization.shared_basis import shared_factors
from panther_compile.kinds.base import Functional, Kind, OnnxForm
from panther_compile.kinds.match import computes_linear, why_not_plain
from panther_compile.kinds.plain_form import plain_form
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.weights import fit_matrix, fitted_record, matrix_unit
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.layers.linear import SketchedLinear, share_factor
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.records import Choice, Fitted, Unit

_TENSORS = frozenset({"weight", "bias"})


class MatrixView(LinearView):
    """A linear layer, whichever way round it keeps its weight.

    Args:
        layer: the dense layer.
        layer_type: that takes its place.
        transposed: whether its weight is (I, O).
    """

    def __init__(self, layer: nn.Module, layer_type: type[SketchedLinear], *, transposed: bool) -> None:
        super().__init__(layer)
        self._layer_type, self._transposed = layer_type, transposed

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """See `LinearView`."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return (weight.t() if self._transposed else weight), self.layer.bias  # type: ignore[return-value]

    def build(self, found: FittedPair) -> SketchedLinear:
        """See `LinearView`."""
        assert found.right is not None
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        layer = self._layer_type.from_stored(
            found.left, found.right, found.bias, start=found.start, dtype=weight.dtype, device=weight.device
        )
        take_over(layer, self.layer, weight.requires_grad)
        return layer


class LinearKind(Kind):
    """See the module's docstring."""

    wanted = "nn.Linear"
    layers = (SketchedLinear, NarrowLinear)
    may_be_head = True
    functionals: ClassVar[tuple[Functional, ...]]
    onnx: ClassVar[OnnxForm | None]
    _layer_type: ClassVar[type[SketchedLinear]] = SketchedLinear
    _transposed: ClassVar[bool] = False

    def matches(self, module: nn.Module) -> str | None:
        """Called "Linear"."""
        return "Linear" if isinstance(module, nn.Linear) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`; a forward of its own that computes the same is no reason."""
        assert isinstance(module, nn.Linear)
        plain = plain_form(module)
        assert isinstance(plain, nn.Linear)
        methods = () if computes_linear(plain) else ("forward",)
        return why_not_plain(plain, nn.Linear, tensors=_TENSORS, methods=methods, sizes=(1, 1))

    def view(self, module: nn.Module) -> MatrixView:
        """See `Kind.view`."""
        return MatrixView(module, self._layer_type, transposed=self._transposed)

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """See `Kind.unit`."""
        return matrix_unit(name, *self.view(module).weight_and_bias(), energies=energies)

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`; the factors are on the weight's own device and in its own dtype."""
        weight, bias = self.view(module).weight_and_bias()
        low_rank = fit_matrix(weight, name, choice.ranks[0], config)
        layer = self._layer_type.from_factors(
            low_rank.left,
            low_rank.right,
            bias,
            form=choice.scheme,
            dtype=weight.dtype,
            device=weight.device,
            residual=low_rank.residual(weight),
        )
        take_over(layer, module, weight.requires_grad)
        return layer, fitted_record(layer, weight, name, low_rank.method, config)

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        weight, bias = self.view(module).weight_and_bias()
        out_features, in_features = weight.shape
        return self._layer_type(
            in_features,
            out_features,
            choice.ranks[0],
            bias=bias is not None,
            form=choice.scheme,
            device=device,
            dtype=weight.dtype,
        )

    def sketch_together(
        self, parts: Mapping[str, nn.Module], choice: Choice, config: SketchConfig
    ) -> dict[str, tuple[SketchedLayer, Fitted]]:
        """See `Kind.sketch_together`."""
        views = {name: self.view(part) for name, part in parts.items()}
        weights = [view.weight_and_bias()[0].detach() for view in views.values()]
        there = [weight.to(config.device or weight.device) for weight in weights]
        found: dict[str, tuple[SketchedLayer, Fitted]] = {}
        layers: list[SketchedLinear] = []
        factors = shared_factors(there, choice.rank, choice.scheme)
        for (name, view), weight, pair in zip(views.items(), weights, factors, strict=True):
            layer = view.build(replace(pair, bias=view.weight_and_bias()[1]))
            layers.append(layer)
            found[name] = layer, fitted_record(layer, weight, name, "svd", config)
        share_factor(layers)
        return found

    def can_share(self, module: nn.Module, other: nn.Module) -> bool:
        """See `Kind.can_share`."""
        return self.matches(module) == self.matches(other)

    def share(self, layer: SketchedLayer, other: nn.Module) -> SketchedLayer:
        """See `Kind.share`: the same factors, the module's own bias."""
        assert isinstance(layer, SketchedLinear)
        bias: Tensor | None = other.bias  # type: ignore[assignment]
        spec = layer.sketch_spec() | {"bias": bias is not None}
        twin = type(layer)(**spec, device="meta")
        twin.put_marks_beside(layer.up.weight)
        twin.down = layer.down
        twin.up.weight = layer.up.weight
        if bias is not None:
            twin.up.bias = nn.Parameter(bias.detach().clone())
        take_over(twin, other, layer.up.weight.requires_grad)
        return twin


def _from_call(weight: Tensor, has_bias: bool, options: Mapping[str, Any]) -> nn.Module | None:
    if weight.dim() != 2:
        return None
    return nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")


def _from_node(weight: Tensor, attributes: Mapping[str, Any]) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


LinearKind.functionals = (
    Functional(
        (F.linear, torch.ops.aten.linear.default),
        ("input", "weight", "bias"),
        _from_call,
        bias_may_be_computed=True,
    ),
)
LinearKind.onnx = OnnxForm(("MatMul", "Gemm"), 2, "a matrix", _from_node, flat=True)
