"""Checkpoints: bit for bit, on any mesh, and never half of one."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel import checkpoint_jobs
from parallel.prepared import prepares
from parallel.training import build
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from panther_compile import TrainingCheckpoints, read_state_dict
from panther_compile.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointVersionError,
    ConfigError,
    ProcessGroupError,
)
from panther_compile.parallel.checkpoint_folder import list_checkpoints
from panther_compile.parallel.pieces import find_pieces
from panther_compile.partition.shards.placements import Shard

FSDP = {"data_parallel": "fsdp"}
MESHES = {
    "dp2-ddp": {"mesh": {"dp": 2}, "data_parallel": "ddp"},
    "dp2-fsdp": {"mesh": {"dp": 2}, **FSDP},
    "pp2": {"mesh": {"pp": 2}},
    "pp2-zbv": {"mesh": {"pp": 2}, "part": {"schedule": "interleaved"}, "schedule": "zbv"},
    "one": {"mesh": {"dp": 1}},
    "dp2-pp2-fsdp": {"mesh": {"dp": 2, "pp": 2}, **FSDP},
    "dp2-pp2-ddp": {"mesh": {"dp": 2, "pp": 2}, "data_parallel": "ddp"},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}},
    "dp2-tp2-fsdp": {"mesh": {"dp": 2, "tp": 2}, **FSDP},
    "dp4-fsdp": {"mesh": {"dp": 4}, **FSDP},
    "dp4-ddp": {"mesh": {"dp": 4}, "data_parallel": "ddp"},
    "dp4-hybrid": {"mesh": {"dp": 4}, **FSDP, "shard_size": 2},
}


def size_of(name):
    return math.prod(MESHES[name]["mesh"].values())


def planned(mesh, name="gpt2"):
    """What the ranks of a mesh ask for."""
    return {"name": name, "mesh": MESHES[mesh]["mesh"], "part": MESHES[mesh].get("part")}


@pytest.fixture(scope="module")
def ranks(ranks):
    """Ranks by their number, or by a mesh's name."""
    return lambda name: ranks(name if isinstance(name, int) else size_of(name))


@prepares(checkpoint_jobs.plan, lambda mesh: planned(mesh, "noisy"))
@prepares(checkpoint_jobs.plan, lambda mesh: planned(mesh, "noisy"))
@prepares(checkpoint_jobs.plan, lambda mesh: planned(mesh, "noisy"))
@pytest.mark.parametrize(
    "mesh",
    [
        *("dp2-fsdp", "pp2"),
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("dp2-ddp", "dp2-pp2-fsdp", "dp2-tp2-fsdp", "dp4-ddp")
        ),
    ],
)
def test_goes_on_bit_for_bit(ranks, tmp_path, mesh):
    group, options = ranks(mesh), MESHES[mesh]
    straight = group.run(checkpoint_jobs.go_on, steps=4, **options)
    group.run(checkpoint_jobs.go_on, steps=2, folder=str(tmp_path), **options)
    resumed = group.run(checkpoint_jobs.go_on, steps=4, folder=str(tmp_path), **options)
    for one, other in zip(straight, resumed, strict=True):
        assert (one["start"], other["start"]) == (0, 2)
        assert {step: one["seen"][step] for step in (2, 3)} == other["seen"]
        assert_equal(one["state"], other["state"])


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.fixture(scope="module")
def save(ranks, tmp_path_factory):
    """What a mesh saves of a model, once for all tests: the folder, and the states as they were."""

    @functools.cache
    def run(source, name):
        folder = tmp_path_factory.mktemp(f"{source}-{name}")
        return folder, ranks(source).run(
            checkpoint_jobs.save, folder=str(folder), name=name, **MESHES[source]
        )

    return run


