"""Models whose forward calls its layers under vmap, jvp or grad of `torch.func`."""

import pytest
import torch
from torch import func, nn

import panther_compile as pc


class Transformed(nn.Module):
    """Two layers under a transform, between one before and one behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.BatchNorm1d(64)
        self.norm.running_mean.fill_(0.1)

    def within(self, x):
        return self.b(self.norm(self.a(x).tanh()))


class Mapped(Transformed):
    def forward(self, x):
        mapped = func.vmap(lambda row: self.within(row[None])[0])(self.first(x))
        return self.last(mapped)


class WithTangent(Transformed):
    def forward(self, x):
        value, tangent = func.jvp(self.within, (self.first(x),), (torch.ones_like(x),))
        return self.last(value + tangent)


class Differentiated(Transformed):
    def forward(self, x):
        slopes = func.vmap(func.grad(lambda row: self.within(row[None]).sum()))(self.first(x))
        return self.last(slopes)


@pytest.mark.parametrize("model", [Mapped, WithTangent, Differentiated])
@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_layers_under_a_transform_are_sketched_from_their_weights(model):
    torch.manual_seed(0)
    dense, batches = model().eval(), [torch.randn(256, 64) for _ in range(4)]
    options = {"include": "*", "allow_slower": True}
    alone = pc.sketchify(dense, 0.5, **options)
    small = pc.sketchify(dense, 0.5, data=batches, **options)
    healed = pc.heal(small, teacher=dense, data=batches[:2], steps=1, progress=False)
    for one in (alone, small, healed, pc.prepare_int8(small, batches)):
        assert one(batches[0]).shape == (256, 64)
    rows = {row.name: row for row in pc.sketch_report(small).rows}
    for name in "ab":
        assert "called under torch.func" in rows[name].note
    assert rows["first"].method == "calibrated"
