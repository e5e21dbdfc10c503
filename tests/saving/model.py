"""A model with all that a checkpoint must keep, sketched; and what must be the same of it."""

import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True, "include": ["fc*", "embed", "head"]}


class Model(nn.Module):
    """A tied table, buffers of both kinds, an integer buffer and a frozen layer."""

    def __init__(self, width=16, classes=20):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.fc1 = nn.Linear(width, 24)
        self.norm = nn.BatchNorm1d(24)
        self.fc2 = nn.Linear(24, width)
        self.head = nn.Linear(width, classes)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("shift", torch.rand(width), persistent=False)
        self.fc1.requires_grad_(False)

    def forward(self, ids):
        x = self.fc2(torch.tanh(self.norm(self.fc1(self.embed(ids)))))
        return self.head(x * self.scale + self.shift)


IDS = torch.tensor([1, 5, 7, 19])


def sketched(dtype=torch.float32, seed=1, **sizes):
    torch.manual_seed(seed)
    return pc.sketchify(Model(**sizes).eval().to(dtype), 0.5, **OPTIONS)


def skeleton(**sizes):
    torch.manual_seed(99)
    return Model(**sizes).eval()


def all_tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def assert_same(found, wanted):
    a, b = all_tensors(found), all_tensors(wanted)
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
        assert a[name].dtype == b[name].dtype
        assert a[name].requires_grad == b[name].requires_grad, name
        assert isinstance(a[name], nn.Parameter) == isinstance(b[name], nn.Parameter)


def names_in(path):
    return sorted(file.name for file in path.iterdir())