def reshard(ranks, save, source, targets, name):
    folder, saved = save(source, name)
    state, options = {}, {}
    for one in saved:
        state |= one["optimizer"]
        options |= one["options"]
    assert any(key == "exp_avg" for _, key in state)
    for target in targets:
        found = ranks(target).run(
            checkpoint_jobs.load, folder=str(folder), name=name, steps=2, **MESHES[target]
        )
        for one in found:
            assert_equal(one["model"], saved[0]["model"])
            assert one["optimizer"]
            assert_equal(one["optimizer"], {key: state[key] for key in one["optimizer"]})
            assert one["options"] == {key: options[key] for key in one["options"]}
    read = read_state_dict(folder)
    assert_equal(read, saved[0]["model"])
    model = build(name)[0]
    model.load_state_dict(read)
    assert_equal(model.state_dict(), saved[0]["model"])


def read_by_torch(folder, wanted, file):
    """Torch's own loader, and its converter to a file of `torch.save`, read the newest checkpoint."""
    newest = list_checkpoints(Path(folder))[0]
    metadata = FileSystemReader(newest).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(held.size, dtype=held.properties.dtype)
        for key, held in metadata.items()
        if key.startswith("model.")
    }
    dcp.load(found, checkpoint_id=newest, no_dist=True)
    dcp_to_torch_save(newest, file)
    for tensors in (found, torch.load(file)):
        held = {
            key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")
        }
        assert set(held) <= set(wanted)  # tied tensors are there once
        assert {value.data_ptr() for value in wanted.values()} == {wanted[key].data_ptr() for key in held}
        assert_equal(held, {key: wanted[key] for key in held})


@prepares(checkpoint_jobs.plan, lambda: planned("pp2-tp2"))
def test_torch_reads_a_checkpoint(save, tmp_path):
    """Stages and shards come as whole tensors."""
    for mesh, name in (("dp2-fsdp", "mlp"), ("pp2-tp2", "gpt2")):
        folder, _ = save(mesh, name)
        read_by_torch(folder, read_state_dict(folder), tmp_path / "whole.pt")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["dp2-fsdp", "one"])
def test_any_mesh_reads_a_pipelines(ranks, save, target):
    """Tied embeddings are in both stages."""
    reshard(ranks, save, "pp2", [target], "gpt2")


@prepares(checkpoint_jobs.plan, lambda source, targets, name: planned(targets[0], name))
@pytest.mark.parametrize(
    ("source", "targets", "name"),
    [
        ("pp2-tp2", ["dp2-fsdp"], "gpt2"),
        pytest.param("pp2-tp2", ["dp4-fsdp", "one"], "gpt2", marks=pytest.mark.slow),
        pytest.param("dp2-fsdp", ["pp2-zbv"], "bert", marks=pytest.mark.slow),
    ],
)
def test_any_mesh_reads_shards(ranks, save, source, targets, name):
    """Shards of replicas, and of the tp axis."""
    reshard(ranks, save, source, targets, name)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["dp2-pp2-fsdp", "dp4-hybrid", "dp2-tp2-fsdp"])
def test_four_ranks_and_back(ranks, save, source):
    reshard(ranks, save, source, ["dp4-fsdp", "pp2-tp2", "one", "dp2-pp2-ddp"], "gpt2")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_pieces_of_all_ranks_are_the_whole(dim, blocks, tp):
    whole = torch.randn(12, 12)
    layout = Shard(dim, blocks)
    joined = torch.full_like(whole, torch.nan)
    for rank in range(tp):
        pieces = find_pieces(layout.local(whole, tp, rank), layout, tp, rank)
        assert len(pieces) == blocks
        for piece in pieces:
            (row, column), (height, width) = piece.offsets, piece.tensor.shape
            rows, columns = slice(row, row + height), slice(column, column + width)
            assert joined[rows, columns].isnan().all()
            joined[rows, columns] = piece.tensor
            assert piece.whole == (12, 12)
    assert torch.equal(joined, whole)


