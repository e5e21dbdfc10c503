"""What an error at a layer's output does to the result of the model: G = E[g gᵀ].

g is the gradient of the model's result at the layer's output. Without labels or a loss, a random projection
of the result t stands in, n being standard normal. For logits it is Σ F^½ n t, where F = diag p - p pᵀ is the
curvature of the Kullback-Leibler divergence to the probabilities p: G is then the Fisher matrix. (Labels
drawn from p have the same mean, but where the model is sure of itself nearly all draws say nothing.) For
other results it is Σ n t / |t|, the curvature of their relative squared distance.

Of few batches G shows few directions, as if errors in all others cost nothing. If asked, it is drawn towards
the multiple of the identity of its trace, the more, the more the projections disagree (Ledoit, Wolf 2004).
"""

import math
import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.config import Logits
from panther_compile.errors import first_line
from panther_compile.factorization.gram import gram
from panther_compile.models.batches import Call, kept_positions, run_dense
from panther_compile.models.derivatives import NO_GRADIENT
from panther_compile.models.divided import divided_by_results
from panther_compile.models.half_products import half_products
from panther_compile.models.outputs import are_logits, named_tensors
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Watched
from panther_compile.reporting.progress import ProgressBar
from panther_compile.tensors_on_disk import TensorsOnDisk

