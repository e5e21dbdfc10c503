"""nn.Transformer and its parts give the same with sketched layers inside.

All matrices have rank 5, so that sketches of rank 5 are exact: whatever differs is the plumbing.
"""

import copy
import pickle

import pytest
import torch
from thinned import thinned
from torch import Tensor, nn

import panther_compile as pc
from panther_compile.errors import LayerError
from panther_compile.layers.attention import SketchedMultiheadAttention, projection_weights
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.linear import SketchedLinear

N, L, S, E, H, RANK = 3, 6, 8, 24, 4, 5
TIGHT = {"rtol": 1e-9, "atol": 1e-9}

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors"
)


@pytest.fixture(autouse=True)
def _one_thread():
    """Nothing here is large enough for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def lower_ranks(model):
    """Give every matrix rank 5, and every vector something to do."""
    model.double()  # float32 would round the products to full rank
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                weights = [weight for weight, _ in projection_weights(module).values()]
            elif isinstance(module, nn.Linear):
                weights = [module.weight]
            else:
                continue
            for weight in weights:
                left, right = torch.randn_like(weight[:, :RANK]), torch.randn_like(weight[:RANK])
                weight.copy_(left @ right * 0.3 / RANK**0.5)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def sketched(model, skip=(), **options):
    """A copy with sketches for every attention and linear layer."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if f"{name}.{child_name}".startswith(skip or "-"):
                continue
            if isinstance(child, nn.MultiheadAttention):
                new = SketchedMultiheadAttention.from_dense(child, rank=RANK, **options)
                setattr(module, child_name, new)
            elif type(child) is nn.Linear:
                setattr(module, child_name, SketchedLinear.from_dense(child, rank=RANK))
    assert any(isinstance(module, SketchedLinear) for module in model.modules())
    return model


def padding(batch, length):
    """Left-aligned, as nested tensors want it: True at the end."""
    lengths = torch.arange(length, length - batch, -1).clamp_min(1)
    return torch.arange(length) >= lengths[:, None]


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def assert_same(dense, twin, inputs, valid=None, **call):
    """In train mode with gradients, and in eval mode with and without."""
    for train, grad in ((True, True), (False, True), (False, False)):
        results = []
        for model in (dense.train(train), twin.train(train)):
            leaves = [x.clone().requires_grad_(grad) for x in inputs]
            with torch.set_grad_enabled(grad):
                out = model(*leaves, **call)
            keep = slice(None) if valid is None else valid
            assert out[keep].isfinite().all()
            found = [out[keep]]
            if grad:
                found += torch.autograd.grad(out[keep].sin().sum(), leaves)
            results.append(found)
        torch.testing.assert_close(results[1], results[0], **TIGHT)


@pytest.mark.parametrize("masks", ["", "padding", "mask", "causal", "padding mask"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("batch_first", thinned([True, False], 2))
@pytest.mark.parametrize("part", ["layer", "encoder"])
def test_encoder(part, batch_first, norm_first, masks):
    dense = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    if part == "encoder":
        dense = nn.TransformerEncoder(dense, 2, norm=nn.LayerNorm(E), enable_nested_tensor=True)
    dense = lower_ranks(dense)
    x = torch.randn(*((N, S) if batch_first else (S, N)), E, dtype=torch.float64)
    call, valid = {}, None
    if "padding" in masks:
        call["src_key_padding_mask"] = padding(N, S)
        valid = ~padding(N, S) if batch_first else ~padding(N, S).T
    if "mask" in masks:
        name = "mask" if part == "encoder" else "src_mask"
        call[name] = torch.rand(S, S) < 0.3
        call[name].fill_diagonal_(False)
        call[name][:, 0] = False
    if "causal" in masks:
        call |= {"mask" if part == "encoder" else "src_mask": causal(S), "is_causal": True}
    assert_same(dense, sketched(dense), [x], valid, **call)


def test_padded_positions_are_zero_only_in_the_nested_path():
    """What `sketchify` has a hook for, so that we hear of it if torch changes."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    dense = lower_ranks(nn.TransformerEncoder(layer, 1)).eval()
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    with torch.no_grad():
        assert dense(x, src_key_padding_mask=mask)[mask].eq(0).all()
        out = sketched(dense)(x, src_key_padding_mask=mask)
    torch.testing.assert_close(out[mask], dense.train()(x, src_key_padding_mask=mask)[mask])


def test_nested_path_that_a_dense_first_layer_opens():
    """Only the first layer decides; a later sketched one says what to do."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    dense = lower_ranks(nn.TransformerEncoder(layer, 2)).eval()
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    twin = sketched(dense, skip="layers.0")
    with torch.no_grad():
        with pytest.raises(LayerError, match="use_nested_tensor"):
            twin(x, src_key_padding_mask=mask)
        twin.use_nested_tensor = False
        wanted = dense(x, src_key_padding_mask=mask)
        found = twin(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], wanted[~mask], **TIGHT)


def test_encoder_of_a_sketched_layer():
    """nn.TransformerEncoder clones the layer it is given, and reads its attributes."""
    layer = lower_ranks(nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True))
    dense = nn.TransformerEncoder(layer, 2)
    twin = nn.TransformerEncoder(sketched(layer), 2)
    assert not twin.use_nested_tensor
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    assert_same(dense, twin, [x], ~mask, src_key_padding_mask=mask)


