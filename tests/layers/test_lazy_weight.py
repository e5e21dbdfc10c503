"""Metadata without the product, values with it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from panther_compile.errors import FactoredWeightError
from panther_compile.layers.lazy_weight import LazyWeight, lazy_weight
from panther_compile.layers.linear import SketchedLinear


class Counted:
    """A product of two factors that counts how often it is asked for."""

    def __init__(self, dtype=torch.float64):
        self.left = torch.randn(4, 2, dtype=dtype, requires_grad=True)
        self.right = torch.randn(2, 3, dtype=dtype, requires_grad=True)
        self.calls = 0
        self.weight = lazy_weight((4, 3), self.left, self)

    def __call__(self):
        self.calls += 1
        return self.left @ self.right


METADATA = {
    "dtype": lambda w: w.dtype,
    "device": lambda w: w.device,
    "shape": lambda w: w.shape,
    "ndim": lambda w: w.ndim,
    "layout": lambda w: w.layout,
    "requires_grad": lambda w: w.requires_grad,
    "is_cuda": lambda w: w.is_cuda,
    "is_cpu": lambda w: w.is_cpu,
    "is_meta": lambda w: w.is_meta,
    "size": lambda w: w.size(),
    "size(0)": lambda w: w.size(0),
    "size(dim=-1)": lambda w: w.size(dim=-1),
    "dim": lambda w: w.dim(),
    "numel": lambda w: w.numel(),
    "nelement": lambda w: w.nelement(),
    "element_size": lambda w: w.element_size(),
    "is_floating_point": lambda w: w.is_floating_point(),
    "is_complex": lambda w: w.is_complex(),
    "torch.is_floating_point": torch.is_floating_point,
    "torch.numel": torch.numel,
    "isinstance": lambda w: isinstance(w, torch.Tensor),
    "torch.is_tensor": torch.is_tensor,
}

VALUES = {
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "matmul": lambda w: torch.eye(4, dtype=w.dtype) @ w,
    "linear": lambda w: nn.functional.linear(torch.ones(5, 3, dtype=w.dtype), w),
    "transpose": lambda w: w.t(),
    "T": lambda w: w.T,
    "index": lambda w: w[1:, 0],
    "sum": lambda w: w.sum(),
    "cast": lambda w: w.to(torch.float32),
    "half": lambda w: w.half(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.contiguous(),
    "view": lambda w: w.view(-1),
    "cat": lambda w: torch.cat([w, w]),
    "stack in kwargs": lambda w: torch.stack(tensors=[w, w]),
    "norm": lambda w: torch.linalg.norm(w),
    "svd": lambda w: torch.linalg.svdvals(w),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "tolist": lambda w: torch.tensor(w.tolist(), dtype=w.dtype),
    "einsum": lambda w: torch.einsum("ij->j", w),
    "isfinite": lambda w: torch.isfinite(w).all(),
}


@pytest.mark.parametrize("name", list(METADATA))
def test_metadata_is_right_and_multiplies_nothing_out(name):
    counted = Counted()
    found = METADATA[name](counted.weight)
    assert counted.calls == 0
    assert found == METADATA[name](counted.left @ counted.right)


@pytest.mark.parametrize("trainable", [True, False])
def test_requires_grad_is_that_of_the_factors(trainable):
    counted = Counted()
    counted.left.requires_grad_(trainable)
    assert lazy_weight((4, 3), counted.left, counted).requires_grad is trainable


@pytest.mark.parametrize("name", list(VALUES))
def test_values_are_those_of_the_product(name):
    counted = Counted()
    found = VALUES[name](counted.weight)
    assert counted.calls >= 1
    views = {"transpose", "T", "index", "detach", "data", "contiguous", "view"}
    assert type(found) is (LazyWeight if name in views else torch.Tensor)
    assert torch.equal(found, VALUES[name](counted.left @ counted.right))


def set_data(weight):
    weight.data = torch.zeros(4, 3, dtype=torch.float64)


def set_grad(weight):
    weight.grad = torch.zeros(4, 3, dtype=torch.float64)


def freeze(weight):
    weight.requires_grad = False


def set_row(weight):
    weight[0] = 1.0


def add_in_place(weight):
    weight.data += 1.0


WRITES = {
    "data +=": add_in_place,
    "data =": set_data,
    "grad =": set_grad,
    "requires_grad =": freeze,
    "requires_grad_": lambda w: w.requires_grad_(False),
    "row =": set_row,
    "copy_": lambda w: w.data.copy_(torch.zeros(4, 3)),
    "row of data": lambda w: w.data[0].add_(1.0),
    "zeros_": nn.init.zeros_,
    "constant_": lambda w: nn.init.constant_(w, 2.0),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "view": lambda w: w.detach().view(-1).mul_(2.0),
    "transposed": lambda w: w.detach().t().fill_(2.0),
    "out": lambda w: torch.add(torch.ones(4, 3, dtype=w.dtype), 1.0, out=w.data),
    "foreach": lambda w: torch._foreach_add_([w.data], 1.0),
    "set_": lambda w: w.data.set_(torch.zeros(3, dtype=w.dtype)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_raises(write, mode):
    counted = Counted()
    with mode(), pytest.raises(FactoredWeightError, match="to the weight of a sketched layer"):
        WRITES[write](counted.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_writes_to_others_may_read_it(mode):
    counted = Counted()
    with mode():
        found = torch.zeros(4, 3, dtype=torch.float64).copy_(counted.weight).add_(counted.weight.detach())
        assert torch.equal(found, 2 * (counted.left @ counted.right))
    assert counted.weight.requires_grad_(True).requires_grad


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("value", [torch.zeros(12, 16), nn.Parameter(torch.zeros(12, 16))])
def test_a_weight_cannot_be_set(name, value):
    layer = SketchedLinear.from_dense(nn.Linear(16, 12), rank=3)
    with pytest.raises(FactoredWeightError, match=f"SketchedLinear.{name} cannot be set"):
        setattr(layer, name, value)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_cannot_be_pruned(name):
    """Torch raised in its own words, and left the bias twice in the layer."""
    layer = SketchedLinear(8, 8, 3)
    before = list(layer.state_dict())
    with pytest.raises(FactoredWeightError, match=f"SketchedLinear.{name} cannot be pruned: .* Their param"):
        prune.l1_unstructured(layer, name, 0.5)
    assert list(layer.state_dict()) == before
    prune.l1_unstructured(layer.down, "weight", 0.5)
    assert float((layer.down.weight == 0).float().mean()) == 0.5


def test_values_are_always_the_present_ones():
    counted = Counted()
    before = counted.weight.sum()
    with torch.no_grad():
        counted.left.mul_(2)
    torch.testing.assert_close(counted.weight.sum(), 2 * before)


def test_gradients_reach_the_factors():
    counted = Counted()
    counted.weight.square().sum().backward()
    left, right = (t.detach().clone().requires_grad_() for t in (counted.left, counted.right))
    (left @ right).square().sum().backward()
    assert torch.equal(counted.left.grad, left.grad)
    assert torch.equal(counted.right.grad, right.grad)


def test_repr_shows_the_values():
    counted = Counted()
    assert repr(counted.weight) == repr(counted.left @ counted.right)


def test_no_grad_is_honoured():
    counted = Counted()
    with torch.no_grad():
        assert not (counted.weight + 1).requires_grad


def test_factories_take_its_dtype_and_shape():
    weight = Counted(torch.bfloat16).weight
    for made in (torch.zeros_like(weight), torch.empty_like(weight), weight.new_zeros(4, 3)):
        assert type(made) is torch.Tensor
        assert (made.dtype, made.shape) == (torch.bfloat16, (4, 3))


class FeedForward(nn.Module):
    """As T5 writes it: the activations are cast to the dtype of the next weight."""

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(16, 24, bias=False)
        self.wo = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        x = torch.relu(self.wi(x))
        same = x.dtype == self.wo.weight.dtype
        if isinstance(self.wo.weight, torch.Tensor) and not same and self.wo.weight.dtype != torch.int8:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x.to(self.wo.weight.device))


@pytest.fixture
def products(monkeypatch):
    """How often a SketchedLinear multiplied its weight out."""
    counted = []
    original = SketchedLinear._dense_weight
    monkeypatch.setattr(SketchedLinear, "_dense_weight", lambda self: counted.append(1) or original(self))
    return counted


def t5_like():
    model = FeedForward()
    model.wo = SketchedLinear.from_dense(model.wo, rank=5)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_pattern_multiplies_nothing_out(products, dtype):
    model = t5_like()
    model.wo.to(dtype)
    y = model(torch.randn(3, 16))
    assert y.dtype == dtype
    assert products == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_t5_pattern_compiles_into_one_graph(backend):
    torch._dynamo.reset()
    model, x = t5_like(), torch.randn(3, 16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))


def test_weight_used_in_a_compiled_forward():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = SketchedLinear.from_dense(nn.Linear(8, 8), rank=3)

        def forward(self, x):
            return nn.functional.linear(self.fc(x), self.fc.weight)

    torch._dynamo.reset()
    model, x = Tied(), torch.randn(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


def test_is_read_anew_from_a_copy_of_the_layer():
    layer = SketchedLinear.from_dense(nn.Linear(8, 8), rank=3)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.up.weight.zero_()
    assert isinstance(twin.weight, LazyWeight)
    assert not twin.weight.any()
    assert layer.weight.any()


def test_reached_through_dispatch_alone():
    """What C++ callers see: no __torch_function__."""
    counted = Counted()
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.ops.aten.mul.Tensor(counted.weight, 2)
    assert torch.equal(found.detach(), (2 * (counted.left @ counted.right)).detach())


def test_gradients_reach_through_a_lazy_weight_that_another_is_made_of():
    inner = Counted()
    outer = lazy_weight((3, 4), inner.weight, lambda: (inner.weight + 0).T)
    outer[torch.tensor([0, 2])].square().sum().backward()
    assert inner.left.grad is not None
    found = torch.autograd.grad((outer * 2).sum(), inner.right)[0]
    wanted = torch.autograd.grad((2 * inner()).sum(), inner.right)[0]
    assert torch.equal(found, wanted)
