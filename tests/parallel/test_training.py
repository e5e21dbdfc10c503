"""Every loss, gradient and buffer of many ranks is that of one process, over three optimizer steps."""

import pytest
from parallel.prepared import prepares
from parallel.training import plan_training, train_and_compare

INTERLEAVED = {"schedule": "interleaved"}
LAYOUTS = {
    2: {
        "dp2-ddp": {"mesh": {"dp": 2}, "data_parallel": "ddp"},
        "dp2-fsdp": {"mesh": {"dp": 2}, "data_parallel": "fsdp"},
        "dp2-fsdp-zero2": {"mesh": {"dp": 2}, "data_parallel": "fsdp", "reshard_after_forward": False},
        "pp2-gpipe": {"mesh": {"pp": 2}, "schedule": "gpipe"},
        "pp2-1f1b": {"mesh": {"pp": 2}},
        "pp2-interleaved": {"mesh": {"pp": 2}, "part": INTERLEAVED},
        "pp2-zero_bubble": {"mesh": {"pp": 2}, "schedule": "zero_bubble"},
        "pp2-zero_bubble-interleaved": {"mesh": {"pp": 2}, "part": INTERLEAVED, "schedule": "zero_bubble"},
        "pp2-zbv": {"mesh": {"pp": 2}, "part": INTERLEAVED, "schedule": "zbv"},
        "tp2": {"mesh": {"tp": 2}},
    },
    4: {
        "pp4-1f1b": {"mesh": {"pp": 4}},
        "dp4-hybrid": {"mesh": {"dp": 4}, "data_parallel": "fsdp", "shard_size": 2},
        "dp2-pp2-ddp": {"mesh": {"dp": 2, "pp": 2}, "data_parallel": "ddp"},
        "dp2-pp2-ddp-zbv": {
            "mesh": {"dp": 2, "pp": 2},
            "data_parallel": "ddp",
            "part": INTERLEAVED,
            "schedule": "zbv",
        },
        "dp2-pp2-fsdp": {"mesh": {"dp": 2, "pp": 2}, "data_parallel": "fsdp"},
        "dp2-pp2-fsdp-zero3": {
            "mesh": {"dp": 2, "pp": 2},
            "data_parallel": "fsdp",
            "reshard_after_forward": True,
        },
        "dp2-pp2-fsdp-zero_bubble": {
            "mesh": {"dp": 2, "pp": 2},
            "data_parallel": "fsdp",
            "part": INTERLEAVED,
            "schedule": "zero_bubble",
        },
        "dp2-tp2-ddp": {"mesh": {"dp": 2, "tp": 2}, "data_parallel": "ddp"},
        "dp2-tp2-fsdp": {"mesh": {"dp": 2, "tp": 2}, "data_parallel": "fsdp"},
        "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}},
        "pp2-tp2-zbv": {"mesh": {"pp": 2, "tp": 2}, "part": INTERLEAVED, "schedule": "zbv"},
    },
    8: {
        "dp2-pp2-tp2-ddp": {"mesh": {"dp": 2, "pp": 2, "tp": 2}, "data_parallel": "ddp"},
        "dp2-pp2-tp2-fsdp": {"mesh": {"dp": 2, "pp": 2, "tp": 2}, "data_parallel": "fsdp"},
        "dp2-pp2-tp2-fsdp-zero_bubble": {
            "mesh": {"dp": 2, "pp": 2, "tp": 2},
            "data_parallel": "fsdp",
            "part": INTERLEAVED,
            "schedule": "zero_bubble",
        },
    },
}
# Other models are trained so in every run, or what these combine is trained apart.
SELDOM = (
    *(
        "dp4-hybrid",
        "dp2-pp2-ddp",
        "dp2-pp2-ddp-zbv",
        "dp2-pp2-fsdp",
        "dp2-pp2-fsdp-zero3",
        "dp2-tp2-ddp",
        "dp2-tp2-fsdp",
        "pp2-tp2-zbv",
    ),
    *LAYOUTS[8],
    *("dp2-fsdp-zero2", "pp2-1f1b", "pp2-zero_bubble", "pp2-zero_bubble-interleaved", "tp2"),
)
MODELS = ("mlp", "bert", "gpt2", "vit", "resnet")
# Masks that cross and tied weights, each where it can go wrong; other forms and batch norms.
QUICK = [(2, "pp2-1f1b", "bert", False), (2, "pp2-zero_bubble", "gpt2", True)]
CHOSEN = [*QUICK, (2, "pp2-gpipe", "unet", False), (2, "tp2", "resnet", False)]
ALL = [
    (count, layout, name, sketched)
    for count, layouts in LAYOUTS.items()
    for layout in layouts
    for name in MODELS
    for sketched in (False, True)
    if (count, layout, name, sketched) not in CHOSEN
] + [(2, layout, name, False) for layout in LAYOUTS[2] for name in ("unet", "nn_transformer")]


def planned(count, layout, name="mlp", sketched=False):
    """What `train_and_compare` asks for."""
    options = LAYOUTS[count][layout]
    asked = {"mesh": options["mesh"], "part": options.get("part"), "count": 4, "training": True}
    return {"name": name, "sketched": sketched, "double": in_double(name), **asked}


def in_double(name):
    """Of ReLUs: one whose input rounding moves across zero changes gradients by percents."""
    return name == "resnet"


@prepares(plan_training, planned)
@pytest.mark.parametrize(
    ("count", "layout"),
    [
        pytest.param(count, layout, marks=pytest.mark.slow if layout in SELDOM else ())
        for count, layouts in LAYOUTS.items()
        for layout in layouts
    ],
)
def test_mlp(ranks, count, layout):
    options = LAYOUTS[count][layout]
    held = ranks(count).run(train_and_compare, name="mlp", **options)
    assert set().union(*(answer["parameters"] for answer in held)) == {
        f"layers.{layer}.{leaf}" for layer in range(6) for leaf in ("weight", "bias")
    }
    assert all(bool(answer["shards"]) == ("tp" in options["mesh"]) for answer in held)


@prepares(plan_training, planned)
@pytest.mark.parametrize(
    ("count", "layout", "name", "sketched"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in CHOSEN],
)
def test_models(ranks, count, layout, name, sketched):
    options = LAYOUTS[count][layout]
    ranks(count).run(train_and_compare, name=name, sketched=sketched, double=in_double(name), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_nothing_is_left_but_rounding(ranks, name):
    held = ranks(2).run(train_and_compare, name=name, sketched=True, double=True, mesh={"tp": 2})
    assert {"column", "row"} <= held[0]["kinds"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "layout", "name", "sketched"), ALL)
def test_every_model_on_every_layout(ranks, count, layout, name, sketched):
    options = LAYOUTS[count][layout]
    ranks(count).run(train_and_compare, name=name, sketched=sketched, double=in_double(name), **options)


@prepares(plan_training, lambda: {**planned(2, "pp2-1f1b", "odd_convnet"), "training": False})
def test_graph_read_in_eval_mode_trains_too(ranks):
    ranks(2).run(train_and_compare, name="odd_convnet", training=False, **LAYOUTS[2]["pp2-1f1b"])
