"""Tensors on disk are those that were put there, after their pages were given back too."""

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from panther_compile.tensors_on_disk import TensorsOnDisk

WAIT = 0.1  # in which pages are given back


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_kept(dtype, tmp_path):
    drawn = [torch.randn(3, 5).to(dtype), torch.randn(7).to(dtype), torch.zeros(0, 4, dtype=dtype)]
    with TensorsOnDisk(tmp_path) as disk:
        kept = [disk.put(one) for one in drawn]
        time.sleep(WAIT)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(kept, drawn, strict=True))


def test_what_is_written_is_kept(tmp_path):
    with TensorsOnDisk(tmp_path) as disk:
        sums = disk.zeros(torch.Size((300, 300)), torch.float64)
        for place in range(4):
            sums += place
            time.sleep(WAIT / 2)
        assert bool((sums == 6.0).all())


def test_a_module_keeps_its_parameters(tmp_path):
    layer = nn.Linear(4, 4)
    weight, numbers = layer.weight, layer.weight.detach().clone()
    with TensorsOnDisk(tmp_path) as disk:
        disk.put_module(layer)
    assert layer.weight is weight
    assert torch.equal(weight, numbers)


def test_files_are_mapped(tmp_path):
    wanted = {"a": torch.randn(4, 6).bfloat16(), "b": torch.randn(3), "empty": torch.zeros(0, 2)}
    save_file(wanted, tmp_path / "file.safetensors", {"format": "pt"})
    with TensorsOnDisk(tmp_path) as disk:
        found = disk.tensors(tmp_path / "file.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is in memory")
def test_pages_are_given_back(tmp_path):
    with TensorsOnDisk(tmp_path) as disk:
        before = held()
        large = disk.put(torch.ones(25_000_000))
        time.sleep(2 * WAIT)
        assert held() - before < 20_000_000
        assert float(large.sum()) == 25_000_000


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
def test_a_file_is_gone_with_its_tensors(tmp_path):
    def mapped():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    with TensorsOnDisk(tmp_path) as disk:
        large = disk.put(torch.ones(20_000_000))
        assert not list(tmp_path.iterdir())
        assert mapped() == 1
        del large
        time.sleep(WAIT)
        assert mapped() == 0
