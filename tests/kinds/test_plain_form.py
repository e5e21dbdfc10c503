"""Layers that make their weight from parameters alone are sketched as the plain layers they stand for."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import panther_compile as pc
from panther_compile.kinds.plain_form import plain_form
from panther_compile.kinds.registry import find_kind


class PadsAsTensorFlow(nn.Conv2d):
    """As in EfficientNets: a forward of its own, which pads where the kernel is larger than one pixel."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.stride = list(self.stride)
        self.static_padding = nn.Identity() if self.kernel_size == (1, 1) else nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x):
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Standardized(nn.Conv2d):
    """As in the NFNets of timm: each filter is made of mean 0 and of a learnt size."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(0.5 + torch.rand(self.out_channels, 1, 1, 1))
        self.scale, self.eps = self.weight[0].numel() ** -0.5, 1e-6

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
            eps=self.eps,
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Unit(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, F.normalize(self.weight, dim=(1, 2)), self.bias, padding=self.padding)


class Equalized(nn.Linear):
    """As in StyleGAN: learning rates are made alike by constants."""

    def forward(self, x):
        return F.linear(x, self.weight * 0.3, bias=self.bias * 2)


class Scales(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, 2 * self.weight, self.bias)


class OtherStride(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, stride=2)


class Asks(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias) if x.sum() > 0 else x


class AsksTheWeight(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * x.mean(), self.bias)


class DropsWeights(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias)


class AddsNoiseInTraining(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 1.5 if self.training else self.weight * 1, self.bias)


class Writes(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.clamp_(-1, 1), self.bias)


class Relu(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias).relu()


class Observed(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.rounded = nn.Hardtanh()

    def forward(self, x):
        return F.linear(x, self.rounded(self.weight), self.bias)


class BoundsItself(nn.Linear):
    """As in EEGNet: rows are no longer than 1, and stay so."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


class Copies(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(self.weight / 2)
        return super().forward(x)


class Masked(nn.Linear):
    """As in MADE: features see only those before them."""

    def __init__(self, *sizes, trained=None):
        super().__init__(*sizes)
        mask = torch.ones_like(self.weight).tril()
        if trained is None:
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask, trained)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class MasksItself(Masked):
    def forward(self, x):
        self.weight.data *= self.mask
        return super(Masked, self).forward(x)


class HoldsTensor(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * torch.tensor(2.0), self.bias)


class Turned(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.transpose(0, 1))


class Outer(nn.Linear):
    """Stores less than its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.rows = nn.Parameter(torch.randn(self.out_features, 1))
        self.columns = nn.Parameter(torch.randn(1, self.in_features))
        del self.weight
        self.weight = None

    def forward(self, x):
        return F.linear(x, self.rows * self.columns, self.bias)


class Prepared(nn.Conv2d):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.before = nn.Identity()
        self.before.register_forward_hook(lambda module, given, result: result * 2)

    def forward(self, x):
        return F.conv2d(self.before(x), self.weight, self.bias)


class CannotRun(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.view(3, 3), self.bias)


class Plainly(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * 2, self.bias, self.stride, self.padding)


class Counts(Equalized):
    def count(self):
        return self.weight.numel()


class Halves(nn.Module):
    def forward(self, weight):
        return weight / 2


def old_style(function, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(module)


def trained_a_little(module):
    """With sizes and estimates of a spectral norm that are not those of the start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.3)
    return module


