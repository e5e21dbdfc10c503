"""A module that is more than the plain layer it looks like is named, with the reason."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from panther_compile.kinds.match import why_not_plain

TENSORS = frozenset({"weight", "bias"})


def why_not(module, **options):
    return why_not_plain(module, nn.Linear, tensors=TENSORS, sizes=(1, 1), **options)


def old_style(function, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(module)


class Plain(nn.Linear):
    """A subclass that computes what its base does."""

    def extra_repr(self):
        return f"plain, {self._note()}"

    def _note(self):
        return "no more"


class Extended(nn.Linear):
    def extra(self):
        return 1


class WithStaticMethod(nn.Linear):
    """As torchvision's convolutions of videos, which say of their class what stride it takes."""

    @staticmethod
    def wanted_stride(stride):
        return stride


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class WithBuffer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(1))


class WithParameter(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lora = nn.Parameter(torch.zeros(2))


class WithChild(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Linear(2, 2)


class Wrapped(Tensor):
    """Stands for quantized and sharded tensors."""


class Identity(nn.Module):
    def forward(self, weight):
        return weight


def linear():
    return nn.Linear(8, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_layer_is_plain(dtype, bias):
    assert why_not(nn.Linear(8, 8, bias=bias, dtype=dtype)) is None


def test_frozen_meta_and_eval_layers_are_plain():
    assert why_not(linear().requires_grad_(False).eval()) is None
    assert why_not(nn.Linear(8, 8, device="meta")) is None


def test_a_static_method_is_of_the_class():
    assert why_not(WithStaticMethod(8, 8)) is None


def test_subclasses():
    assert why_not(Plain(8, 8)) is None
    assert why_not(Extended(8, 8)) == "carries more than Linear does: extra"
    assert why_not(nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)) is None
    assert why_not(Scaled(8, 8)) == "Scaled overrides Linear.forward"
    assert why_not(WithBuffer(8, 8)) == "holds more than Linear does: scale"
    assert why_not(WithParameter(8, 8)) == "holds more than Linear does: lora"
    assert why_not(WithChild(8, 8)) == "holds more than Linear does: adapter"
    assert why_not(WithChild(8, 8), children=frozenset({"adapter"})) is None


def test_forward_replaced_on_the_instance():
    module = linear()
    module.forward = lambda x: x
    assert why_not(module) == "its forward was replaced on the instance"
    module._hf_hook = object()  # what accelerate leaves there
    assert why_not(module).startswith("accelerate (device_map=) hooks it; accelerate.hooks.remove_hook")


def test_attributes_set_on_the_instance():
    module = linear()
    module._is_hf_initialized = True  # private names are nobody's interface
    assert why_not(module) is None
    module.scale = 3.0
    assert why_not(module) == "carries more than Linear does: scale"


@pytest.mark.parametrize(
    ("base", "sizes"),
    [(nn.Linear, (8, 8)), (nn.Conv2d, (4, 4, 3)), (nn.Embedding, (8, 4)), (nn.MultiheadAttention, (8, 2))],
)
def test_attributes_of_the_constructor_are_not_additions(base, sizes):
    before = torch.get_rng_state()
    tensors = frozenset({"weight", "bias", "in_proj_weight", "in_proj_bias"})
    module = base(*sizes, device="meta")
    assert why_not_plain(module, base, tensors=tensors, children=frozenset({"out_proj"})) is None
    assert torch.equal(before, torch.get_rng_state())


def test_other_methods_count_if_asked_for():
    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return x

    found = why_not_plain(Conv(2, 2, 3), nn.Conv2d, tensors=TENSORS, methods=("forward", "_conv_forward"))
    assert found == "Conv overrides Conv2d._conv_forward"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: parametrize.register_parametrization(m, "weight", Identity()),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
)
def test_parametrized(wrap):
    module = linear()
    wrap(module)
    assert why_not(module).startswith("parametrized")
    parametrize.remove_parametrizations(module, "weight")
    assert why_not(module) is None


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_weight_norm_and_spectral_norm(wrap):
    assert "hooks" in why_not(old_style(wrap, linear()))


def test_old_weight_norm_without_its_hook_is_still_not_plain():
    module = old_style(nn.utils.weight_norm, linear())
    module._forward_pre_hooks.clear()
    assert "holds more than Linear does: weight_g, weight_v" in why_not(module)


def test_removed_old_weight_norm_is_plain():
    module = old_style(nn.utils.remove_weight_norm, old_style(nn.utils.weight_norm, linear()))
    assert why_not(module) is None


def test_pruned():
    module = prune.l1_unstructured(linear(), "weight", amount=0.5)
    assert "pruning" in why_not(module)
    prune.remove(module, "weight")
    assert why_not(module) is None


def test_lazy():
    module = nn.LazyLinear(8)
    assert why_not(module) == "lazy: run one batch through the model first"
    module(torch.zeros(2, 8))
    assert why_not(module) is None


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks(register):
    module = linear()
    handle = getattr(module, register)(lambda *args: None)
    assert "has hooks" in why_not(module)
    handle.remove()
    assert why_not(module) is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights(register):
    module = linear()
    handle = getattr(module.weight, register)(lambda *args: None)
    assert "its weight has hooks, which expect the dense layer's gradient" in why_not(module)
    handle.remove()
    assert why_not(module) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_other_dtypes(dtype):
    module = linear()
    module.weight = nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)
    assert why_not(module) == f"its weight is {dtype}, wanted float64, float32, bfloat16 or float16"


def test_tensor_subclasses():
    module = linear()
    module.weight = nn.Parameter(torch.zeros(8, 8).as_subclass(Wrapped), requires_grad=False)
    assert why_not(module) == "its weight is a Wrapped, not a plain tensor (quantized or sharded)"


@pytest.mark.filterwarnings("ignore")
def test_dynamically_quantized_modules():
    if not torch.backends.quantized.supported_engines:
        pytest.skip("no quantized engine")
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear()), {nn.Linear})[0]
    assert not isinstance(module, nn.Linear)


def test_weight_that_is_neither_parameter_nor_buffer():
    module = linear()
    weight = module.weight.detach()
    del module.weight
    module.weight = weight
    assert why_not(module) == "its weight is neither a parameter nor a buffer"
    del module.weight
    module.register_buffer("weight", weight)
    assert why_not(module) is None
