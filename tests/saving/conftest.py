"""A saved model, and a copy of its files to spoil."""

import pytest
from saving.model import sketched

import panther_compile as pc


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(model, directory) that no test writes into."""
    model = sketched(seed=0)
    path = tmp_path_factory.mktemp("saved")
    pc.save_sketched(model, path)
    return model, path


@pytest.fixture
def copied(saved, tmp_path):
    """A directory of its own to spoil: (path, plan file, weights file)."""
    for file in saved[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (weights,) = tmp_path.glob("weights-*")
    return tmp_path, tmp_path / "sketch.json", weights
