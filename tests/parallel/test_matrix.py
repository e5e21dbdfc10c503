"""The matrix of docs/parallel.md: every model on every mesh, with every way to share states."""

import math

import pytest
from parallel import matrix_jobs
from parallel import ranks as processes
from parallel.prepared import prepares
from parallel.training import plan_training

MODELS = ("llama", "gpt2", "bert", "vit", "t5", "whisper", "resnet", "unet", "mixtral", "convnext")
DDP, ZERO2 = {"data_parallel": "ddp"}, {"data_parallel": "fsdp", "reshard_after_forward": False}
KINDS = {
    "ddp": DDP,
    "zero1": {**DDP, "zero1": True},
    "zero2": ZERO2,
    "zero3": {**ZERO2, "reshard_after_forward": True},
}
HYBRID = {**KINDS["zero3"], "shard_size": 2}
MESHES = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "dp2-pp2-tp2": {"dp": 2, "pp": 2, "tp": 2},
}
LAYOUTS = {
    name if kind is None else f"{name}-{kind}": {"mesh": mesh, **(KINDS[kind] if kind else {})}
    for name, mesh in MESHES.items()
    for kind in (KINDS if "dp" in mesh else (None,))
} | {
    "dp4-hybrid": {"mesh": {"dp": 4}, **HYBRID},
    "dp4-tp2-hybrid": {"mesh": {"dp": 4, "tp": 2}, **HYBRID},
    "dp4-pp2-hybrid": {"mesh": {"dp": 4, "pp": 2}, **HYBRID},
}
# What no other test trains on such a mesh.
QUICK = [("tp2", "llama", "exact")]


def planned(layout, name, way):
    """What the ranks of a quick row ask for."""
    asked = {"name": name, "mesh": LAYOUTS[layout]["mesh"], "count": matrix_jobs.MICROBATCHES}
    return {**asked, **matrix_jobs.precision(name, way)}


def run(ranks, layout, name, **options):
    options |= LAYOUTS[layout]
    count = math.prod(options["mesh"].values())
    return ranks(count).run(matrix_jobs.train_both_ways, name=name, **options)


@prepares(plan_training, planned)
@pytest.mark.parametrize(("layout", "name", "way"), QUICK)
def test_quick(ranks, layout, name, way):
    run(ranks, layout, name, ways=[way])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_matrix(ranks, record_property, layout, name):
    processes.stop()  # torch remembers meshes of groups that are gone
    answers = run(ranks, layout, name)
    for way in answers[0]:
        record_property(way, max(answer[way] for answer in answers))
