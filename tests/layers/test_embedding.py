"""SketchedEmbedding against the table it stands for."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from panther_compile.errors import FactoredWeightError, RankError
from panther_compile.layers.embedding import SketchedEmbedding

V, D, R = 20, 12, 5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def build(dtype=torch.float64, *, training=True, trainable=True, **options):
    like = nn.Embedding(V, D, dtype=dtype, **options).train(training)
    like.weight.requires_grad_(trainable)
    left, right = torch.randn(V, R, dtype=torch.float64), torch.randn(R, D, dtype=torch.float64)
    return SketchedEmbedding.from_factors(left, right, like)


def table(layer):
    left, right = (factor.detach().double() for factor in layer.factors())
    return left @ right


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,), (2, 0), (2, 1, 3)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_looks_rows_up(shape, index):
    layer = build()
    indices = torch.randint(0, V, shape, dtype=index)
    rows = layer(indices)
    assert rows.shape == (*shape, D)
    torch.testing.assert_close(rows, table(layer)[indices.long()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    layer = build(dtype)
    rows = layer(torch.arange(V)).detach()
    assert rows.dtype == dtype
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert float((rows.double() - table(layer)).norm() / table(layer).norm()) < limit


def test_index_out_of_range_is_an_error():
    with pytest.raises(IndexError):
        build()(torch.tensor([V]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_to_dense_multiplies_out_and_keeps_the_options(dtype, padding_idx):
    layer = build(dtype, padding_idx=padding_idx, scale_grad_by_freq=True, sparse=True)
    dense = layer.to_dense()
    assert type(dense) is nn.Embedding
    assert torch.equal(dense.weight, table(layer).to(dtype))
    wanted = None if padding_idx is None else padding_idx % V
    assert dense.padding_idx == layer.padding_idx == wanted
    assert dense.scale_grad_by_freq
    assert dense.sparse


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
def test_mode_and_requires_grad_are_carried(training, trainable):
    layer = build(training=training, trainable=trainable)
    assert all(module.training is training for module in layer.modules())
    assert all(p.requires_grad is trainable for p in layer.parameters())
    dense = layer.to_dense()
    assert dense.training is training
    assert dense.weight.requires_grad is trainable


def test_a_forward_may_look_up_by_itself():
    """As fastai's EmbeddingDropout does, with the table and every option."""
    layer, index = SketchedEmbedding(20, 12, 4, padding_idx=0, scale_grad_by_freq=True), torch.arange(6)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = [getattr(layer, name) for name in names]
    assert options == [getattr(layer.to_dense(), name) for name in names]
    torch.testing.assert_close(nn.functional.embedding(index, layer.weight, *options), layer(index))


def test_gradients_are_those_of_the_product():
    layer, indices = build(), torch.tensor([[1, 2, 2], [0, 1, 19]])
    wave = torch.randn(2, 3, D, dtype=torch.float64)
    (layer(indices) * wave).sum().backward()
    codes, basis = (p.detach().clone().requires_grad_() for p in layer.factors())
    ((codes @ basis)[indices] * wave).sum().backward()
    torch.testing.assert_close(layer.codes.weight.grad, codes.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.basis.weight.grad, basis.grad, rtol=1e-12, atol=1e-12)


def test_padding_code_gets_no_gradient():
    layer = build(padding_idx=3)
    layer(torch.tensor([3, 4])).sum().backward()
    assert not layer.codes.weight.grad[3].any()
    assert layer.codes.weight.grad[4].any()


def test_sparse_gradient():
    layer = build(sparse=True)
    layer(torch.tensor([3, 4])).sum().backward()
    assert layer.codes.weight.grad.is_sparse


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_spec_rebuilds_the_layer_through_json(padding_idx):
    layer = build(padding_idx=padding_idx, sparse=True)
    spec = json.loads(json.dumps(layer.sketch_spec()))
    twin = SketchedEmbedding(**spec, dtype=torch.float64, device="meta").to_empty(device="cpu")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(torch.arange(V)), layer(torch.arange(V)))
    assert twin.sketch_spec() == layer.sketch_spec()


def test_state_dict_names():
    assert list(build().state_dict()) == ["codes.weight", "basis.weight"]


def test_deepcopy_and_pickle():
    layer = build()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(torch.arange(V)), layer(torch.arange(V)))
        with torch.no_grad():
            twin.codes.weight.zero_()
    assert layer.codes.weight.any()


def test_counts():
    layer = build()
    assert layer.stored_numbers == R * (V + D)
    assert layer.dense_numbers == V * D
    assert (layer.dense_macs, layer.macs) == (0, R * D)
    assert (layer.scheme, layer.ranks) == ("pair", (R,))


def test_repr_is_faithful():
    assert build().extra_repr() == f"{V}, {D}, rank={R}, stored={R * (V + D) / (V * D):.3f}"


def test_weight_is_the_table_and_read_only():
    layer = build()
    assert torch.equal(layer.weight + 0, layer.codes.weight @ layer.basis.weight)
    with pytest.raises(FactoredWeightError, match="cannot be set"):
        layer.weight = nn.Parameter(torch.zeros(V, D))


@pytest.mark.parametrize("rank", [0, D + 1, 2.0, True])
def test_refuses_a_rank_outside(rank):
    with pytest.raises(RankError):
        SketchedEmbedding(V, D, rank)


def test_building_draws_none_of_the_users_random_numbers():
    like = nn.Embedding(V, D)
    before = torch.get_rng_state()
    SketchedEmbedding.from_factors(torch.zeros(V, R), torch.zeros(R, D), like)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph_and_exports(backend):
    torch._dynamo.reset()
    layer, indices = build(torch.float32), torch.randint(0, V, (2, 3))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(indices), layer(indices))
    exported = torch.export.export(layer, (indices,)).module()
    torch.testing.assert_close(exported(indices), layer(indices))