@pytest.fixture(scope="module")
def saved(save):
    """A folder with two checkpoints, and the model of the second."""
    folder, found = save("dp2-fsdp", "mlp")
    return folder, found[0]["model"]


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "text"),
    [
        ("__1_0.distcp", truncate, r"__1_0.distcp has \d+ bytes of \d+"),
        ("__0_0.distcp", flip, "__0_0.distcp has another checksum"),
        (".metadata", flip, ".metadata has another checksum"),
        ("__0_0.distcp", Path.unlink, "cannot be read: No such file"),
        ("manifest.json", Path.unlink, "has no manifest"),
        ("manifest.json", truncate, "is not JSON, it was cut short"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_taken(saved, tmp_path, file, damage, text):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    newest, before = list_checkpoints(folder)
    assert_equal(read_state_dict(folder), saved[1])
    damage(newest / file)
    with pytest.warns(UserWarning, match=f"{text}.*{before.name} is taken instead"):
        older = read_state_dict(folder)
    assert not torch.equal(older["layers.0.weight"], saved[1]["layers.0.weight"])
    with pytest.raises(CheckpointCorruptError, match=text):
        read_state_dict(newest)
    truncate(before / "manifest.json")
    with pytest.raises(CheckpointCorruptError, match="there is no whole checkpoint"):
        read_state_dict(folder)


@pytest.mark.filterwarnings("ignore:.*is taken instead")
def test_all_ranks_take_the_same(ranks, saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    assert ranks(2).run(checkpoint_jobs.newest, folder=str(folder)) == ["step-000000002"] * 2
    flip(folder / "step-000000002" / "__1_0.distcp")
    assert ranks(2).run(checkpoint_jobs.newest, folder=str(folder)) == ["step-000000001"] * 2


def test_manifests_are_checked(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    path = list_checkpoints(folder)[0] / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"step": 7}))
    with pytest.raises(CheckpointCorruptError, match="was changed"):
        read_state_dict(path.parent)
    path.write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(CheckpointVersionError, match=r"format version 2, .* reads up to 1"):
        read_state_dict(folder)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_state_dict(tmp_path)


def test_torch_reads_what_is_written(saved):
    """It is a checkpoint of torch.distributed.checkpoint like any other."""
    table = FileSystemReader(list_checkpoints(saved[0])[0]).read_metadata().state_dict_metadata
    assert table["model.layers.1.weight"].size == (32, 32)
    assert [chunk.sizes[0] for chunk in table["model.layers.1.weight"].chunks] == [16, 16]
    assert {"optimizer.exp_avg.layers.0.bias", "rng.cpu.1"} <= set(table)


def test_keeps_the_last_good_ones(ranks, tmp_path):
    ranks(2).run(checkpoint_jobs.keeping, folder=str(tmp_path / "run"), other=str(tmp_path / "file"))


def test_another_model_or_optimizer_is_named(ranks, tmp_path):
    ranks(2).run(checkpoint_jobs.mismatches, folder=str(tmp_path))


def test_factors_that_are_read_another_way_are_refused(ranks, tmp_path):
    ranks(2).run(checkpoint_jobs.other_pivots, folder=str(tmp_path))


def test_what_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        TrainingCheckpoints(tmp_path, keep=0)
    with pytest.raises(ProcessGroupError, match="read_state_dict"):
        TrainingCheckpoints(tmp_path)


@pytest.mark.slow
def test_kill_9_under_torchrun_changes_nothing(ranks, tmp_path):
    straight = ranks(2).run(checkpoint_jobs.go_on, steps=5, **MESHES["dp2-ddp"])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--max-restarts=2", "--monitor-interval=0.1"),
            *(checkpoint_jobs.__file__, str(tmp_path), "5", "2"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "exitcode: -9" in done.stderr
    for rank, one in enumerate(straight):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["start"] == 3
        assert found["seen"] == {str(step): list(one["seen"][step]) for step in (3, 4)}