@pytest.mark.parametrize("masks", ["", "padding", "causal", "padding causal"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("batch_first", thinned([True, False], 2))
@pytest.mark.parametrize("part", ["layer", "decoder"])
def test_decoder(part, batch_first, norm_first, masks):
    dense = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    if part == "decoder":
        dense = nn.TransformerDecoder(dense, 2, norm=nn.LayerNorm(E))
    dense = lower_ranks(dense)
    inputs = [torch.randn(N, length, E, dtype=torch.float64) for length in (L, S)]
    inputs = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
    call = {}
    if "padding" in masks:
        call["memory_key_padding_mask"] = padding(N, S)
        padded = torch.zeros(N, L, dtype=torch.float64)
        call["tgt_key_padding_mask"] = padded.masked_fill(padding(N, L), -torch.inf)
    if "causal" in masks:
        call |= {"tgt_mask": causal(L), "tgt_is_causal": True}
    elif "padding" in masks:
        call["tgt_key_padding_mask"] = padding(N, L)
    assert_same(dense, sketched(dense), inputs, **call)


@pytest.mark.parametrize("batch_first", [False, True], ids=["seq", "batch"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_transformer(batched, batch_first):
    dense = lower_ranks(nn.Transformer(E, H, 1, 2, 32, dropout=0.0, batch_first=batch_first))
    batch = (N,) if batched else ()
    inputs = [torch.randn(*batch, length, E, dtype=torch.float64) for length in (S, L)]
    if batched and not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    call = {"tgt_mask": causal(L)}
    if batched:
        call |= {"src_key_padding_mask": padding(N, S), "memory_key_padding_mask": padding(N, S)}
    assert_same(dense, sketched(dense), inputs, **call)


def test_dropout_draws_what_torch_draws():
    # With batch_first the output of nn.MultiheadAttention is strided, ours is contiguous: a dropout
    # after it then draws the same numbers in another order.
    dense = lower_ranks(nn.TransformerEncoderLayer(E, H, 32, dropout=0.3))
    twin = sketched(dense)
    x = torch.randn(S, N, E, dtype=torch.float64)
    results = []
    for model in (dense, twin):
        torch.manual_seed(1)
        results.append(model(x, src_key_padding_mask=padding(N, S)))
    torch.testing.assert_close(*results, **TIGHT)


def test_training_a_sketched_encoder_lowers_the_loss():
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    model = sketched(lower_ranks(nn.TransformerEncoder(layer, 1))).train()
    x, target = torch.randn(2, N, S, E, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(isinstance(p.grad, Tensor) for p in model.parameters())
    assert losses[-1] < 0.8 * losses[0]


def test_compiled_encoder():
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    dense = lower_ranks(nn.TransformerEncoder(layer, 1)).eval()
    twin = sketched(dense)
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    with torch.no_grad():
        wanted = dense(x, src_key_padding_mask=mask)
        found = torch.compile(twin, backend="eager")(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], wanted[~mask], **TIGHT)


def test_favor_inside_a_causal_encoder():
    """`nn.TransformerEncoder` hands the causal hint on; no query sees what comes later."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    dense = lower_ranks(nn.TransformerEncoder(layer, 2)).eval()
    twin = sketched(dense, attention="favor", features=64)
    x = torch.randn(N, S, E, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += torch.randn(N, S - 4, E)
    out, other = (twin(y, mask=causal(S)) for y in (x, changed))
    torch.testing.assert_close(out[:, :4], other[:, :4], **TIGHT)
    assert (out[:, 4:] - other[:, 4:]).norm() > 0.1


# ------------------------------------------------------------------- models that `sketchify` returns

OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}
PARTS = {
    "all": {},
    "feedforward": {"exclude": "*self_attn"},
    "attention": {"exclude": "*linear?"},
    "last layer": {"exclude": "layers.0.*"},
}


def encoder(**options):
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E), **options).double()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_sketchified_encoder_gives_what_its_densified_twin_gives(part, inplace):
    given = encoder()
    small = pc.sketchify(given, 0.5, inplace=inplace, **OPTIONS | PARTS[part])
    assert given.use_nested_tensor is not inplace
    assert not small.use_nested_tensor
    assert any(isinstance(module, SketchedLayer) for module in small.modules())
    dense = pc.densify(small)
    assert dense.use_nested_tensor
    assert not small.use_nested_tensor
    assert vars(dense).keys() == vars(encoder()).keys()
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    assert_same(dense, small, [x])
    assert_same(dense, small, [x], ~mask, src_key_padding_mask=mask)


def left_padded():
    mask = padding(N, S).clone()
    mask[0] = torch.arange(S) < 2
    return mask


PADDING = {"bool": padding(N, S), "left": left_padded(), "float": None}
PADDING["float"] = torch.zeros(N, S, dtype=torch.float64).masked_fill(padding(N, S), -torch.inf)


@pytest.mark.parametrize(
    ("mask", "norm"),
    [
        *(("bool", False), ("left", True)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("bool", True), ("left", False))),
        *(pytest.param("float", norm, marks=pytest.mark.slow) for norm in (False, True)),
    ],
)
@pytest.mark.parametrize("part", PARTS)
def test_padded_positions_are_those_of_the_dense_model(part, mask, norm):
    for nested in (True, False):
        given = encoder(enable_nested_tensor=nested).eval()
        with torch.no_grad():
            given.norm.bias.add_(1.0)
        given.norm = given.norm if norm else None
        small = pc.sketchify(given, 0.5, **OPTIONS | PARTS[part])
        dense = pc.densify(small)
        x = torch.randn(N, S, E, dtype=torch.float64)
        for grad in (False, True):
            for mode in (False, True):
                with torch.set_grad_enabled(grad):
                    found, wanted = (one.train(mode)(x, None, PADDING[mask]) for one in (small, dense))
                torch.testing.assert_close(found, wanted)
        with torch.no_grad():
            again = pickle.loads(pickle.dumps(copy.deepcopy(small.eval())))
            found, wanted = (one.eval()(x, src_key_padding_mask=PADDING[mask]) for one in (again, given))
            hidden = PADDING[mask] != 0
            if nested and mask != "left":
                torch.testing.assert_close(found[hidden], wanted[hidden])
            elif mask == "bool":
                assert found[hidden].abs().max() > 1e-3


def test_an_encoder_without_a_sketch_keeps_its_nested_tensors():
    model = nn.ModuleDict({"a": encoder(), "b": encoder(), "c": encoder(enable_nested_tensor=False)})
    small = pc.sketchify(model, 0.5, **OPTIONS | {"exclude": "a.*"})
    assert [part.use_nested_tensor for part in small.values()] == [True, False, False]
    back = pc.densify(small, inplace=True)
    assert back is small
    assert [part.use_nested_tensor for part in back.values()] == [True, True, False]


def test_a_loaded_encoder_takes_padded_inputs(tmp_path):
    small = pc.sketchify(encoder(), 0.5, **OPTIONS).eval()
    pc.save_sketched(small, tmp_path)
    skeleton = encoder()
    loaded = pc.load_sketched(skeleton, tmp_path).eval()
    assert skeleton.use_nested_tensor
    x, mask = torch.randn(N, S, E, dtype=torch.float64), padding(N, S)
    with torch.no_grad():
        found, wanted = (model(x, src_key_padding_mask=mask) for model in (loaded, small))
    assert torch.equal(found, wanted)
    assert pc.densify(loaded).use_nested_tensor