MADE = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Conv1d(24, 24, 3)), (2, 24, 9)),
    "weight norm, transposed": (
        lambda: parametrizations.weight_norm(nn.ConvTranspose1d(24, 24, 4, stride=2)),
        (2, 24, 9),
    ),
    "weight norm by a hook": (lambda: old_style(nn.utils.weight_norm, nn.Conv2d(24, 24, 3)), (2, 24, 9, 9)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(48, 40)), (3, 48)),
    "spectral norm by a hook": (lambda: old_style(nn.utils.spectral_norm, nn.Linear(48, 40)), (3, 48)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(48, 48)), (3, 48)),
    "standardized": (lambda: Standardized(24, 24, 3, padding=1), (2, 24, 9, 9)),
    "of unit length": (lambda: Unit(24, 24, 3, padding=1, bias=False), (2, 24, 9)),
    "equalized": (lambda: Equalized(48, 40), (3, 48)),
    "scaled": (lambda: Scales(24, 24, 1), (2, 24, 9, 9)),
    "padded": (lambda: PadsAsTensorFlow(24, 24, 1, stride=2, bias=False), (2, 24, 9, 9)),
    "standardized, weight norm": (
        lambda: parametrizations.weight_norm(Standardized(24, 24, 3, padding=1)),
        (2, 24, 9, 9),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_a_weight_that_is_made_of_parameters(name, training):
    torch.manual_seed(0)
    make, shape = MADE[name]
    layer = trained_a_little(make()).train(training)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    plain = plain_form(layer)
    assert type(plain).__module__.startswith("torch.nn.modules")
    assert plain is not layer
    assert find_kind(layer).why_not(layer) is None
    assert layer.training == training
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    x = torch.randn(shape)
    assert torch.allclose(plain(x), layer.eval()(x), atol=1e-6)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_is_sketched_saved_and_made_dense(name, data, tmp_path):
    torch.manual_seed(0)
    make, shape = MADE[name]
    model = nn.Sequential(nn.Identity(), trained_a_little(make()), nn.Tanh()).eval()
    kind, x = type(model[1]), torch.randn(40, *shape[1:])
    wanted = model(x)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = pc.sketchify(
        model, 0.9, data=[x] if data else None, min_params=0, allow_slower=True, progress=False
    )
    assert type(small[1]).__name__ == f"Sketched{type(plain_form(model[1])).__name__}"
    assert (small(x) - wanted).norm() < 0.7 * wanted.norm()
    assert type(model[1]) is kind
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    pc.save_sketched(small, tmp_path / "small")
    again = pc.load_sketched(nn.Sequential(nn.Identity(), make(), nn.Tanh()).eval(), tmp_path / "small")
    assert torch.equal(again(x), small(x))
    assert torch.allclose(pc.densify(small)(x), small(x), atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PadsAsTensorFlow(4, 6, 3),
        lambda: OtherStride(4, 6, 1),
        lambda: Asks(4, 6, 1),
        lambda: AsksTheWeight(8, 8),
        lambda: DropsWeights(8, 8),
        lambda: AddsNoiseInTraining(8, 8),
        lambda: Writes(8, 8),
        lambda: Relu(8, 8),
        lambda: Observed(8, 8),
        lambda: Counts(8, 8),
        lambda: BoundsItself(8, 8),
        lambda: Copies(8, 8),
        lambda: Masked(8, 8),
        lambda: Masked(8, 8, trained=False),
        lambda: Masked(8, 8, trained=True),
        lambda: MasksItself(8, 8),
        lambda: HoldsTensor(8, 8),
        lambda: Turned(4, 6, 3, bias=False),
        lambda: Prepared(4, 6, 1),
        lambda: CannotRun(8, 8),
        lambda: Scales(4, 6, 3, padding_mode="circular"),
        lambda: parametrize.register_parametrization(nn.Linear(8, 8), "weight", Halves()) or None,
        lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
    ],
)
def test_what_is_more_than_that_is_left_alone(make):
    torch.manual_seed(0)
    layer = make()
    weight = layer.weight.detach().clone()
    assert plain_form(layer) is layer
    assert find_kind(layer).why_not(layer) is not None
    assert torch.equal(layer.weight, weight)


def test_a_size_that_the_model_reads_itself_is_a_reason():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Standardized(16, 16, 3)

        def forward(self, x):
            return self.conv(x) * self.conv.gain.mean()

    plan = pc.plan_sketch(nn.Sequential(Model(), nn.Conv2d(16, 16, 3)), 0.5, min_params=0, allow_slower=True)
    reasons = {line.name: line.reason for line in plan.layers}
    assert "forward uses its gain directly" in reasons["0.conv"]
    assert [line.name for line in plan.sketched] == ["1"]


