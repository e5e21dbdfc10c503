"""What the dense model shows of its layers on the data: whitened spectra, and what errors would do."""

# O out_features, I in_features
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.calibration.data_pass import Arrived, DataPass
from panther_compile.calibration.narrow import (
    Between,
    choose_features,
    features_kept,
    reader_losses,
    writer_losses,
)
from panther_compile.calibration.sensitivity import output_gradients, weight_of_errors
from panther_compile.calibration.shared_input import Stack, best_of_stack
from panther_compile.calibration.shared_parts import PartSums, best_of_parts
from panther_compile.calibration.ties import Ties, damped
from panther_compile.config import SketchConfig
from panther_compile.factorization.metric import rooted
from panther_compile.factorization.moments import RIDGE, Moments, MomentSums
from panther_compile.factorization.whiten import best_low_rank, lower_root, root_of, term_sizes
from panther_compile.kinds.kernel_metric import KernelSums, PatchMoments
from panther_compile.kinds.table import TableSums, best_table
from panther_compile.kinds.targets import Target
from panther_compile.memory import FreedMemory
from panther_compile.models.batches import Call
from panther_compile.models.watched import Side
from panther_compile.names import stack_name
from panther_compile.planning.coupled import Coupling, CouplingLosses
from panther_compile.records import Choice
from panther_compile.tensors_on_disk import TensorsOnDisk

MAX_BYTES = 2 << 30  # of moments held at once; more layers take more passes over the data
BESIDE_DISK = 1 << 30  # likewise, where all else is on disk
LARGEST_GRADIENT = 8192  # output features, above which errors of two are taken for independent


@dataclass(frozen=True)
class Study:
    """What one pass over the data shows, by the name of the unit, or of the stack of several.

    Attributes:
        values: singular values of G^½ W R, float64, descending; of matrices.
        factors: W as left (O, m) and right (m, I), m = min(O, I); the first r of each are the best
            of rank r where x = z, and E[x] where the layer has a bias, else 0; while they fit into memory.
        weights: G, float32, of wide layers its diagonal; missing where no gradient arrives.
        costs: what the mean squared error of a layer's outputs does to the result, E[g²] times the rows of
            outputs for each row of the result: errors of all rows add up; likewise.
        energies: what each rank of kernels of k x k keeps, see `Candidate.energies`, by unit and scheme.
        patches: what kernels of k x k read.
        power: sum of the squared outputs of a row, E ‖W x‖², of kernels of k x k.
        shares: how much each row counts of a table that other layers use too (V,), float64.
        reached: units that the data reaches, and with how many rows.
        shared: sets of layers that may share an input factor, for each group of one input.
        ridge: on second moments, of their mean power.
        losses: what narrowing layers does that can be narrowed together, by the name of the coupling.
        between: what is between them, likewise.
        disk: where large tensors are kept, and all that there is room for; None keeps them in memory.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    energies: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    patches: dict[str, PatchMoments] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    shared: list[list[Sequence[str]]] = field(default_factory=list)
    ridge: float = RIDGE
    losses: dict[str, CouplingLosses] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)
    disk: TensorsOnDisk | None = None

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor, where large ones are kept."""
        return tensor if self.disk is None else self.disk.put(tensor)

    def put_module(self, module: nn.Module) -> None:
        """Have the parameters of a module there too."""
        if self.disk is not None:
            self.disk.put_module(module)

    def has_room(self, held: int) -> bool:
        """Whether so many bytes of one kind can be kept."""
        return self.disk is not None or held <= MAX_BYTES

    def cost(self, name: str) -> float:
        """See `costs`; 1 where no gradient tells."""
        return self.costs.get(name, 1.0)

    def damage(self, name: str) -> float | None:
        """What losing all that a layer gives would do to the result, were it small; None if unknown.

        The squared relative error of the layer's outputs times this is twice the divergence of logits, a row,
        or the squared relative error of other results.
        """
        if name not in self.costs:
            return None
        power = self.values[name].square().sum() if name in self.values else self.power.get(name, 0.0)
        return self.cost(name) * float(power)

    def coupling(self, choice: Choice) -> Coupling:
        """The one that a choice is of."""
        return next(one.coupling for one in self.losses.values() if one.coupling.names == choice.link)

    def stack(self, targets: Iterable[Target]) -> Stack | None:
        """The stack of some layers, None if gradients tell only of some what their errors do."""
        targets = list(targets)
        metrics = self.metrics(targets)
        if metrics is None:
            return None
        return Stack.of([one.weight_and_bias()[0] for one in targets], metrics, self.put)

    def metrics(self, targets: Iterable[Target]) -> Iterator[Tensor | None] | None:
        """The weights c G of errors of some layers, c being the cost; None if gradients tell only of some."""
        names = [target.name for target in targets]
        known = [name in self.weights for name in names]
        if any(known) and not all(known):
            return None
        return (self.cost(one) * self.weights[one].double() if all(known) else None for one in names)


