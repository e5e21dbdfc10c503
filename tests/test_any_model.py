"""`sketchify` on models built in every odd way: it works, or leaves a layer alone and says why."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize, prune
from zoo import ZOO, call, generate, tensors

import panther_compile as pc

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def sketch(model, ratio=0.5, **options):
    return pc.sketchify(model, ratio, **OPTIONS, **options)


def reasons(model, **options):
    plan = pc.plan_sketch(model, 0.5, **OPTIONS, **options)
    return {line.name: line.reason for line in plan.layers if line.choice is None}


def mlp(width=48, depth=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def low_rank_(module, rank=3):
    """Make every weight of rank 3, so that a sketch of it is as good as exact."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                flat = parameter.flatten(1)
                left, right = torch.randn(len(flat), rank), torch.randn(rank, flat.shape[1])
                flat.copy_((left @ right) / (rank * flat.shape[1]) ** 0.5)
    return module


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


# ------------------------------------------------------------------------------- shared and tied


def test_shared_module_stays_shared():
    model = nn.Module()
    model.a = nn.Linear(48, 48)
    model.b = model.a
    model.list = nn.ModuleList([model.a, nn.Linear(48, 48)])
    small = sketch(model)
    assert isinstance(small.a, pc.SketchedLinear)
    assert small.a is small.b is small.list[0]
    assert len(list(small.parameters())) == 6


def tied_linears():
    model = nn.ModuleDict(
        {"a": nn.Linear(48, 48), "b": nn.Linear(48, 48), "c": nn.Linear(48, 48, bias=False)}
    )
    model["b"].weight = model["c"].weight = model["a"].weight
    return model


def assert_tied_linears(model):
    assert model["a"].up.weight is model["b"].up.weight
    assert model["a"].up.weight is model["c"].up.weight
    assert model["a"].down.weight is model["b"].down.weight
    assert model["a"].bias is not model["b"].bias
    assert model["c"].bias is None
    assert not torch.equal(model["a"].bias, model["b"].bias)


def test_tied_linears_share_factors_and_keep_their_biases(tmp_path):
    model = tied_linears()
    x = torch.randn(2, 48)
    small = sketch(model)
    assert_tied_linears(small)
    assert_close(small["b"](x) - small["a"](x), (model["b"].bias - model["a"].bias).expand(2, -1))
    assert_tied_linears(copy.deepcopy(small))
    pc.save_sketched(small, tmp_path)
    assert_tied_linears(pc.load_sketched(tied_linears(), tmp_path))
    plain = pc.densify(small)
    assert plain["a"].weight is plain["b"].weight is plain["c"].weight
    assert_close(plain["b"](x), small["b"](x))


def test_tie_with_a_layer_that_stays_dense_keeps_both_dense():
    model = tied_linears()
    model["c"].register_forward_hook(lambda *_: None)
    model["d"] = nn.Linear(48, 48)
    found = reasons(model)
    assert found["a"].startswith("its weight is tied to c, which stays dense (has hooks")
    assert set(found) == {"a", "b", "c"}
    small = sketch(model)
    assert small["a"].weight is small["c"].weight


