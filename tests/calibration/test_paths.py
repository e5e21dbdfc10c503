"""What data did not show still runs: couplings where the model's code leads elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.calibration import choose, few_data
from panther_compile.calibration.paths import goes_one_way
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.planning.coupled import Coupling

OPTIONS = {"allow_slower": True, "min_params": 1, "include": "*", "progress": False}
WIDTH, HIDDEN = 24, 96


class Part(nn.Module):
    """`up`, something, `down`; with `flag` it takes a path that no data shows."""

    flag = False

    def __init__(self):
        super().__init__()
        self.up, self.other_up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.other = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.seen = []


class Straight(Part):
    def forward(self, x):
        if self.flag:
            x = -x
        hidden = F.relu(self.up(x))
        if hidden.dtype == torch.float16:
            hidden = hidden.clamp(-1e4, 1e4)
        return self.down(hidden)


class OtherWriter(Part):
    def forward(self, x):
        return self.down(F.relu(self.other_up(x) if self.flag else self.up(x)))


class OtherReader(Part):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        return self.other(hidden) if self.flag else self.down(hidden)


class LeavesEarly(Part):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        if self.flag:
            return self.helper(hidden)
        return self.down(hidden)

    def helper(self, hidden):
        return self.other(hidden)


class ReadTwice(Part):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        y = self.down(hidden)
        return y + self.other(hidden) if self.flag else y


class Returned(Part):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        y = self.down(hidden)
        return (y, hidden) if self.flag else y


class Kept(Part):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        if self.flag:
            self.seen.append(hidden)
        return self.down(hidden)


class ByName(Part):
    def forward(self, x):
        hidden = F.relu(getattr(self, "up")(x))  # noqa: B009
        return getattr(self, "other" if self.flag else "down")(hidden)


class Deeper(nn.Module):
    """The writer is a layer of a module that may call another one behind it."""

    flag = False

    def __init__(self):
        super().__init__()
        self.first, self.down = Inner(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        self.first.flag = self.flag
        return self.down(self.first(x))


class Inner(nn.Module):
    flag = False

    def __init__(self):
        super().__init__()
        self.up, self.more = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        hidden = F.relu(self.up(x))
        if self.flag:
            hidden = self.more(hidden)
        return hidden


NARROW = (Straight, OtherWriter)
WIDE = (OtherReader, LeavesEarly, ReadTwice, Returned, Kept, ByName, Deeper)


@pytest.fixture
def prefers_links(monkeypatch):
    """Takes narrow plans wherever there are couplings."""

    def last(plans, distances):
        narrow = [plan for plan in plans if "narrow" in plan.allocation]
        return (narrow or plans)[-1:]

    monkeypatch.setattr(choose, "_near", last)
    monkeypatch.setattr(few_data, "can_be_judged", lambda studied: False)


@pytest.mark.filterwarnings("ignore:data never reached")
@pytest.mark.parametrize("made", [*NARROW, *WIDE], ids=lambda one: one.__name__)
def test_a_path_that_no_data_took(made, prefers_links, tmp_path):
    torch.manual_seed(0)
    model = made().eval()
    data = [torch.randn(64, WIDTH) for _ in range(5)]
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    (writer,) = [one for one in small.modules() if isinstance(one, NarrowLinear) and one.side == "out"]
    assert writer.wide == (made in WIDE)
    assert writer(data[0]).shape[-1] == (HIDDEN if made in WIDE else writer.kept)
    pc.save_sketched(small, tmp_path)
    loaded, dense = pc.load_sketched(model, tmp_path), pc.densify(small)
    for flag in (False, True):
        for one in (small, loaded, dense, model):
            one.flag = flag
        found, wanted = (torch.cat([*one(data[0])], -1) for one in (small, model))
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, torch.cat([*dense(data[0])], -1), rtol=1e-4, atol=1e-4)
        assert torch.equal(found, torch.cat([*loaded(data[0])], -1))
    if made is Kept:
        assert small.seen[0].shape == model.seen[0].shape


class Heads(nn.Module):
    """Attention whose values the caller may give."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(16, 16) for _ in range(3))

    def mixed(self, q, v):
        q, v = (one.unflatten(-1, (4, 4)).transpose(1, 2) for one in (q, v))
        return F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(-2)


class Plain(Heads):
    def forward(self, x):
        return self.out(self.mixed(self.q(x), self.v(x)))


class Given(Heads):
    def forward(self, x, values=None):
        v = self.v(x) if values is None else values
        return self.out(self.mixed(self.q(x), v))


class Replaced(Heads):
    def forward(self, x, values=None):
        v = self.v(x)
        if values is not None:
            v = values
        return self.out(self.mixed(self.q(x), v))


class Cached(Heads):
    def forward(self, x, past_values=None):
        v = self.v(x) if past_values is None else past_values
        return self.out(self.mixed(self.q(x), v))


@pytest.mark.parametrize(
    ("made", "coupled"), [(Plain, True), (Given, False), (Replaced, False), (Cached, True)]
)
def test_heads_that_the_caller_may_give(made, coupled):
    """Their features are in another basis between coupled layers."""
    torch.manual_seed(0)
    coupling = Coupling(("v",), "out", 4, 1, 4, padded=True)
    assert goes_one_way(made(), coupling) is coupled


def test_what_cannot_be_read_may_lead_anywhere():
    made = {}
    exec("def forward(self, x): return self.down(self.up(x))", made)
    coupling = Coupling(("up",), "down", 1, 1, HIDDEN, padded=False)
    assert not goes_one_way(type("Typed", (Part,), made)(), coupling)
    assert goes_one_way(Straight(), coupling)
    assert not goes_one_way(OtherReader(), coupling)
    assert goes_one_way(torch.fx.symbolic_trace(OtherReader()), coupling)