def study_layers(
    side: Side,
    targets: Mapping[str, Target],
    calls: Sequence[Call],
    config: SketchConfig,
    couplings: Sequence[Coupling] = (),
    *,
    ridges: Sequence[float] = (RIDGE,),
    stacks: Sequence[Sequence[str]] = (),
    disk: TensorsOnDisk | None = None,
    like: Study | None = None,
    repeated: Container[str] = (),
) -> list[Study]:
    """Run the dense model over the data; a study for each ridge, of the same runs.

    Args:
        side: a copy of it that watches the targets.
        targets: weights to be fitted, by name.
        calls: the data.
        config: the options; the ratio does not matter.
        couplings: see `find_couplings`.
        ridges: see `Study`.
        stacks: sets of layers of one input that will share an input factor.
        disk: see `Study`.
        like: a study of the same with another ridge, whose gradients are taken.
        repeated: layers that a batch calls more than once, whose moments no other layer has.

    Raises:
        DataError: NaN or Inf reaches a layer; the message names layer and batch.
    """
    by_reader = {coupling.reader: coupling for coupling in couplings}
    ties = Ties({} if like is not None else targets)
    freed = FreedMemory()
    if like is None:
        like = Study(disk=disk)
        _study_gradients(like, side, targets, ties, calls, config)
        freed.give_back()
    reached = {name: like.reached[name] for name in like.shares}  # as the ties had it
    power: dict[str, float] = {}
    studies = [
        Study(
            weights=like.weights,
            costs=like.costs,
            shares=like.shares,
            reached=reached,
            power=power,
            ridge=ridge,
            disk=disk,
        )
        for ridge in ridges
    ]
    parts = [PartSums(targets) for _ in ridges]
    data = DataPass(side, calls, ties, repeated, config.progress)
    for names in _groups(targets, MAX_BYTES if disk is None else BESIDE_DISK):
        group = {name: targets[name] for name in names}
        _study_group(studies, data.over(group), ties, by_reader, stacks, parts, freed)
        for study, sums in zip(studies, parts, strict=True):
            for together, total in sums.complete(names):
                _study_parts(study, together, total)
        freed.give_back()
    for study in studies:
        for coupling in couplings:
            _study_writers(study, coupling)
    freed.give_back()
    return studies


def _study_gradients(
    study: Study,
    side: Side,
    targets: Mapping[str, Target],
    ties: Ties,
    calls: Sequence[Call],
    config: SketchConfig,
) -> None:
    """Add what errors at the outputs of layers do to the result."""
    wide = {name for name, one in targets.items() if one.outputs > LARGEST_GRADIENT}
    known = {name: one for name, one in targets.items() if name not in wide or one.view.is_linear}
    views = {name: one.view for name, one in known.items()} | ties.views
    found = output_gradients(
        side.model,
        {name: side.watched[name] if name in known else side.followers[name] for name in views},
        {name: view.channel_dim for name, view in views.items()},
        calls,
        seed=config.seed,
        logits=config.logits,
        progress=config.progress,
        disk=study.disk,
        squares=ties.heads | wide,
    )
    gradients, ties.given = found.means, found.rows
    for name in ties.views:
        if name in gradients:
            outer = gradients.pop(name)
            ties.gradients[name] = outer if name in ties.heads else damped(outer)
    for name in list(gradients):
        outer, square = weight_of_errors(gradients.pop(name))
        study.costs[name] = square * found.rows[name]
        study.weights[name] = study.put(outer.float().contiguous())


