"""The diagonal of a weight of errors does what the diagonal matrix does."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import panther_compile as pc
from panther_compile.calibration import study
from panther_compile.calibration.sensitivity import OutputGradients
from panther_compile.factorization.fit_matrix import fit_beside, fit_matrix_to
from panther_compile.factorization.metric import among, rooted, unrooted, weighed, whole
from panther_compile.factorization.moments import MomentSums
from panther_compile.factorization.pivot import from_pivoted
from panther_compile.factorization.whiten import best_low_rank, lower_root, output_error, term_sizes

O, I = 12, 8  # noqa: E741


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def diagonal() -> torch.Tensor:
    return drawn(O, seed=1).square() + 0.1


def test_each_use(diagonal: torch.Tensor) -> None:
    matrix, x, places = torch.diag(diagonal), drawn(O, 3), torch.tensor([4, 0, 7])
    assert_close(weighed(diagonal, x), weighed(matrix, x))
    assert_close(rooted(lower_root(diagonal), x), rooted(lower_root(matrix), x))
    assert_close(unrooted(lower_root(diagonal), x), unrooted(lower_root(matrix), x))
    assert_close(torch.diag(among(diagonal, places)), among(matrix, places))
    assert_close(whole(diagonal), matrix)


@pytest.mark.parametrize("outputs", [O, 6])  # solved on the side of the inputs, and of the outputs
def test_fits(diagonal: torch.Tensor, outputs: int) -> None:
    diagonal, weight, sums = diagonal[:outputs], drawn(outputs, I), MomentSums(I, torch.device("cpu"))
    x = drawn(64, I, seed=2).float()
    sums.add(x, x + 0.1 * drawn(64, I, seed=3).float())
    moments = sums.moments(centred=False)
    for form in (None, False, True):
        fits = [
            fit_matrix_to(weight, None, moments, metric, 3, pivoted=form, dtype=torch.float32)
            for metric in (diagonal, torch.diag(diagonal))
        ]
        assert_close(*(one.left.double() @ whole_right(one) for one in fits), rtol=1e-5, atol=1e-6)
    beside = [
        fit_beside(weight, None, moments, metric, fits[0]) for metric in (diagonal, torch.diag(diagonal))
    ]
    assert_close(*(one.left for one in beside))
    pairs = [best_low_rank(weight, moments, metric, 3) for metric in (diagonal, torch.diag(diagonal))]
    sizes = [term_sizes(*pairs[0], moments.covariance, one) for one in (diagonal, torch.diag(diagonal))]
    assert_close(*sizes)
    errors = [output_error(weight, *pairs[0], moments, one) for one in (diagonal, torch.diag(diagonal))]
    assert errors[0] == pytest.approx(errors[1])


def whole_right(found) -> torch.Tensor:
    right = found.right.double()
    return right if found.start is None else from_pivoted(found.left, right, found.start)[1]


class Gated(nn.Module):
    """Narrow layers, shared inputs, and outputs of very unlike weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)
        self.head = nn.Linear(16, 5)
        with torch.no_grad():
            self.down.weight[:, 24:] *= 0.02  # half of the features hardly count

    def forward(self, x):
        return self.head(x + self.down(self.up(x) * torch.sigmoid(self.gate(x))))


def far(small: nn.Module, model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((small(x) - model(x)).norm() / model(x).norm())


@pytest.mark.parametrize(("include", "is_narrow"), [(["up", "gate"], False), (["up", "gate", "down"], True)])
def test_wide_layers_know_which_outputs_count(
    include: list[str], is_narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Gated().eval(), drawn(512, 16, seed=4).float()
    options = {"min_params": 0, "allow_slower": True, "progress": False, "include": include}
    data = list(x[:256].split(32))
    full = pc.sketchify(model, 0.5, data=data, **options)
    monkeypatch.setattr(study, "LARGEST_GRADIENT", 40)
    wide = pc.sketchify(model, 0.5, data=data, **options)
    monkeypatch.setattr(study, "output_gradients", lambda *given, **named: OutputGradients())
    none = pc.sketchify(model, 0.5, data=data, **options)
    errors = [far(one, model, x[256:]) for one in (full, wide, none)]
    assert max(errors[:2]) < 0.8 * errors[2], errors
    assert ("narrow" in pc.sketch_report(wide).allocation) is is_narrow
