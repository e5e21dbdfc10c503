"""Trainings that earlier versions saved go on, on the mesh that they were saved on and on another."""

import math
import zipfile
from pathlib import Path

import pytest
import torch
from fixtures.saved_models import MESHES
from parallel import kept_jobs
from safetensors.torch import load_file

from panther_compile import read_state_dict

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = sorted(file.parent.name for file in FIXTURES.glob("format-*/training.zip"))
OTHER = {"dp2": "pp2", "fsdp2": "tp2", "pp2": "fsdp2", "tp2": "dp2"}


# Each goes on where another's mesh is: these two are gone on with on three of the four.
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=() if mesh in ("fsdp2", "pp2") else pytest.mark.slow) for mesh in MESHES],
)
@pytest.mark.parametrize("version", FORMATS)
def test_trainings(ranks, tmp_path, version, mesh):
    with zipfile.ZipFile(FIXTURES / version / "training.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "training" / mesh
    kept = load_file(folder / "expected.safetensors")
    wanted = {name.removeprefix("saved."): one for name, one in kept.items() if name.startswith("saved.")}
    assert len(wanted) == 4
    read = read_state_dict(folder)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], one) for name, one in wanted.items())
    for target in (mesh, OTHER[mesh]):
        shape, options = MESHES[target]
        for one in ranks(math.prod(shape.values())).run(
            kept_jobs.go_on, folder=str(folder), mesh=shape, **options
        ):
            assert one.keys() == kept.keys()
            for name, value in kept.items():
                torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6, msg=name)