def _study_group(
    studies: Sequence[Study],
    arrived: Arrived,
    ties: Ties,
    by_reader: Mapping[str, Coupling],
    stacks: Sequence[Sequence[str]],
    parts: Sequence[PartSums],
    freed: FreedMemory,
) -> None:
    """Add layers whose moments fit into memory together, and the stacks of them."""
    first, group = studies[0], arrived.targets  # what no ridge changes all studies share
    first.power.update(arrived.power)
    for name, rows in arrived.rows.items():
        if name not in first.shares:
            first.reached[name] = first.reached.get(name, 0) + rows
    known: dict[str, MomentSums] = {}
    for name, sums in arrived.moments():
        known[name] = sums
        for study, part in zip(studies, parts, strict=True):
            _study_layer(study, group[name], sums, part, by_reader.get(name))
        freed.give_back()
    for name, added in arrived.others.items():
        if group[name].ties and name not in first.shares and (reads := ties.rows(group[name])):
            # Its own layer may never be called, as the `shared` of T5.
            first.reached[name] = max(first.reached.get(name, 0), reads)
        if name in first.reached:
            _study_other(studies, group[name], added, ties)
    sets = list(arrived.inputs.found(group))
    for study in studies:
        for found in sets:
            _study_stacks(study, group, found, known[found[0][0]])
            freed.give_back()
        for stack in stacks:
            if set(stack) <= set(known) and stack_name(stack) not in study.values:
                _study_stacks(study, group, [stack], known[stack[0]])


def _study_layer(
    study: Study, target: Target, sums: MomentSums, parts: PartSums, coupling: Coupling | None
) -> None:
    """Add a layer; the coupling is that which it reads."""
    name = target.name
    weight = target.weight_and_bias()[0].detach().double()
    moments = sums.moments(centred=target.view.has_mean, ridge=study.ridge)
    gradient = study.weights[name].double() if name in study.weights else None
    gradient = target.view.metric(gradient)
    left, right = best_low_rank(weight, moments, gradient, min(weight.shape))
    study.values[name] = term_sizes(left, right, moments.covariance, gradient)
    _keep_factors(study, name, left, right, moments.mean_x)
    parts.add(name, moments.covariance, study.cost(name), study.reached[name])
    if coupling is not None:
        _study_reader(study, coupling, weight, moments, gradient)


def _study_other(studies: Sequence[Study], target: Target, sums: KernelSums | TableSums, ties: Ties) -> None:
    """Add a layer whose rows no matrix multiplies; a table is the same whatever the ridge."""
    first, name = studies[0], target.name
    if isinstance(sums, KernelSums):
        gradient = first.weights[name].double() if name in first.weights else None
        for study in studies:
            moments = sums.moments(study.ridge)
            study.energies[name] = sums.energies(gradient, moments)
            study.patches[name] = replace(moments, channels=study.put(moments.channels))
        return
    if target.ties and name not in first.shares:
        _study_ties(first, target, sums, ties)
    gradient = first.weights[name].double() if name in first.weights else None
    shares = first.shares[name] if target.ties else sums.shares()
    left, right, values = best_table(target.weight_and_bias()[0], shares, gradient)
    for study in studies:
        study.values[name] = values
        _keep_factors(study, name, left, right, right.new_zeros(right.shape[1]))


def _study_ties(study: Study, target: Target, sums: TableSums, ties: Ties) -> None:
    """Take what all layers that use a table want of it, not its own layer alone; studies share that."""
    name = target.name
    gradient = None
    if name in study.weights:
        gradient = study.costs[name] / ties.given[name] * study.weights[name].double()
    study.shares[name], metric = ties.wanted(target, sums, gradient)
    square, rows = float(metric.diagonal().mean()), [ties.given.get(one, 0.0) for one in (name, *target.ties)]
    study.costs[name] = square * (max(rows) or 1.0)
    study.weights[name] = study.put((metric / square).float())


def _study_stacks(
    study: Study, targets: Mapping[str, Target], sets: Sequence[Sequence[str]], sums: MomentSums
) -> None:
    """Add what the stacks of layers of one input are like."""
    moments = sums.moments(centred=targets[sets[0][0]].view.has_mean, ridge=study.ridge)
    root = root_of(moments.covariance)
    groups: list[Sequence[str]] = []
    for names in sets:
        stack, key = study.stack(targets[name] for name in names), stack_name(names)
        if stack is not None:
            left, right = best_of_stack(stack, moments, root)
            study.values[key] = term_sizes(left, right, moments.covariance, None)
            _keep_factors(study, key, torch.cat(stack.parts(left)), right, moments.mean_x)
            groups.append(names)
    if groups:
        study.shared.append(groups)


