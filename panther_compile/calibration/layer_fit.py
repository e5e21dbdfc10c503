"""One layer of a target from what reached it: the callback of the lockstep."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from panther_compile.calibration.narrow import (
    cut_coupling,
    extend,
    fit_narrow,
    narrow_rows,
)
from panther_compile.calibration.repeated import Repeated
from panther_compile.calibration.resume import CalibrationFolder, FittedLayer
from panther_compile.calibration.shared_input import cut_shared, fit_shared
from panther_compile.calibration.study import Study
from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair, fit_beside, fit_matrix_to
from panther_compile.factorization.moments import Moments, MomentSums
from panther_compile.kinds.targets import Target
from panther_compile.kinds.weights import fitted_record
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.linear import share_factor
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.models.outputs import is_finite
from panther_compile.models.rows import paired
from panther_compile.models.watched import Arrival
from panther_compile.names import stack_name
from panther_compile.planning.coupled import Coupling
from panther_compile.records import Choice, Fitted, SketchPlan

METHOD = "calibrated"


class LayerFit:
    """Fits the layers of a plan; layers that are given the same tensors share their moments.

    Args:
        targets: by name; each is sketched by the plan.
        plan: how each is to be stored.
        study: of the dense model.
        masks: of each batch, see `batches.kept_positions`.
        config: the options.
        folder: where fitted layers are kept, and taken from if they are there; None keeps none.
        repeated: what reaches layers that one forward calls several times; the first call alone unless given.
        stored: whether factors are those to be stored, or quicker ones of the same rank, which are enough to
            try them: neither pivoted nor balanced, and of kernels not brought closer in the end.

    Attributes:
        choices: of the plan, by name.
        ready: what was fitted, by name.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        plan: SketchPlan,
        study: Study,
        masks: Sequence[Tensor | None],
        config: SketchConfig,
        folder: CalibrationFolder | None = None,
        repeated: Repeated | None = None,
        *,
        stored: bool = True,
    ) -> None:
        self.targets, self._plan, self._study = targets, plan, study
        self._repeated, self._stored = repeated or Repeated(), stored
        self.choices = plan.choices
        self._masks, self._config, self._folder = masks, config, folder
        self._last: tuple[Sequence[Arrival], bool, Moments] | None = None
        self.ready: dict[str, FittedLayer] = {}
        self._cut: dict[tuple[str, ...], Mapping[str, NarrowLinear]] = {}
        self._parts: dict[tuple[str, ...], Mapping[str, FittedPair]] = {}

    def __call__(self, name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        """See `lockstep.Fit`; layers of one input that share it are fitted where the first is reached."""
        if name not in self.ready:
            sharing = self.choices[name].sharing
            names = (name,) if self.targets[name].together else sharing or (name,)
            found = self._kept(names)
            if not found:
                found = self._fit(name, arrivals) if len(names) == 1 else self._fit_shared(names, arrivals)
                for one, (layer, fitted) in found.items():
                    if self._folder is not None:
                        self._folder.keep_layer(self._plan, one, layer, fitted)
            for layer, _ in found.values():
                self._study.put_module(layer)
            self.ready |= found
            self._share(sharing)
        return self.ready[name][0]

    def from_study(self) -> dict[str, nn.Module]:
        """The layers that are made without what reaches them, by name: tables that several layers use."""
        return {name: self(name, ()) for name in self.targets if name in self._study.shares}

    def _kept(self, names: Sequence[str]) -> dict[str, FittedLayer]:
        """What the folder has, if it has them all."""
        if self._folder is None:
            return {}
        kept = {name: self._folder.layer(self._plan, name, self.targets[name].layer) for name in names}
        found = {name: one for name, one in kept.items() if one is not None}
        return found if len(found) == len(names) else {}

    def _fit(self, name: str, arrivals: Sequence[Arrival]) -> dict[str, FittedLayer]:
        target, choice = self.targets[name], self.choices[name]
        is_reader = bool(choice.link) and name == choice.link[-1]
        arrivals = self._repeated.arrivals.get(name) or list(_finite(arrivals, drop=is_reader))
        gradient = self._study.weights.get(name)
        weight = None if gradient is None else gradient.double()
        view = target.view
        layer: SketchedLayer
        error: float | None
        if choice.link:
            layer, error, rows = self._narrow(target, choice, arrivals, weight)
        elif view.is_matrix:
            moments = self._moments(target, arrivals)
            layer, error = self._matrix(target, choice, moments, view.metric(weight))
            rows = moments.rows
        elif name in self._study.shares:
            layer, error = view.fit_shares(self._study.shares[name], weight, choice.rank)
            rows = self._study.reached[name]
        else:
            masks = [self._masks[arrival.batch] for arrival in arrivals]
            layer, error, rows = view.fit(
                name, choice, self._config, arrivals, masks, weight, self._study.ridge, self._stored
            )
        return {name: (layer, self._fitted(target, layer, error, rows))}

    def _fit_shared(self, names: Sequence[str], arrivals: Sequence[Arrival]) -> dict[str, FittedLayer]:
        """Layers of one input, with one input factor; what their outputs are added to does not count."""
        targets = [self.targets[name] for name in names]
        stack = self._study.stack(targets)
        assert stack is not None
        arrivals = [replace(arrival, residuals=None) for arrival in _finite(arrivals, drop=False)]
        moments = self._moments(targets[0], arrivals)
        dtype = targets[0].weight_and_bias()[0].dtype
        fitted = fit_shared(targets, stack, moments, self.choices[names[0]].rank, dtype)
        found: dict[str, FittedLayer] = {}
        for target, matrix in zip(targets, fitted, strict=True):
            layer = target.build(matrix)
            found[target.name] = layer, self._fitted(target, layer, matrix.output_error, moments.rows)
        return found

    def _narrow(
        self, target: Target, choice: Choice, arrivals: Sequence[Arrival], gradient: Tensor | None
    ) -> tuple[SketchedLayer, float | None, int]:
        """A layer of a coupling; with the error of its output, and to how many rows it was fitted."""
        coupling = self._study.coupling(choice)
        basis = self._study.between[coupling.name].basis
        if target.name != coupling.reader:
            moments = self._moments(target, [replace(arrival, residuals=None) for arrival in arrivals])
        else:
            sums = self._reader_sums(target, coupling, basis, choice.rank, arrivals)
            if sums is None:
                return self.cut_coupling(choice)[target.name], None, 0
            centred = target.weight_and_bias()[1] is not None
            extended = extend(coupling, basis, choice.rank)
            moments = sums.moments(centred=centred, extended=extended, ridge=self._study.ridge)
        pivoted = True if self._stored else None
        fitted = fit_narrow(target, coupling, basis, choice.ranks, moments, gradient, pivoted=pivoted)
        return (*fitted, moments.rows)

    def _reader_sums(
        self, target: Target, coupling: Coupling, basis: Tensor, count: int, arrivals: Sequence[Arrival]
    ) -> MomentSums | None:
        """Sums over all features in the dense model and of the kept ones in the sketched one."""
        if target.name in self._repeated.sums:
            return None
        added = all(_is_added(arrival) for arrival in arrivals)
        sums: MomentSums | None = None
        for arrival in arrivals:
            kept = self._masks[arrival.batch]
            x, z = target.rows(arrival.x, kept), target.rows(arrival.z, kept)
            if len(x) != len(z):  # a router has sent other rows here
                continue
            z = narrow_rows(coupling, basis, count, z)
            sums = MomentSums(z.shape[1], z.device, dense=x.shape[1]) if sums is None else sums
            sums.add(x, z, _residual_rows(target, arrival, kept) if added else None)
        return sums

    def cut_coupling(self, choice: Choice) -> Mapping[str, NarrowLinear]:
        """The layers of a coupling from the study, by name."""
        if choice.link not in self._cut:
            study, coupling = self._study, self._study.coupling(choice)
            ranks = {name: self.choices[name].ranks for name in coupling.names}
            between = study.between[coupling.name]
            self._cut[choice.link] = cut_coupling(
                self.targets, coupling, between, ranks, study.weights, study.factors
            )
            for layer in self._cut[choice.link].values():
                study.put_module(layer)
        return self._cut[choice.link]

    def _cut_parts(self, choice: Choice) -> Mapping[str, FittedPair]:
        """The factors of parts that share one, from the study, by name."""
        if choice.sharing not in self._parts:
            targets = [self.targets[name] for name in choice.sharing]
            factors = self._study.factors[stack_name(choice.sharing)]
            pairs = cut_shared(targets, *factors, choice.rank)
            self._parts[choice.sharing] = dict(zip(choice.sharing, pairs, strict=True))
        return self._parts[choice.sharing]

    def cut(self, names: Sequence[str]) -> None:
        """Make those of these layers from the study that depend on others: no batch reached them."""
        for name in names:
            if self.choices[name].link:
                narrow, target = self.cut_coupling(self.choices[name])[name], self.targets[name]
                self.ready[name] = narrow, self._fitted(target, narrow, None, self._study.reached[name])
            sharing = self.choices[name].sharing
            if not sharing or name in self.ready:
                continue
            for one, matrix in self._cut_parts(self.choices[name]).items():
                if one not in self.ready:
                    layer, rows = self.targets[one].build(matrix), self._study.reached[one]
                    self.ready[one] = layer, self._fitted(self.targets[one], layer, None, rows)
            self._share(sharing)

    def _share(self, names: Sequence[str]) -> None:
        """Have those of the layers that there are use one factor."""
        layers = [self.ready[name][0] for name in names if name in self.ready]
        if layers:
            share_factor(layers)

    def _matrix(
        self, target: Target, choice: Choice, moments: Moments, gradient: Tensor | None
    ) -> tuple[SketchedLayer, float]:
        weight, bias = target.weight_and_bias()
        if choice.sharing:
            found = fit_beside(weight, bias, moments, gradient, self._cut_parts(choice)[target.name])
            return target.build(found), found.output_error
        found = fit_matrix_to(
            weight,
            bias,
            moments,
            gradient,
            choice.rank,
            pivoted=choice.scheme == "pivoted" if self._stored else None,
            dtype=weight.dtype,
            restores=target.view.is_spatial and bias is not None,
        )
        return target.build(found), found.output_error

    def _moments(self, target: Target, arrivals: Sequence[Arrival]) -> Moments:
        centred = target.view.has_mean
        if target.name in self._repeated.sums:
            return self._repeated.sums[target.name].moments(centred=centred, ridge=self._study.ridge)
        added = target.view.is_linear and all(_is_added(arrival) for arrival in arrivals)
        if (
            not added
            and self._last is not None
            and _same(self._last[0], arrivals)
            and self._last[1] == centred
        ):
            return self._last[2]
        self._last = None
        sums: MomentSums | None = None
        for arrival in arrivals:
            kept = self._masks[arrival.batch]
            in_dense, in_sketched = paired(arrival.x, arrival.z)
            x = target.rows(in_dense, kept)
            z = x if arrival.x is arrival.z else target.rows(in_sketched, kept)
            if len(x) != len(z):  # a router has sent other rows here: fit to what comes
                x = z
            sums = MomentSums(z.shape[1], z.device) if sums is None else sums
            sums.add(x, z, _residual_rows(target, arrival, kept) if added else None)
        assert sums is not None
        moments = sums.moments(centred=centred, ridge=self._study.ridge)
        if not added and target.view.is_linear:
            self._last = (arrivals, centred, moments)
        return moments

    def _fitted(self, target: Target, layer: SketchedLayer, error: float | None, rows: int) -> Fitted:
        weight = target.view.whole_weight().detach()
        return replace(
            fitted_of(layer, weight, target.name, rows, error, self._config),
            sensitivity=self._study.damage(target.name),
            predicted_error=self.choices[target.name].error if target.name in self._study.values else None,
        )


def fitted_of(
    layer: SketchedLayer, weight: Tensor, name: str, rows: int, error: float | None, config: SketchConfig
) -> Fitted:
    """The record of a layer that was fitted to data.

    Args:
        layer: that was made.
        weight: the dense one as a matrix (O, I).
        name: of the unit.
        rows: of data that it was fitted to.
        error: of its output, if known.
        config: the options.
    """
    inputs = weight.shape[1]
    note = f"fewer samples ({rows:,}) than inputs ({inputs:,}): regularised" if rows < inputs else ""
    return replace(fitted_record(layer, weight, name, METHOD, config), output_error=error, note=note)


def _finite(arrivals: Sequence[Arrival], *, drop: bool) -> Iterator[Arrival]:
    """The arrivals; where the sketched model has run out of its dtype, the dense one's input in its place."""
    for arrival in arrivals:
        if is_finite(arrival.z):
            yield arrival
        elif not drop:
            yield replace(arrival, z=arrival.x, residuals=None)


def _residual_rows(target: Target, arrival: Arrival, kept: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if arrival.residuals is None:
        return None
    dense, sketched = (target.rows(one, kept) for one in arrival.residuals)
    return dense, sketched


def _is_added(arrival: Arrival) -> bool:
    """Whether it is known what the layer's output is added to, row by row in both models."""
    rows = arrival.x.shape[:-1]
    return arrival.residuals is not None and all(
        value.shape[:-1] == rows for value in (arrival.z, *arrival.residuals)
    )


def _same(one: Sequence[Arrival], other: Sequence[Arrival]) -> bool:
    """Whether the very same tensors arrived."""
    return len(one) == len(other) and all(a.x is b.x and a.z is b.z for a, b in zip(one, other, strict=True))
