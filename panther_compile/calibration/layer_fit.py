"""One layer of a target from what reached it: the callback of the lockstep."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.fit_conv2d import fit_conv2d_to
from panther_compile.calibration.fit_matrix import FittedMatrix, fit_matrix_to
from panther_compile.calibration.lockstep import Arrival
from panther_compile.calibration.moments import Moments, MomentSums
from panther_compile.calibration.study import Study
from panther_compile.calibration.targets import Target
from panther_compile.config import SketchConfig
from panther_compile.factorize import probe_error
from panther_compile.layers.base import SketchedLayer, copy_into, take_over
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.passes.base import generator_for
from panther_compile.records import Choice, Fitted

METHOD = "calibrated"


class LayerFit:
    """Fits the layers of a plan; layers that are given the same tensors share their moments.

    Args:
        targets: by name.
        choices: how each is to be stored; those without one stay dense.
        study: of the dense model.
        masks: of each batch, see `batches.kept_positions`.
        config: the options.

    Attributes:
        ready: what was fitted, by name.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        choices: Mapping[str, Choice],
        study: Study,
        masks: Sequence[Tensor | None],
        config: SketchConfig,
    ) -> None:
        self.targets, self.choices, self._study = targets, choices, study
        self._masks, self._config = masks, config
        self._last: tuple[Sequence[Arrival], bool, Moments] | None = None
        self.ready: dict[str, tuple[SketchedLayer, Fitted]] = {}

    def __call__(self, name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        """See `lockstep.Fit`."""
        target, choice = self.targets[name], self.choices[name]
        gradient = self._study.weights.get(name)
        weight = None if gradient is None else gradient.double()
        if target.is_matrix:
            layer, error = self._matrix(target, choice, arrivals, weight)
        else:
            assert isinstance(target.layer, nn.Conv2d)
            layer, error = fit_conv2d_to(target.layer, name, choice, self._config, arrivals, weight)
        self.ready[name] = layer, self._fitted(target, layer, error)
        return layer

    def _matrix(
        self, target: Target, choice: Choice, arrivals: Sequence[Arrival], gradient: Tensor | None
    ) -> tuple[SketchedLayer, float]:
        weight, bias = target.weight_and_bias()
        found = fit_matrix_to(
            weight,
            bias,
            self._moments(target, arrivals),
            gradient,
            choice.rank,
            pivoted=choice.scheme == "pivoted",
            dtype=weight.dtype,
        )
        return matrix_layer(target.layer, found), found.output_error

    def _moments(self, target: Target, arrivals: Sequence[Arrival]) -> Moments:
        _, bias = target.weight_and_bias()
        centred = bias is not None
        if self._last is not None and _same(self._last[0], arrivals) and self._last[1] == centred:
            return self._last[2]
        self._last = None
        sums: MomentSums | None = None
        for arrival in arrivals:
            kept = self._masks[arrival.batch]
            x = target.rows(arrival.x, kept)
            z = x if arrival.x is arrival.z else target.rows(arrival.z, kept)
            if len(x) != len(z):  # a router has sent other rows here: fit to what comes
                x = z
            sums = MomentSums(z.shape[1], z.device) if sums is None else sums
            sums.add(x, z)
        assert sums is not None
        moments = sums.moments(centred=centred)
        if not isinstance(target.layer, nn.Conv2d):
            self._last = (arrivals, centred, moments)
        return moments

    def _fitted(self, target: Target, layer: SketchedLayer, error: float) -> Fitted:
        weight, _ = target.weight_and_bias()
        if isinstance(layer, SketchedLinear):
            left, right = (factor.detach() for factor in layer.factors())
            generator = generator_for(target.name, self._config, weight.device)
            distance = probe_error(weight.detach(), left, right, generator=generator)
        else:
            stored = layer.weight.detach().flatten(1).double()  # type: ignore[union-attr, operator]
            size = float(torch.linalg.vector_norm(weight.detach().double())) or 1.0
            distance = float(torch.linalg.vector_norm(weight.detach().double() - stored)) / size
        return Fitted(
            layer.scheme,
            layer.ranks,
            METHOD,
            distance,
            output_error=error,
            sensitivity=self._study.sensitivity.get(target.name),
        )


def matrix_layer(dense: nn.Module, found: FittedMatrix) -> SketchedLayer:
    """The stand-in of a linear layer or of a 1 x 1 convolution that stores what was fitted."""
    if isinstance(dense, nn.Conv2d):
        kernels = (found.down[..., None, None], found.left[..., None, None])
        scheme = "channel" if found.start is None else "pivoted"
        conv = SketchedConv2d.from_kernels(scheme, kernels, dense, start=found.start or 0)
        if found.bias is not None:
            copy_into(conv.up.bias, found.bias)  # type: ignore[arg-type]
        return conv
    weight: Any = dense.weight
    layer_type = SketchedLinear if isinstance(dense, nn.Linear) else SketchedConv1D
    pivot = 0 if found.start is None else found.left.shape[1]
    layer = layer_type(
        found.down.shape[1] + pivot,
        found.left.shape[0],
        found.left.shape[1],
        bias=found.bias is not None,
        form="pair" if found.start is None else "pivoted",
        start=found.start or 0,
        device="meta",
        dtype=weight.dtype,
    ).to_empty(device=weight.device)
    copy_into(layer.down.weight, found.down)
    copy_into(layer.up.weight, found.left)
    if found.bias is not None:
        copy_into(layer.up.bias, found.bias)
    take_over(layer, dense, weight.requires_grad)
    return layer


def _same(one: Sequence[Arrival], other: Sequence[Arrival]) -> bool:
    """Whether the very same tensors arrived."""
    return len(one) == len(other) and all(a.x is b.x and a.z is b.z for a, b in zip(one, other, strict=True))
