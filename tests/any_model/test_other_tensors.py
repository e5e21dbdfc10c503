"""Models that are given, or give, tensors that are sparse, nested or complex."""

import pytest
import torch
from any_model.sketching import assert_close, low_rank_, mlp, sketch
from torch import nn

import panther_compile as pc
from panther_compile.errors import DataError, WeightError
from panther_compile.models.outputs import distance, named_tensors


class OnGraph(nn.Module):
    """Layers on the vertices of a graph, as those of a GCN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x, adjacency):
        return self.second(adjacency @ self.first(adjacency @ x).relu())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return torch.complex(*self.layers(x).chunk(2, -1)).conj()


class Sparse(Complex):
    def forward(self, x):
        return self.layers(x).relu().to_sparse()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_adjacency(layout):
    torch.manual_seed(0)
    model = low_rank_(OnGraph()).eval()
    data = [(torch.randn(20, 48), getattr((torch.rand(20, 20) > 0.8).float(), layout)()) for _ in range(4)]
    small = sketch(model, data=data)
    assert_close(small(*data[0]), model(*data[0]))
    assert pc.heal_report(pc.heal(small, teacher=model, data=data, steps=2)).steps == 2


def test_complex_results_are_compared_and_healed():
    torch.manual_seed(0)
    model, data = Complex().eval(), [torch.randn(16, 48) for _ in range(6)]
    small = sketch(model, data=data)
    with torch.no_grad():
        wanted, found = (torch.view_as_real(one(torch.cat(data)).resolve_conj()) for one in (model, small))
    error = float((found - wanted).norm() / (wanted - wanted.mean(0)).norm())
    assert pc.sketch_report(small).closeness.distance == pytest.approx(error, rel=0.1)
    report = pc.heal_report(pc.heal(sketch(model, synthetic=False), teacher=model, data=data, steps=20))
    assert report.after["output"] < report.before["output"]


def test_the_numbers_of_complex_tensors():
    x = torch.tensor([[1 + 2j, 3 - 4j]])
    assert [(name, one.tolist()) for name, one in named_tensors({"z": x.conj()})] == [
        ("z", [[1.0, -2.0, 3.0, 4.0]])
    ]
    assert [one.tolist() for _, one in named_tensors(x[0, 0])] == [[1.0, 2.0]]


def test_sparse_results_are_not_compared():
    small = sketch(low_rank_(Sparse()).eval(), data=[torch.randn(16, 48) for _ in range(4)])
    assert "no floating tensor" in str(pc.sketch_report(small))


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("sparse", torch.ones(8, 48).to_sparse()),
        ("nested", torch.nested.nested_tensor([torch.ones(2, 48), torch.ones(3, 48)])),
        ("nested", torch.nested.nested_tensor([torch.ones(2, 48), torch.ones(3, 48)], layout=torch.jagged)),
    ],
)
def test_what_is_not_dense_is_named_where_it_reaches_a_layer(kind, batch):
    with pytest.raises(DataError, match=f"what reaches 0 is a {kind} tensor, wanted a dense one"):
        sketch(mlp(), data=[batch] * 4)


def test_models_without_numbers_are_not_healed():
    model, batch = mlp(), torch.empty(4, 48, device="meta")
    small = sketch(model).to("meta")
    with pytest.raises(WeightError, match="Sequential is on the meta device"):
        pc.heal(small, teacher=model.to("meta"), data=[batch, batch])


class Finds(nn.Module):
    """What is found in each input, which may be nothing, and after it what it was found in."""

    def __init__(self):
        super().__init__()
        self.body, self.score = (
            nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)),
            nn.Linear(48, 1),
        )

    def forward(self, x):
        h = self.body(x)
        kept = self.score(h)[..., 0] > 0.05
        return [h[kept], h[:1][kept[:1]], h]


def test_results_with_empty_tensors_are_compared_place_by_place():
    one, none = torch.randn(3, 48), torch.empty(0, 48)
    assert distance([none, one], [none, one], None) == 0
    assert distance([none, one], [one, one], None) == distance([one, one], [none, one], None) == 1
    assert distance([one, one], [one], None) == 1
    torch.manual_seed(0)
    model = low_rank_(Finds()).eval()
    data = [0.2 * torch.randn(6, 48) for _ in range(12)]
    small = sketch(model, data=data, ratio=0.3)
    counts = [[len(t) for t in each(x)] for each in (model, small) for x in data]
    assert sorted({found[1] for found in counts}) == [0, 1]
    closeness = pc.sketch_report(small).closeness
    wanted, found = (torch.cat([each(x)[2] for x in data]) for each in (model, small))
    error = float((found - wanted).norm() / (wanted - wanted.mean(0)).norm())
    assert closeness.distance > 0.9 * error
    report = pc.heal_report(pc.heal(small, teacher=model, data=data, steps=20))
    assert 0 <= report.after["output"] <= report.before["output"]