def _study_parts(study: Study, targets: Sequence[Target], total: Tensor) -> None:
    """Add what parts that may share a factor are like as one; see `PartSums` for the total."""
    names, metrics = [one.name for one in targets], study.metrics(targets)
    if metrics is None or not set(names) <= set(study.factors):
        return
    weights, key = [one.weight_and_bias()[0] for one in targets], stack_name(names)
    study.values[key], left, right = best_of_parts(weights, metrics, total, targets[0].shared_scheme)
    _keep_factors(study, key, left, right, torch.cat([study.factors[name][2] for name in names]))
    study.shared.append([tuple(names)])


def _study_reader(
    study: Study, coupling: Coupling, weight: Tensor, moments: Moments, gradient: Tensor | None
) -> None:
    """Add what is between coupled layers, and what narrowing does to the reader, while there is room."""
    held = sum(4 * one.covariance.numel() for one in study.between.values())
    if gradient is None or not study.has_room(held + 4 * moments.covariance.numel()):
        return
    rows = rooted(lower_root(gradient), weight)
    basis = choose_features(coupling, rows, moments.covariance)
    scale = study.cost(coupling.reader)
    narrowed, tails = (scale * one for one in reader_losses(coupling, rows, moments.covariance, basis))
    basis = (basis.float() if basis.is_floating_point() else basis).contiguous()
    covariance, mean = moments.covariance.float().contiguous(), moments.mean_x.float().contiguous()
    study.between[coupling.name] = Between(study.put(basis), study.put(covariance), mean)
    total = scale * float(study.values[coupling.reader].square().sum())
    study.losses[coupling.name] = CouplingLosses(
        coupling, torch.tensor(features_kept(coupling)), narrowed.cpu(), tails[:, None].cpu(), total
    )


def _study_writers(study: Study, coupling: Coupling) -> None:
    """Add what ranks of the writers do; a coupling is of no use without."""
    losses = study.losses.pop(coupling.name, None)
    if losses is None or not all(
        name in study.weights and name in study.factors for name in coupling.writers
    ):
        study.between.pop(coupling.name, None)
        return
    members = []
    for name in coupling.writers:
        left, weight = study.factors[name][0].double(), study.weights[name].double()
        lost = writer_losses(coupling, left, weight, study.between[coupling.name].basis)
        members.append(study.cost(name) * lost.cpu())
    members.append(losses.members[:, 0])
    longest = max(one.shape[1] for one in members)
    padded = [F.pad(one, (0, longest - one.shape[1]), value=torch.inf) for one in members]
    study.losses[coupling.name] = replace(losses, members=study.put(torch.stack(padded, 1)))


def _keep_factors(study: Study, name: str, left: Tensor, right: Tensor, mean: Tensor) -> None:
    """Keep them while there is room."""
    held = sum(4 * (kept[0].numel() + kept[1].numel()) for kept in study.factors.values())
    if study.has_room(held + 4 * (left.numel() + right.numel())):
        # Contiguous, as they are when read from a file: products then round alike.
        parts = (left.float(), right.float(), mean.float())
        left, right, mean = (study.put(one.contiguous()) for one in parts)
        study.factors[name] = left, right, mean


def groups_within(most: int, sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names in groups whose sizes sum to at most so much, or that are of one name; the order is kept."""
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _groups(targets: Mapping[str, Target], most: int) -> Iterator[list[str]]:
    """Groups of layers whose moments fit into so many bytes; layers of one module stay in one group."""
    families: dict[str, list[str]] = {}
    for name in targets:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    sizes = {one: sum(_bytes_of_moments(targets[name]) for name in names) for one, names in families.items()}
    for group in groups_within(most, sizes):
        yield [name for one in group for name in families[one]]


def _bytes_of_moments(target: Target) -> int:
    return 8 * target.shape[1] ** 2 if target.view.is_matrix else 0