def test_reading_a_forward_writes_nothing_into_the_module():
    class Remembers(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self._calls = 0

        def forward(self, x):
            self._calls += 1
            return F.linear(x, self.weight * 2, self.bias)

    layer = Remembers(8, 8)
    assert find_kind(layer).why_not(layer) is None
    assert layer._calls == 0


def test_a_weight_of_more_numbers_than_make_it_is_left_alone():
    layer = Outer(8, 8)
    assert plain_form(layer) is layer


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": "valid"}, {}])
def test_a_geometry_in_other_words(options):
    layer = Plainly(16, 16, 3, **options).eval()
    if not options:
        layer.stride = 1
    small = pc.sketchify(
        nn.Sequential(layer), 0.9, min_params=0, allow_slower=True, progress=False, synthetic=False
    )
    x = torch.randn(2, 16, 8, 8)
    assert isinstance(small[0], pc.SketchedConv2d)
    assert small(x).shape == layer(x).shape


def test_buffers_and_lists_are_not_written_as_a_forward_is_read():
    class Writes(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("calls", torch.zeros(()))
            self._seen = []

        def forward(self, x):
            self.calls.add_(1)
            self._seen.append(1)
            return F.linear(x, self.weight * 2, self.bias)

    layer = Writes(8, 8)
    assert find_kind(layer).why_not(layer) is not None
    assert layer.calls == 0
    assert layer._seen == []


def test_a_weight_that_cannot_be_made_is_a_reason():
    layer = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley").half()
    assert plain_form(layer) is layer
    assert "parametrized" in find_kind(layer).why_not(layer)


def test_frozen_stays_frozen():
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    layer.parametrizations.requires_grad_(False)
    plain = plain_form(layer)
    assert not plain.weight.requires_grad
    assert plain.bias.requires_grad


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bias_that_another_layer_has_too(inplace):
    torch.manual_seed(0)
    model = nn.Sequential(Equalized(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)).eval()
    model[1].bias = model[0].bias
    bias = model[1].bias.detach().clone()
    reasons = {
        line.name: line.reason for line in pc.plan_sketch(model, 0.5, min_params=0, allow_slower=True).layers
    }
    assert "is of one that 1 has too" in reasons["0"]
    small = pc.sketchify(
        model, 0.5, min_params=0, allow_slower=True, progress=False, synthetic=False, inplace=inplace
    )
    assert torch.equal(small[0].bias, bias)


def test_a_bias_made_of_another_type_is_not_written_back():
    class Widened(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.float(), self.bias.float())

    model = nn.Sequential(Widened(48, 48)).half().eval()
    small = pc.sketchify(
        model, 0.5, min_params=0, allow_slower=True, progress=False, synthetic=False, inplace=True
    )
    assert isinstance(small[0], pc.SketchedLinear)
    assert small(torch.randn(2, 48)).dtype == torch.float32


def test_other_hooks_beside_weight_norm_are_a_reason():
    layer = old_style(nn.utils.weight_norm, nn.Linear(8, 8))
    layer.register_forward_hook(lambda *given: None)
    assert "hooks" in find_kind(layer).why_not(layer)
    layer = old_style(nn.utils.weight_norm, nn.Linear(8, 8))
    layer.register_forward_pre_hook(lambda *given: None)
    assert "hooks" in find_kind(layer).why_not(layer)


def test_a_buffer_that_the_forward_does_not_read_is_a_reason():
    layer = Equalized(8, 8)
    layer.register_buffer("seen", torch.zeros(1))
    assert "overrides" in find_kind(layer).why_not(layer)


def test_a_plain_layer_is_its_own_form():
    for layer in (nn.Linear(8, 8), nn.Conv2d(4, 4, 3), nn.LazyLinear(8), nn.Embedding(8, 4), nn.LSTM(4, 4)):
        assert plain_form(layer) is layer


def test_no_weight_is_read_from_the_meta_device():
    with torch.device("meta"):
        for layer in (Standardized(24, 24, 3), parametrizations.weight_norm(nn.Conv1d(24, 24, 3))):
            plain = plain_form(layer)
            assert plain is not layer
            assert plain.weight.is_meta


def test_a_weight_tied_to_one_that_is_used_as_it_is_stays_dense():
    model = nn.Sequential(nn.Linear(48, 48), Equalized(48, 48), nn.Linear(48, 48))
    model[1].weight = model[0].weight
    plan = pc.plan_sketch(model, 0.5, min_params=0, allow_slower=True)
    reasons = {line.name: line.reason for line in plan.layers}
    assert "shared with" in reasons["0"]
    assert "shared with" in reasons["1"]
    assert [line.name for line in plan.sketched] == ["2"]


def test_a_forward_that_is_the_convolution_itself_is_sketched():
    torch.manual_seed(0)
    model = nn.Sequential(PadsAsTensorFlow(64, 64, 1, stride=2)).eval()
    with torch.no_grad():
        model[0].weight.copy_((torch.randn(64, 8) @ torch.randn(8, 64))[..., None, None])
    small = pc.sketchify(model, ratio=0.5, min_params=0, allow_slower=True, progress=False)
    x = torch.randn(2, 64, 9, 9)
    assert type(small[0]) is pc.SketchedConv2d
    assert torch.allclose(small(x), model(x), atol=1e-3)
