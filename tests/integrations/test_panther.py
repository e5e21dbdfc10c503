"""Panther's layers come in exactly; its formulas are written down here, Panther is not installed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc


def signs(*shape):
    """Panther's frozen sketch: +-1 / sqrt(k), for (k, d)."""
    return (torch.rand(*shape) - 0.5).sign() / shape[-2] ** 0.5


class SKLinear(nn.Module):
    """y = 1/(2L) sum_i (x S1_i U1_i + x U2_i S2_i) + b."""

    def __init__(self, dense, terms, rank):
        super().__init__()
        outputs, inputs = dense.weight.shape
        weight = dense.weight.detach().t()
        self.register_buffer("U1s", torch.stack([signs(rank, outputs) for _ in range(terms)]))
        self.register_buffer("U2s", torch.stack([signs(rank, inputs).t() for _ in range(terms)]))
        self.S1s = nn.Parameter(weight @ self.U1s.transpose(1, 2))
        self.S2s = nn.Parameter(self.U2s.transpose(1, 2) @ weight)
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().clone())

    def forward(self, x):
        y = sum(
            x @ s1 @ u1 + x @ u2 @ s2
            for s1, u1, u2, s2 in zip(self.S1s, self.U1s, self.U2s, self.S2s, strict=True)
        )
        y = y / (2 * len(self.S1s))
        return y if self.bias is None else y + self.bias


class SKConv2d(nn.Module):
    """y = 1/(2L) sum_j U1_j^T (x * S1_j) + b, over 2L terms."""

    def __init__(self, dense, terms, rank):
        super().__init__()
        self.in_channels, self.out_channels = dense.in_channels, dense.out_channels
        self.kernel_size, self.stride, self.padding = dense.kernel_size, dense.stride, dense.padding
        self.register_buffer("U1s", torch.stack([signs(rank, dense.out_channels) for _ in range(2 * terms)]))
        kernels = torch.einsum("oihw,lko->lkihw", dense.weight.detach(), self.U1s)
        self.S1s = nn.Parameter(kernels.flatten(0, 1))
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().clone())

    def forward(self, x):
        z = F.conv2d(x, self.S1s, stride=self.stride, padding=self.padding)
        z = z.unflatten(1, self.U1s.shape[:2])
        y = torch.einsum("nlkhw,lko->nohw", z, self.U1s) / len(self.U1s)
        return y if self.bias is None else y + self.bias[:, None, None]


class RandMultiHeadAttention(nn.Module):
    def __init__(self, dense):
        super().__init__()
        three = dense.in_proj_weight.detach().chunk(3)
        self.Wq, self.Wk, self.Wv = (nn.Parameter(part.clone()) for part in three)
        self.bq, self.bk, self.bv = (nn.Parameter(b.clone()) for b in dense.in_proj_bias.detach().chunk(3))
        self.W0 = nn.Parameter(dense.out_proj.weight.detach().clone())
        self.b0 = nn.Parameter(dense.out_proj.bias.detach().clone())
        self.register_buffer("projection_matrix", torch.randn(16, 8))


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(24)
        self.layer = nn.Linear(24, 40, bias=bias)
        self.head = nn.Linear(40, 5)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.layer(x).relu())


def panther(terms, bias=True):
    """A dense model, and the same with Panther's layers."""
    dense = Model(bias).eval()
    model = copy.deepcopy(dense)
    model.conv, model.layer = SKConv2d(model.conv, terms, 2), SKLinear(model.layer, terms, 3)
    return dense, model.eval()


X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_a_model_and_its_state_dict_come_in_exactly(terms, bias):
    dense, model = panther(terms, bias)
    with torch.device("meta"):
        empty = Model(bias)
    for skeleton in (dense, empty):
        for made in (pc.import_panther(model), pc.import_panther(model.state_dict(), skeleton).eval()):
            torch.testing.assert_close(made(X), model(X), rtol=1e-5, atol=1e-5)
            assert isinstance(made.layer, pc.SketchedLinear if terms < 3 else nn.Module)
            assert made.layer.weight.shape == (40, 24)
    assert isinstance(model.layer, SKLinear)  # left as it was
    assert isinstance(dense.layer, nn.Linear)


def test_terms_are_one_pair_and_no_larger_than_what_they_span():
    _, model = panther(2)
    made = pc.import_panther(model)
    assert made.layer.ranks == (12,)  # 2 terms of rank 3, on both sides
    assert made.conv.ranks == (8,)
    low = nn.Linear(24, 40)
    with torch.no_grad():
        low.weight.copy_(torch.randn(40, 2) @ torch.randn(2, 24))
    assert pc.import_panther(SKLinear(low, 2, 3)).ranks == (4,)  # W of rank 2, from both sides


def test_what_stores_more_than_dense_comes_in_dense():
    made = pc.import_panther(SKLinear(nn.Linear(24, 40), 3, 8))
    assert type(made) is nn.Linear
    conv = SKConv2d(nn.Conv2d(3, 24, 3, padding=1), 3, 8)
    made = pc.import_panther(conv)
    assert type(made) is nn.Conv2d
    torch.testing.assert_close(made(X), conv(X), rtol=1e-5, atol=1e-5)


def test_it_is_an_ordinary_model_afterwards(tmp_path):
    dense, model = panther(1)
    made = pc.import_panther(model)
    made.train()(X).sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    pc.save_sketched(made.eval(), tmp_path)
    assert torch.equal(pc.load_sketched(dense, tmp_path)(X), made(X))


def test_attention_of_a_state_dict_becomes_the_exact_one():
    dense = nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)).eval()
    held = nn.Sequential(RandMultiHeadAttention(dense[0]), SKLinear(dense[1], 1, 4))
    made = pc.import_panther(held.state_dict(), copy.deepcopy(dense))
    x = torch.randn(2, 5, 32)
    assert torch.equal(made[0](x, x, x)[0], dense[0](x, x, x)[0])


def test_what_does_not_fit_is_named():
    dense, model = panther(1)
    state = model.state_dict()
    with pytest.raises(pc.PantherError, match="needs skeleton="):
        pc.import_panther(state)
    with pytest.raises(pc.PantherError, match="goes with a state dict"):
        pc.import_panther(model, dense)
    with pytest.raises(pc.PantherError, match="no SKLinear"):
        pc.import_panther(dense)
    with pytest.raises(pc.PantherError, match="no tensors of SKLinear"):
        pc.import_panther(dense.state_dict(), dense)
    with pytest.raises(pc.PantherError, match="no layer 'conv'"):
        pc.import_panther(state, nn.Sequential())
    other = Model()
    other.layer = nn.Linear(24, 41)
    with pytest.raises(pc.PantherError, match=r"layer is \(24, 40\) in the state dict"):
        pc.import_panther(state, other)
    del state["norm.weight"]
    with pytest.raises(pc.PantherError, match=r"norm\.weight"):
        pc.import_panther(state, dense)
    state["layer.U2s"] = state["layer.U2s"][:, :5]
    with pytest.raises(pc.PantherError, match="a Panther that is not known"):
        pc.import_panther(state, dense)
