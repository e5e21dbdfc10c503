"""The report counts bytes too."""

import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True}


def test_bytes_are_counted_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    model[2].float()
    small = pc.sketchify(model, 0.5, include="0", **OPTIONS)
    report = pc.sketch_report(small)
    assert report.dense_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert report.stored_bytes == sum(p.numel() * p.element_size() for p in small.parameters())
    assert f"in bytes: {report.stored_bytes:,} of {report.dense_bytes:,}, ratio" in str(report)
    half = pc.sketch_report(small.half())
    assert half.stored_bytes == 2 * half.stored_numbers
    assert report.to_dict()["stored_bytes"] == report.stored_bytes


def test_bytes_of_a_quantized_tensor_are_those_it_is_made_of():
    class Int8(torch.Tensor):
        """A weight in int8 with a scale for each row, as torchao has it."""

        @staticmethod
        def __new__(cls, values, scale):
            made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
            made.values, made.scale = values, scale
            return made

        def __tensor_flatten__(self):
            return ["values", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return cls(args[0].values, args[0].scale)
            raise NotImplementedError(func)

    small = pc.sketchify(nn.Sequential(nn.Linear(32, 64)), 0.5, **OPTIONS)
    before, up = pc.sketch_report(small), small[0].up
    numbers, rows = up.weight.numel(), len(up.weight)
    values = torch.zeros(up.weight.shape, dtype=torch.int8)
    up.weight = nn.Parameter(Int8(values, torch.ones(rows)), requires_grad=False)
    after = pc.sketch_report(small)
    assert after.stored_numbers == before.stored_numbers
    assert after.stored_bytes == before.stored_bytes - 4 * numbers + numbers + 4 * rows
    assert after.dense_bytes == before.dense_bytes