class LanguageModel(nn.Module):
    def __init__(self, head_first=False, bias=True):
        super().__init__()
        if head_first:
            self.head = nn.Linear(48, 96, bias=bias)
        self.embed = nn.Embedding(96, 48)
        self.body = nn.Linear(48, 48)
        if not head_first:
            self.head = nn.Linear(48, 96, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def test_convolutions_that_share_a_kernel_stay_dense():
    model = nn.ModuleDict({"a": nn.Conv2d(16, 16, 3), "b": nn.Conv2d(16, 16, 3), "c": nn.Conv2d(16, 16, 3)})
    model["b"].weight = model["a"].weight
    found = reasons(model)
    assert found["a"] == "its weight is shared with b; convolutions that share a kernel stay dense"
    assert found["b"] == "its weight is shared with a; convolutions that share a kernel stay dense"
    assert isinstance(sketch(model)["c"], pc.SketchedConv2d)


@pytest.mark.parametrize("head_first", [False, True])
def test_head_tied_to_the_embedding_is_left_alone(head_first):
    model = LanguageModel(head_first)
    found = reasons(model)
    assert found["embed"] == "embedding: left alone unless included"
    assert "head" in found
    small = sketch(model)
    assert small.head.weight is small.embed.weight
    assert torch.equal(small.head.weight, model.head.weight)
    for one in ("head", "embed"):
        assert one in reasons(model, include=[one, "body"])


def assert_tied_language_model(model):
    assert isinstance(model.embed, pc.SketchedEmbedding)
    assert isinstance(model.head, pc.SketchedLinear)
    assert model.embed.codes.weight is model.head.up.weight
    assert model.embed.basis.weight is model.head.down.weight


@pytest.mark.parametrize("head_first", [False, True])
def test_head_and_embedding_included_share_factors(head_first, tmp_path):
    model = low_rank_(LanguageModel(head_first))
    ids = torch.arange(12).view(3, 4)
    small = sketch(model, include="*")
    assert_tied_language_model(small)
    assert_close(small(ids), model(ids))
    report = pc.sketch_report(small)
    assert report.stored_numbers == sum(t.numel() for t in (*small.parameters(), *small.buffers()))
    assert report.dense_numbers == sum(t.numel() for t in model.parameters())
    assert report.achieved_ratio <= 0.5
    assert report.skipped == ()
    assert_tied_language_model(copy.deepcopy(small))
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(LanguageModel(head_first), tmp_path)
    assert_tied_language_model(loaded)
    assert torch.equal(loaded(ids), small(ids))
    plain = pc.densify(small)
    assert plain.head.weight is plain.embed.weight
    assert_close(plain(ids), small(ids))


def test_tied_model_trains_on_its_one_pair():
    model = LanguageModel()
    small = sketch(model, include="*")
    small(torch.arange(4)).sum().backward()
    assert small.head.up.weight.grad is small.embed.codes.weight.grad
    assert len(list(small.parameters())) == 2 + 1 + 3


@pytest.mark.parametrize("inplace", [False, True])
def test_tied_biases_stay_tied(inplace):
    model = nn.ModuleDict({name: nn.Linear(48, 48) for name in "abcd"})
    model["norm"] = nn.LayerNorm(48)
    model["b"].bias = model["norm"].bias = model["d"].bias = model["a"].bias
    small = sketch(model, inplace=inplace, exclude="d")
    assert isinstance(small["a"], pc.SketchedLinear)
    assert small["a"].bias is small["b"].bias is small["norm"].bias is small["d"].bias
    assert small["c"].bias is not small["a"].bias
    plain = pc.densify(small)
    assert plain["a"].bias is plain["b"].bias is plain["norm"].bias


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.other = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return F.linear(self.other(self.read(x)), self.read.weight.t())


def test_weight_that_forward_uses_itself_stays_dense():
    found = reasons(ReadsWeight())
    assert found["read"].startswith("forward uses its weight directly; torch.export.export(model, args)")
    small = sketch(ReadsWeight())
    assert type(small.read) is nn.Linear
    assert isinstance(small.other, pc.SketchedLinear)


class ComputedBias(nn.Module):
    """As BEiT: a functional layer with a bias that is put together from two."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(48, 96, bias=False), nn.Linear(96, 96)
        self.first, self.last = nn.Parameter(torch.randn(48)), nn.Parameter(torch.randn(48))

    def forward(self, x):
        return self.proj(F.linear(x, self.qkv.weight, torch.cat((self.first, self.last))))


@pytest.mark.parametrize("exported", [False, True])
def test_the_graph_that_the_reason_names_is_sketched(exported):
    model, x = low_rank_(ComputedBias()), torch.randn(3, 48)
    assert reasons(model)["qkv"] == (
        "forward uses its weight directly: sketch torch.fx.symbolic_trace(model) instead"
    )
    small = sketch(torch.export.export(model, (x,)) if exported else fx.symbolic_trace(model))
    assert isinstance(small.qkv, pc.SketchedLinear)
    assert_close(small(x), model(x))


class AsksForDtype(nn.Module):
    """As open_clip: looks at a weight for its type alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(48, 96), nn.Linear(96, 96)

    def forward(self, x):
        return self.last(self.first(x.to(self.first.weight.dtype)))


def test_weight_that_is_asked_for_its_dtype_alone_is_sketched():
    model, x = low_rank_(AsksForDtype()), torch.randn(3, 48)
    small = sketch(model)
    assert isinstance(small.first, pc.SketchedLinear)
    assert_close(small(x), model(x))


def test_weight_that_an_untraceable_forward_uses_is_multiplied_out():
    class Untraceable(ReadsWeight):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = low_rank_(Untraceable())
    small = sketch(model)
    assert isinstance(small.read, pc.SketchedLinear)
    x = torch.randn(3, 48)
    assert_close(small(x), model(x))


def test_parameter_that_another_module_holds_stays_dense():
    model = mlp(48, 3)
    model.register_module("mirror", nn.ParameterList([model[0].weight]))
    assert reasons(model)["0"] == "its weight is shared with mirror, which stays dense"
    small = sketch(model)
    assert small.mirror[0] is small[0].weight


def test_parameter_that_the_model_holds_too_stays_dense():
    model = mlp(48, 3)
    model.register_parameter("copy", model[1].weight)
    assert "the model itself" in reasons(model)["1"]


# ---------------------------------------------------------------------------- odd linear layers


class PlainSubclass(nn.Linear):
    """Nothing new."""


class Overriding(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class LoraLinear(nn.Linear):
    """As loralib has it: a Linear with more parameters."""

    def __init__(self, width, rank=4):
        super().__init__(width, width)
        self.lora_A = nn.Parameter(torch.randn(rank, width))
        self.lora_B = nn.Parameter(torch.randn(width, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class LoraWrapper(nn.Module):
    """As peft has it: a module around the Linear, which others take for one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(48, 4, bias=False), nn.Linear(4, 48, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def in_features(self):
        return self.base_layer.in_features

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def replaced_forward(module):
    module.forward = lambda x: x
    return module


ODD_LAYERS = {
    "overriding": (lambda: Overriding(48, 48), "Overriding overrides Linear.forward"),
    "lora": (lambda: LoraLinear(48), "LoraLinear overrides Linear.forward"),
    "instance": (lambda: replaced_forward(nn.Linear(48, 48)), "its forward was replaced on the instance"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(48, 48)), "parametrized"),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Linear(48, 48)), "parametrized"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(48, 48)), "parametrized"),
    "old spectral": (lambda: nn.utils.spectral_norm(nn.Linear(48, 48)), "has hooks"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5), "has hooks"),
    "complex": (lambda: nn.Linear(48, 48, dtype=torch.complex64), "its weight is torch.complex64, wanted"),
    "qat": (
        lambda: torch.ao.nn.qat.Linear(48, 48, qconfig=torch.ao.quantization.get_default_qat_qconfig()),
        "overrides Linear.forward",
    ),
    "hook": (lambda: hooked(nn.Linear(48, 48)), "has hooks"),
    "lazy": (lambda: nn.LazyLinear(48), "lazy: run one batch"),
    "empty in": (lambda: nn.Linear(0, 48), "empty: its weight holds no numbers"),
    "empty out": (lambda: nn.Linear(48, 0), "empty: its weight holds no numbers"),
    "one in": (lambda: nn.Linear(1, 48), "its weight has a single row or column"),
    "one out": (lambda: nn.Linear(48, 1), "its weight has a single row or column"),
    "one": (lambda: nn.Linear(1, 1), "its weight has a single row or column"),
    "two in": (lambda: nn.Linear(2, 48), "rank 1 would store"),
}


def hooked(module):
    module.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_odd_layer_is_left_alone_with_a_reason(kind):
    build, reason = ODD_LAYERS[kind]
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(48, 48), "last": nn.Linear(48, 48)})
    assert reason in reasons(model)["odd"]
    small = sketch(model)
    assert type(small["odd"]) is type(model["odd"])
    assert isinstance(small["plain"], pc.SketchedLinear)
    with pytest.raises(pc.PantherError, match=r"nothing to sketch"):
        sketch(build())


def test_layer_after_pruning_or_weight_norm_is_made_permanent_is_sketched():
    pruned = prune.remove(prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5), "weight")
    normed = parametrizations.weight_norm(nn.Linear(48, 48))
    parametrize.remove_parametrizations(normed, "weight")
    small = sketch(nn.ModuleList([pruned, normed]))
    assert all(isinstance(layer, pc.SketchedLinear) for layer in small)


COMPUTED_WEIGHTS = {
    "old weight_norm": lambda: old_weight_norm(nn.Linear(48, 48)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5),
    "cached activation": lambda: nn.Sequential(),
}


def with_computed_weight(kind):
    model = nn.ModuleList([COMPUTED_WEIGHTS[kind](), nn.Linear(48, 48)])
    model[0].last = model[1](torch.randn(2, 48))
    return model


@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_model_that_holds_computed_tensors_in_place(kind):
    model = with_computed_weight(kind)
    x = torch.randn(2, 48)
    wanted = model[0](x)
    small = sketch(model, inplace=True)
    assert isinstance(small[1], pc.SketchedLinear)
    assert torch.equal(small[0](x), wanted)


@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_model_that_holds_computed_tensors(kind):
    model = with_computed_weight(kind)
    x = torch.randn(2, 48)
    small = sketch(model)
    assert isinstance(small[1], pc.SketchedLinear)
    assert torch.equal(small[0](x), model[0](x))


def test_layer_with_a_subclass_that_adds_nothing_is_sketched():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = PlainSubclass(48, 48), nn.Linear(48, 48)

        def forward(self, x):
            return self.b(self.a(x))

    small = sketch(Net())
    assert isinstance(small.a, pc.SketchedLinear)


def test_lora_wrapper_keeps_working_around_a_sketched_base():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = LoraWrapper(nn.Linear(48, 48))

        def forward(self, x):
            return self.fc(x)

    model = low_rank_(Net())
    small = sketch(model, include="*.base_layer")
    assert isinstance(small.fc.base_layer, pc.SketchedLinear)
    assert torch.equal(small.fc.lora_A.weight, model.fc.lora_A.weight)
    assert small.fc.in_features == 48
    assert small.fc.weight.shape == (48, 48)
    x = torch.randn(3, 48)
    assert_close(small(x), model(x))


def test_lora_can_be_added_to_the_factors():
    small = sketch(mlp())
    small[0].up = LoraWrapperAny(small[0].up)
    assert small(torch.randn(2, 48)).shape == (2, 48)


class LoraWrapperAny(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamically_quantized_layers_are_no_targets():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantized engine")
    model = nn.ModuleDict({"q": mlp(), "plain": mlp()})
    model["q"] = torch.ao.quantization.quantize_dynamic(model["q"], {nn.Linear})
    small = sketch(model)
    assert isinstance(small["plain"][0], pc.SketchedLinear)
    x = torch.randn(2, 48)
    assert torch.equal(small["q"](x), model["q"](x))
    with pytest.raises(pc.PantherError, match="nothing to sketch"):
        sketch(model["q"])


class Int8Weight(torch.Tensor):
    """A weight-only quantized tensor, as torchao has it."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    def __deepcopy__(self, memo):
        return type(self)(self.detach().as_subclass(torch.Tensor).clone())


def test_weight_of_a_tensor_subclass_stays_dense():
    model = mlp(48, 3)
    model[0].weight = nn.Parameter(Int8Weight(torch.randn(48, 48)), requires_grad=False)
    model[1].weight = nn.Parameter(torch.ones(48, 48, dtype=torch.int8), requires_grad=False)
    found = reasons(model)
    assert "its weight is a Int8Weight, not a plain tensor" in found["0"]
    assert "its weight is torch.int8" in found["1"]
    assert isinstance(sketch(model)[2], pc.SketchedLinear)


def test_lazy_layer_is_sketched_once_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyLinear(48), nn.ReLU(), nn.LazyConv2d(4, 3), nn.Linear(48, 48))[:2]
    model(torch.randn(2, 40))
    assert isinstance(sketch(model)[0], pc.SketchedLinear)


def test_lazy_model_still_materializes_after_sketching():
    model = nn.Sequential(nn.LazyLinear(48), nn.Linear(48, 48), nn.Linear(48, 48))
    small = sketch(model)
    assert small(torch.randn(2, 7)).shape == (2, 48)
    assert small[0].in_features == 7
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)


# ------------------------------------------------------------------------------ odd containers


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.extra = 3

    def forward(self, x):
        return self.body(x) * self.extra


class Closures(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.activation = lambda x: x.clamp(min=0)
        self.table = {"relu": F.relu, "body": self.body}
        self.method = self.run

    def run(self, x):
        return self.table["body"](x)

    def forward(self, x):
        return self.activation(self.method(x))


class Delegating(nn.Module):
    """Answers to any name, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.inner, name, lambda *args: f"no {name}")

    def forward(self, x):
        return self.inner(x)


class Frozen(nn.Module):
    """Takes no new attributes after construction."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        object.__setattr__(self, "_sealed", True)

    def __setattr__(self, name, value):
        if self.__dict__.get("_sealed") and name != "training":
            raise AttributeError(f"{name}: sealed")
        super().__setattr__(name, value)

    def forward(self, x):
        return self.body(x)


class Clashing(nn.Module):
    """A property in front of a submodule, and names of the module API for other things."""

    def __init__(self):
        super().__init__()
        self.add_module("blocks", nn.ModuleDict({"first": mlp(), "last": nn.Linear(48, 24)}))
        self.weight = 3.0
        self.bias = None
        self.rank = "corporal"

    def get_output_embeddings(self):
        raise NotImplementedError

    def forward(self, x):
        return self.blocks["last"](self.blocks["first"](x)) * self.weight


Clashing.body = property(lambda self: self.blocks["first"])


class Hidden(nn.Module):
    """The property hides the registered submodule of that name."""

    def __init__(self):
        super().__init__()
        self._modules["block"] = mlp()
        self.tail = nn.Linear(48, 24)

    @property
    def block(self):
        return "hidden"

    def forward(self, x):
        return self.tail(self._modules["block"](x))


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(48, 48), None, nn.ReLU()][::2])
        self.dict = nn.ModuleDict({"a.b".replace(".", "_"): nn.Linear(48, 48)})
        self.scales = nn.ParameterList([torch.ones(48)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(48))})
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("missing", None)
        self.register_buffer("void", None)

    def forward(self, x):
        for layer in self.list:
            x = layer(x)
        return self.dict["a_b"](x) * self.scales[0] + self.named["shift"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.me = [self]
        self.body.owner = [self]
        self.loop = []
        self.loop.append(self.loop)

    def forward(self, x):
        return self.me[0].body(x)


ODD_MODELS = [Closures, Delegating, Frozen, Clashing, Hidden, Containers, Branching, Recursive]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", ODD_MODELS)
def test_odd_model_is_sketched(kind, inplace):
    model = low_rank_(kind())
    x = torch.randn(3, 48)
    wanted = model(x)
    small = sketch(model, inplace=inplace)
    assert type(small) is kind
    assert any(isinstance(module, pc.SketchedLinear) for module in small.modules())
    assert_close(small(x), wanted)
    assert pc.sketch_report(small).achieved_ratio <= 0.5
    if not inplace:
        assert torch.equal(model(x), wanted)
        assert all(type(m) is not pc.SketchedLinear for m in model.modules())
    assert_close(pc.densify(small, inplace=inplace)(x), wanted)


def test_model_with_slots_in_place():
    model = low_rank_(Slotted())  # copy.deepcopy loses what is in slots of an nn.Module
    x = torch.randn(3, 48)
    wanted = model(x)
    assert_close(sketch(model, inplace=True)(x), wanted)


def test_model_whose_copy_is_of_another_class():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fx.symbolic_trace(mlp())

        def __getattr__(self, name):
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    with pytest.raises(pc.PantherError, match="deep copy of Wrapper does not hold"):
        sketch(Wrapper())
    assert isinstance(sketch(Wrapper(), inplace=True), Wrapper)


def test_bound_methods_and_references_lead_into_the_copy():
    small = sketch(Closures())
    assert small.table["body"] is small.body
    assert small.method.__self__ is small


def test_module_registered_inside_itself():
    inner = nn.ModuleDict({"body": mlp()})
    inner["body"].add_module("up", inner)
    assert isinstance(sketch(inner)["body"][0], pc.SketchedLinear)


class Counting(nn.Module):
    """Changes its attributes and buffers in every forward."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.count += 1
        self.cache = x
        self.body[0].last = x
        return self.body(x)


def test_reading_the_model_runs_no_forward_on_it():
    model = Counting()
    for result in (model, sketch(model)):
        assert result.calls == 0
        assert result.seen == []
        assert result.count == 0
        assert result.cache is None
        assert not hasattr(result.body[0], "last")
        assert "last" not in vars(result.body[0])


def test_hooks_of_containers_are_not_run():
    seen = {}
    model = nn.ModuleDict({"body": mlp()})
    model["body"].register_forward_hook(lambda module, args, output: seen.update(output=output))
    net = Runs(model)
    sketch(net)
    assert seen == {}


class Runs(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["body"](x)


def test_hooks_on_containers_still_run_on_the_sketch():
    seen = []
    model = mlp()
    model.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    small = sketch(model)
    seen.clear()
    small(torch.randn(2, 48))
    assert seen == [nn.Sequential]


def test_attribute_set_on_a_layer_is_kept():
    model = mlp()
    model[0].scale = 3.0
    assert sketch(model)[0].scale == 3.0


def test_layer_of_a_subclass_that_adds_methods_is_left_alone():
    class Extended(nn.Linear):
        def twice(self, x):
            return 2 * self(x)

    model = nn.ModuleList([Extended(48, 48), nn.Linear(48, 48)])
    assert sketch(model)[0].twice(torch.randn(1, 48)).shape == (1, 48)


def test_many_tiny_layers():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1000)))
    small = sketch(model)
    assert sum(isinstance(module, pc.SketchedLinear) for module in small) == 1000


# ---------------------------------------------------------------------------- dtypes and flags


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    model = low_rank_(mlp()).to(dtype)
    small = sketch(model)
    x = torch.randn(3, 48, dtype=dtype)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert small(x).dtype == dtype
    torch.testing.assert_close(small(x), model(x), rtol=0.05, atol=0.05)


def test_mixed_dtypes_are_kept():
    model = mlp(48, 3)
    model[1].to(torch.bfloat16)
    model[2].double()
    small = sketch(model)
    assert [layer.up.weight.dtype for layer in small] == [torch.float32, torch.bfloat16, torch.float64]


def test_requires_grad_is_kept_for_weight_and_bias_each():
    model = mlp(48, 3)
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    small = sketch(model)
    assert [small[0].up.weight.requires_grad, small[0].down.weight.requires_grad] == [False, False]
    assert small[0].bias.requires_grad
    assert small[1].up.weight.requires_grad
    assert not small[1].bias.requires_grad


def test_part_of_the_model_on_the_meta_device():
    model = nn.ModuleDict({"here": mlp(), "away": mlp().to("meta")})
    with pytest.raises(pc.PantherError, match=r"away\.0\.weight is on the meta device"):
        sketch(model)
    small = sketch(model, include="here.*")
    assert small["away"][0].weight.is_meta
    assert isinstance(small["here"][0], pc.SketchedLinear)


# ------------------------------------------------------------------------------ graphs, compilers


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 48) / 7)
        self.b = nn.Parameter(torch.randn(48))
        self.kernel = nn.Parameter(torch.randn(16, 3, 3, 3) / 5)
        self.fc = nn.Linear(48, 48)
        self.tail = nn.Linear(48, 48)

    def forward(self, x, image):
        x = F.relu(F.linear(x, self.w, self.b))
        image = F.conv2d(image, self.kernel, None, 2, 1)
        return self.tail(self.fc(x)), image


def functional_inputs():
    return torch.randn(2, 48), torch.randn(2, 3, 8, 8)


def graph_state(graph):
    return graph.code, list(graph.state_dict()), [id(p) for p in graph.parameters()]


def test_graph_module_has_its_functional_calls_sketched():
    model = low_rank_(Functional())
    x = functional_inputs()
    graph = fx.symbolic_trace(model)
    before = graph_state(graph)
    small = sketch(graph, 0.9)
    assert graph_state(graph) == before
    assert isinstance(small, fx.GraphModule)
    kinds = {type(m) for m in small.modules()}
    assert {pc.SketchedLinear, pc.SketchedConv2d} <= kinds
    assert not any(isinstance(m, nn.Linear) and m.weight.shape == (48, 48) for m in small.modules())
    for found, wanted in zip(small(*x), model(*x), strict=True):
        assert_close(found, wanted)
    assert pc.sketch_report(small).achieved_ratio <= 0.9
    assert {p.data_ptr() for p in graph.parameters()}.isdisjoint(p.data_ptr() for p in small.parameters())


def test_graph_module_in_place():
    model = low_rank_(Functional())
    x = functional_inputs()
    wanted = model(*x)
    graph = fx.symbolic_trace(model)
    small = sketch(graph, 0.9, inplace=True)
    assert small is graph
    assert any(isinstance(m, pc.SketchedLinear) for m in graph.modules())
    for found, dense in zip(graph(*x), wanted, strict=True):
        assert_close(found, dense)


def test_graph_module_with_immutable_notes_in_place():
    graph = fx.symbolic_trace(Functional())
    graph.meta["notes"] = fx.immutable_collections.immutable_list([1, 2])
    assert sketch(graph, inplace=True) is graph


@pytest.mark.parametrize(
    "options", [{"include": "nothing"}, {"ratio": 1e-5}, {"include": lambda module, name: False}]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_graph_module_is_unchanged_by_a_failure(options, inplace):
    graph = fx.symbolic_trace(Functional())
    before = graph_state(graph)
    with pytest.raises(pc.PantherError):
        pc.sketchify(graph, **{"ratio": 0.5, **OPTIONS, **options}, inplace=inplace)
    assert graph_state(graph) == before


def test_graph_module_with_a_bad_weight_is_unchanged_in_place():
    graph = fx.symbolic_trace(Functional())
    graph.w.data[0, 0] = torch.nan
    before = graph_state(graph)
    with pytest.raises(pc.PantherError, match=r"NaN or Inf"):
        sketch(graph, inplace=True)
    assert graph_state(graph) == before


def test_names_of_layers_are_those_of_the_plain_module():
    model = mlp(48, 3)
    plain, graph = sketch(model), sketch(fx.symbolic_trace(model))
    assert list(plain.state_dict()) == list(graph.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), graph.parameters(), strict=True))


@pytest.mark.parametrize("as_module", [False, True])
def test_exported_program_is_sketched(as_module):
    model = low_rank_(Functional())
    x = functional_inputs()
    program = torch.export.export(model, x)
    before = {name: t.clone() for name, t in program.state_dict.items()}
    small = sketch(program.module() if as_module else program, 0.9)
    assert isinstance(small, fx.GraphModule)
    kinds = {type(m) for m in small.modules()}
    assert {pc.SketchedLinear, pc.SketchedConv2d} <= kinds
    for found, wanted in zip(small(*x), model(*x), strict=True):
        assert_close(found, wanted)
    assert list(program.state_dict) == list(before)
    assert all(torch.equal(program.state_dict[name], t) for name, t in before.items())
    again = torch.export.export(small, x).module()
    assert_close(again(*x)[0], small(*x)[0])


def test_plan_of_an_exported_program():
    plan = pc.plan_sketch(torch.export.export(mlp(), (torch.randn(2, 48),)), 0.5, **OPTIONS)
    assert plan.route == "torch.export graph"


class Pipeline(nn.Module):
    """Linear, convolution and attention, in a forward that can be traced."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.LayerNorm(32)
        self.fc = nn.Linear(32, 64)
        self.head = nn.Linear(64, 48)

    def forward(self, image):
        x = self.norm(self.conv(image).flatten(2).transpose(1, 2))
        return self.head(F.gelu(self.fc(x)))


@pytest.fixture(scope="module")
def pipeline():
    torch.manual_seed(0)
    small = pc.sketchify(Pipeline().eval(), 0.6, include="*", **OPTIONS)
    return small, torch.randn(2, 3, 6, 6)


def test_result_is_traced_by_the_default_tracer(pipeline):
    small, x = pipeline
    assert torch.equal(fx.symbolic_trace(small)(x), small(x))


def test_result_is_exported(pipeline):
    small, x = pipeline
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(small, (x,), dynamic_shapes=dynamic)
    assert_close(program.module()(x.repeat(3, 1, 1, 1)), small(x.repeat(3, 1, 1, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_result_is_traced_by_jit(pipeline):
    small, x = pipeline
    assert_close(torch.jit.trace(small, (x,))(x), small(x))


def test_result_is_compiled(pipeline):
    small, x = pipeline
    torch._dynamo.reset()
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), small(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    small.zero_grad()


def test_result_is_wrapped_in_ddp(pipeline, tmp_path):
    small, x = pipeline
    small = copy.deepcopy(small)
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(small)
        wrapped(x).sum().backward()
        assert all(p.grad is not None for p in small.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_result_is_sketched_with_locks_in_place():
    model = mlp()
    model.lock = threading.Lock()
    assert sketch(model, inplace=True)(torch.randn(1, 48)).shape == (1, 48)


# ------------------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module", params=["llama", "gpt2", "bert", "t5"])
def hugging_face(request):
    entry = ZOO[request.param]
    return entry, sketch(entry.build(), 0.6)


def test_hf_model_is_saved(hugging_face, tmp_path):
    entry, small = hugging_face
    small.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "config.json").exists()
    twin = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(small.state_dict())
    found, wanted = (tensors(call(model, entry.inputs())) for model in (twin, small))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_hf_model_that_shares_an_input_factor_is_saved(hugging_face, tmp_path):
    entry, small = hugging_face
    model = copy.deepcopy(small)
    by_shape: dict[torch.Size, pc.SketchedLinear] = {}
    for layer in model.modules():
        if isinstance(layer, pc.SketchedLinear):
            layer.down = by_shape.setdefault(layer.down.weight.shape, layer).down
    model.save_pretrained(tmp_path)
    wanted = tensors(call(model, entry.inputs()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    missing, unexpected = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert missing  # an alias of what is there
    assert unexpected == []
    found = tensors(call(model, entry.inputs()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_hf_model_generates(hugging_face):
    entry, small = hugging_face
    if entry.generate is None:
        pytest.skip("does not generate")
    assert torch.equal(generate(small, entry), generate(pc.densify(small), entry))


def test_hf_model_checkpoints_gradients(hugging_face):
    entry, small = hugging_face
    gradients = []
    for on in (False, True):
        model = copy.deepcopy(small).train()
        if on:
            model.gradient_checkpointing_enable()
        entry.loss(call(model, entry.inputs())).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-2, atol=1e-4)


def test_hf_model_is_moved_and_cast(hugging_face):
    entry, small = hugging_face
    model = copy.deepcopy(small).half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    found = tensors(call(model.to("cpu", torch.bfloat16), entry.inputs()))
    assert all(bool(torch.isfinite(t).all()) for t in found)
    assert all(t.is_meta for t in model.to("meta").parameters())


def test_hf_layers_left_alone_have_reasons(hugging_face):
    _, small = hugging_face
    report = pc.sketch_report(small)
    assert all(row.reason for row in report.skipped)
    heads = [row.name for row in report.skipped if "head" in row.reason or "embedding" in row.reason]
    assert heads