SHARE_OF_G = 0.9  # the rest is the identity: the projections are few, and every output counts a little
_BATCHES = 1 / 3  # of the data
_PROJECTIONS = 2
_AT_ONCE = 1 << 25  # numbers of a result, which takes several times its size


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """What gradients at the outputs of layers say, by the name of the layer; missing where none arrives.

    Attributes:
        means: E[g gᵀ] (O, O) over rows, float64, or its diagonal (O,).
        rows: of outputs that the layer gave, in all of its calls, for each row of logits, or number of other
            results.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)


def output_gradients(
    model: nn.Module,
    watched: Mapping[str, Watched],
    channel_dims: Mapping[str, int],
    calls: Sequence[Call],
    *,
    seed: int,
    logits: Logits,
    progress: bool | None,
    shrunk: bool = False,
    disk: TensorsOnDisk | None = None,
    squares: Container[str] = (),
) -> OutputGradients:
    """E[g gᵀ] of each watched layer's output.

    Args:
        model: a copy of the dense model that holds the replacements.
        watched: the replacements.
        channel_dims: which dimension of a layer's output is O.
        calls: the data; a third of it is used.
        seed: of the projections.
        logits: see `outputs.distance`.
        progress: whether to show a bar; None shows one on a terminal.
        shrunk: whether to draw it towards the identity, see the file.
        disk: where the sums are kept, if not in memory.
        squares: layers of so many outputs that only the diagonal E[g²] (O,) is wanted.
    """
    sums: dict[str, _Sum] = {}
    given = 0
    every = max(1, round(1 / _BATCHES))
    used = divided_by_results(model, calls[::every], _AT_ONCE)
    for place, call in enumerate(ProgressBar(used, desc="sensitivity", progress=progress)):
        kept = kept_positions(model, call)
        taps = _Taps(sums, channel_dims, kept, squares, disk, shrunk)
        with torch.enable_grad(), _handing_on(watched, taps):
            result = run_dense(model, call)
            taps.in_forward = False
            for projection in range(_PROJECTIONS):
                generator = torch.Generator().manual_seed(seed + _PROJECTIONS * place + projection)
                number, taps.scale, rows = _projected(result, kept, generator, logits)
                given += rows
                if number is None or not taps.zeros:
                    break
                if not _run_backward(model, number, taps, retain=projection + 1 < _PROJECTIONS):
                    return OutputGradients()  # nor would those of other batches come
    reached = {name: found for name, found in sums.items() if bool(found.squares_of().sum() > 0)}
    return OutputGradients(
        {name: found.shrunk() if shrunk else found.mean() for name, found in reached.items()},
        {name: found.rows_given / given for name, found in reached.items()},
    )


@contextmanager
def _handing_on(watched: Mapping[str, Watched], taps: "_Taps") -> Iterator[None]:
    """Have layers hand their outputs to the taps."""
    for one in watched.values():
        one.on_output = taps.hand_on
    try:
        yield
    finally:
        for one in watched.values():
            one.on_output = None


def _run_backward(model: nn.Module, number: Tensor, taps: "_Taps", *, retain: bool) -> bool:
    """Hand the gradients of a number to the taps; False, with a warning, where it has none."""
    try:
        with half_products(model):
            torch.autograd.grad(number, list(taps.zeros.values()), retain_graph=retain, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except NO_GRADIENT as error:
        warnings.warn(
            f"no gradient of the model's result ({first_line(error)}): errors of all outputs count alike",
            stacklevel=3,
        )
        return False
    return True


def weight_of_errors(gradient: Tensor, share: float = SHARE_OF_G) -> tuple[Tensor, float]:
    """G or its diagonal, scaled to a mean of 1 and mixed with the identity, and the mean of E[g²] before."""
    mean = float((gradient if gradient.dim() == 1 else gradient.diagonal()).mean())
    weight = share / mean * gradient
    (weight if weight.dim() == 1 else weight.diagonal()).add_(1.0 - share)
    return weight, mean


def _projected(
    result: Any, kept: Tensor | None, generator: torch.Generator, logits: Logits
) -> tuple[Tensor | None, float, int]:
    """A random number that depends on every tensor of the result that has a gradient; None if none has.

    And what it was multiplied by, a power of 2: so that its gradients are numbers of float16; and how many
    rows of logits, or other numbers, the result has.
    """
    total: Tensor | None = None
    least, given = math.inf, 0
    for name, tensor in named_tensors(result):
        if not tensor.requires_grad:
            continue
        rows = kept_rows(tensor.float(), kept)
        finite = rows.isfinite()
        if not bool(finite.any()):  # as the loss of no label
            continue
        noise = torch.randn(rows.shape, generator=generator, dtype=torch.float32).to(rows.device)
        if is_logits := are_logits(name, logits):
            chances = rows.detach().softmax(-1)
            noise.mul_(chances.sqrt())
            noise.addcmul_(chances, noise.sum(-1, keepdim=True), value=-1.0)
            del chances
        # A mask, not an index: logits of a large vocabulary are many, and gradients of an index sort them.
        count = rows.numel()
        if not bool(finite.all()):
            count = int(finite.sum())
            noise.masked_fill_(~finite, 0.0)
            rows = rows.masked_fill(~finite, 0.0)
        part, size = (rows * noise).sum(), 1.0
        if not is_logits:
            squares = rows.detach().square().sum()
            if not bool(squares.isfinite()):  # numbers of 1e19 and more
                squares = rows.detach().double().square().sum()
            root = (squares / count).clamp_min(1e-30).sqrt().to(rows.dtype)
            part, size = part / root, float(root)
        total, least = part if total is None else total + part, min(least, size)
        given += count // rows.shape[-1] if is_logits else count
    if total is None:
        return None, 1.0, 0
    scale = 2.0 ** math.floor(math.log2(least))
    return total * scale, scale, given


def _power_of_2(numbers: Tensor) -> float:
    """A power of 2 that is as large as the largest of some numbers, by a factor of 2; 1 of zeros alone."""
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    return 2.0 ** max(-100, math.frexp(largest)[1] - 1) if 0.0 < largest < math.inf else 1.0


@dataclass(slots=True)
class _Sum:
    """A sum of g gᵀ over rows.

    Attributes:
        total: (O, O), or its diagonal (O,), float64.
        rows: how many.
        rows_given: how many the layer gave, in further calls too, though no gradient is taken of those.
        squares: sum of the squared norms of what each projection added, if it is to be shrunk.
        square_rows: sum of the squared numbers of rows of each, likewise.
    """

    total: Tensor
    rows: int = 0
    rows_given: int = 0
    squares: float = 0.0
    square_rows: int = 0

    def squares_of(self) -> Tensor:
        """The diagonal (O,)."""
        return self.total if self.total.dim() == 1 else self.total.diagonal()

    def mean(self) -> Tensor:
        """The mean S over rows; changes the sum."""
        return self.total.div_(self.rows)

    def shrunk(self) -> Tensor:
        """(1 - λ) S + λ μ I, μ being the mean of the diagonal of the mean S over rows; changes the sum.

        λ is the variance of S between projections over its squared distance from μ I (Ledoit, Wolf, "A
        well-conditioned estimator for large-dimensional covariance matrices", 2004, section 3.1), with the
        rows of one projection taken as one: those of an image or a text are much alike.
        """
        found = self.mean()
        square, middle = float(found.square().sum()), float(found.diagonal().mean())
        alone = self.square_rows / self.rows**2  # 1 over the number of projections, if they are alike
        apart = square - len(found) * middle**2
        if alone < 1.0 and apart > 0.0:
            variance = (self.squares / self.rows**2 - alone * square) / (1.0 - alone)
            share = min(1.0, max(0.0, variance / apart))
            found.mul_(1.0 - share).diagonal().add_(share * middle)
        return found


@dataclass
class _Taps:
    """Gradients at the outputs of layers in one call, each added to the sums as it comes: none is kept.

    Attributes:
        sums: by the name of the layer.
        channel_dims: see `output_gradients`.
        kept: see `kept_rows`.
        squares: see `output_gradients`.
        disk: likewise.
        shrunk: likewise.
        zeros: added to the outputs; what gradients are asked for, so that those of outputs come by.
        times: how often each layer was called in the forward.
        in_forward: whether it is on; a backward may call layers again, as where activations are checkpointed.
        scale: what gradients were multiplied by.
    """

    sums: dict[str, _Sum]
    channel_dims: Mapping[str, int]
    kept: Tensor | None
    squares: Container[str]
    disk: TensorsOnDisk | None
    shrunk: bool
    zeros: dict[str, Tensor] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    in_forward: bool = True
    scale: float = 1.0

    def hand_on(self, name: str, out: Tensor) -> Tensor:
        """See `Watched.on_output`."""
        self.times[name] += self.in_forward
        if name in self.zeros:  # called again: the first call counts
            return out
        zero = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
        out = out + zero
        if out.requires_grad:  # the model's own code may rule gradients out
            self.zeros[name] = zero
            out.register_hook(partial(self._see, name))
        return out

    def _see(self, name: str, gradient: Tensor) -> None:
        """Add the gradient at the output of a layer."""
        size = _power_of_2(gradient)  # numbers of 1e20 and of 1e-23 have squares that leave float32
        rows = kept_rows((gradient.float() / size).movedim(self.channel_dims[name], -1), self.kept)
        times = (size / self.scale) ** 2
        if name in self.squares:
            squares = torch.linalg.vector_norm(rows, dim=0).double().square().mul_(times)
            self._add(name, squares, len(rows), 0.0)
            return
        products = gram(rows).double()
        square = float(products.square().sum()) * times**2 if self.shrunk else 0.0
        self._add(name, products.mul_(times), len(rows), square)

    def _add(self, name: str, total: Tensor, rows: int, square: float) -> None:
        if name in self.sums:
            self.sums[name].total += total
        else:
            self.sums[name] = _Sum(total if self.disk is None else self.disk.put(total))
        self.sums[name].rows += rows
        self.sums[name].rows_given += rows * self.times[name]
        self.sums[name].squares += square
        self.sums[name].square_rows += rows**2
