"""A plan is a recipe: given, edited, kept as JSON, carried out again."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.cli import main
from panther_compile.errors import ConfigError, ConfigTypeError, RankError
from panther_compile.records import SketchPlan

OPTIONS = {"progress": False}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def batches(count=6, rows=64):
    generator = torch.Generator().manual_seed(7)
    mixed = torch.randn(12, 48, generator=generator)
    return [torch.randn(rows, 12, generator=generator) @ mixed for _ in range(count)]


def edited(plan, **changes):
    """The plan through JSON, in which choices of layers, or whole entries, were changed."""
    document = json.loads(plan.to_json())
    for line in document["layers"]:
        if line["name"] in changes:
            line["choice"] = changes[line["name"]] and {**line["choice"], **changes[line["name"]]}
    return SketchPlan.from_json(json.dumps(document))


@pytest.fixture(scope="module")
def plan():
    return pc.plan_sketch(mlp(), 0.5, min_params=0, allow_slower=True, **OPTIONS)


def test_the_same_sketch(plan):
    model = mlp()
    assert SketchPlan.from_json(plan.to_json()) == plan
    wanted = pc.sketchify(model, 0.5, min_params=0, allow_slower=True, **OPTIONS)
    found = pc.sketchify(model, plan=plan, **OPTIONS)
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    report = pc.sketch_report(found)
    assert report.plan.sketched == plan.sketched
    assert report.achieved_ratio == pc.sketch_report(wanted).achieved_ratio


def test_an_edited_rank_is_carried_out(plan):
    change = {"rank": 3, "ranks": [99], "stored_numbers": 1, "error": 0.0}
    small = pc.sketchify(mlp(), plan=edited(plan, **{"2": change}), **OPTIONS)
    assert small[2].rank == 3
    row = next(row for row in pc.sketch_report(small).rows if row.name == "2")
    assert row.ranks == (3,)
    assert row.stored_numbers == sum(p.numel() for p in small[2].parameters())


def test_a_layer_left_dense(plan):
    model = mlp()
    small = pc.sketchify(model, plan=edited(plan, **{"0": None}), **OPTIONS)
    assert torch.equal(small[0].weight, model[0].weight)
    assert type(small[0]) is nn.Linear
    reasons = {row.name: row.reason for row in pc.sketch_report(small).skipped}
    assert reasons["0"] == "left dense by the plan"


def test_ranks_that_data_chose_serve_a_sibling():
    model, sibling = mlp(), mlp(seed=1)
    data = batches()
    small = pc.sketchify(model, 0.4, data=data, min_params=0, allow_slower=True, narrow=False, **OPTIONS)
    plan = pc.sketch_report(small).plan
    other = pc.sketchify(sibling, plan=SketchPlan.from_json(plan.to_json()), data=data, **OPTIONS)
    assert [row.ranks for row in pc.sketch_report(other).rows] == [
        row.ranks for row in pc.sketch_report(small).rows
    ]
    again = pc.sketchify(model, plan=plan, data=data, **OPTIONS)
    for name, value in small.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_narrow_plan_needs_data_in_which_layers_are_coupled():
    model, data = mlp(), batches()
    small = pc.sketchify(model, 0.3, data=data, min_params=0, allow_slower=True, **OPTIONS)
    plan = pc.sketch_report(small).plan
    if not any(line.choice.link for line in plan.sketched):
        first, second = (line for line in plan.layers if line.name in ("0", "2"))
        narrow = replace(first.choice, scheme="narrow", rank=20, ranks=(20,), link=("0", "2"))
        plan = replace(
            plan,
            layers=(replace(first, choice=narrow), replace(second, choice=narrow), *plan.layers[2:]),
        )
    with pytest.raises(ConfigError, match=r"narrowed with .*, which needs data="):
        pc.sketchify(model, plan=plan, **OPTIONS)
    found = pc.sketchify(model, plan=plan, data=data, **OPTIONS)
    assert [row.scheme for row in pc.sketch_report(found).rows].count("narrow") >= 2
    other = edited(plan)
    lines = tuple(
        line
        if line.choice is None or not line.choice.link
        else replace(line, choice=replace(line.choice, link=line.choice.link[::-1]))
        for line in other.layers
    )
    with pytest.raises(ConfigError, match="do not hand features on alone"):
        pc.sketchify(model, plan=replace(other, layers=lines), data=data, **OPTIONS)


def test_attention_and_embeddings_by_their_plan():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"words": nn.Embedding(80, 32), "mix": nn.MultiheadAttention(32, 4, batch_first=True)}
    )
    plan = pc.plan_sketch(model, 0.5, include="*", min_params=0, allow_slower=True, **OPTIONS)
    small = pc.sketchify(model, plan=plan, **OPTIONS)
    assert {row.name for row in pc.sketch_report(small).sketched} == {line.name for line in plan.sketched}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 0}, RankError, r"rank 0 for 2 \(96x96\), wanted 1\.\.95"),
        ({"rank": 96}, RankError, r"rank 96 for 2"),
        ({"scheme": "channel"}, ConfigError, r"stores 2 as 'channel', wanted one of pivoted"),
        ({"sharing": ["2", "4"]}, ConfigError, r"2 to share a factor with 4, which needs data="),
    ],
)
def test_what_cannot_be_carried_out(plan, change, error, message):
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        pc.sketchify(model, plan=edited(plan, **{"2": change}), **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_plan_of_another_model(plan):
    with pytest.raises(ConfigError, match=r"the plan's 0 is 96x48, the model's is 96x64"):
        pc.sketchify(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96)), plan=plan, **OPTIONS)
    with pytest.raises(ConfigError, match=r"the plan sketches 2 \(96x96\): the model has no such weight"):
        pc.sketchify(mlp()[:1], plan=plan, **OPTIONS)


def test_options_that_a_plan_rules_out(plan):
    for options in (
        {"ratio": 0.5},
        {"include": "0"},
        {"round_rank_to": 8},
        {"objective": "latency", "example_inputs": batches()[0]},
    ):
        with pytest.raises(ConfigError, match=r"= conflicts with plan="):
            pc.sketchify(mlp(), plan=plan, **options, **OPTIONS)
    with pytest.raises(ConfigTypeError, match=r"plan is a str, wanted a SketchPlan"):
        pc.sketchify(mlp(), plan=plan.to_json())
    with pytest.raises(ConfigError, match="the plan sketches no weight"):
        pc.sketchify(mlp(), plan=replace(plan, layers=()))
    for text in ("", "[]", '{"layers": [{}], "ratio": "1", "route": ""}', "[" * 100_000):
        with pytest.raises(ConfigError, match="no plan in JSON"):
            SketchPlan.from_json(text)
    for given in (None, 3, {}, Path("plan.json")):
        with pytest.raises(ConfigTypeError, match=f"the plan is a {type(given).__name__}, wanted the text"):
            SketchPlan.from_json(given)


@pytest.mark.parametrize("rank", [2.5, "7", None])
def test_a_rank_that_is_no_integer_is_named(plan, rank):
    message = rf"layers, choice, rank is {re.escape(repr(rank))}, wanted int"
    with pytest.raises(ConfigError, match=message):
        edited(plan, **{"0": {"rank": rank}})


def test_a_layer_has_one_line(plan):
    twice = replace(plan, layers=(*plan.layers, replace(plan.layers[1], choice=None)))
    with pytest.raises(ConfigError, match="the plan has 2 lines of 2, wanted one"):
        pc.sketchify(mlp(), plan=twice, **OPTIONS)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "made.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "made:build", "--ratio", "0.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    document["layers"][1]["choice"]["rank"] = 16
    Path("plan.json").write_text(json.dumps(document), "utf-16")  # as PowerShell writes what is printed
    assert main(["sketch", "made:build", "small", "--plan", "plan.json", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["1"]["ranks"] == [16]
    assert rows["0"]["ranks"] == document["layers"][0]["choice"]["ranks"]
    assert main(["sketch", "made:build", "other", "--plan", "plan.json", "--ratio", "0.5"]) == 2
    assert main(["sketch", "made:build", "other", "--plan", "none.json"]) == 2
    Path("weights.pt").write_bytes(b"PK\x03\x04\xff")
    capsys.readouterr()
    assert main(["sketch", "made:build", "other", "--plan", "weights.pt"]) == 2
    assert "--plan weights.pt: no plan in JSON" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_plan_with_a_tied_weight_is_carried_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    model[2].weight = model[0].weight
    options = {"progress": False, "min_params": 0, "allow_slower": True, "synthetic": False}
    plan = pc.plan_sketch(model, 0.5, min_params=0, allow_slower=True)
    small, wanted = pc.sketchify(model, plan=plan, progress=False), pc.sketchify(model, 0.5, **options)
    assert small[0].down.weight is small[2].down.weight
    x = torch.randn(3, 96)
    assert torch.equal(small(x), wanted(x))


@pytest.mark.parametrize("rank", [0, 100000])
def test_the_rank_of_a_factor_that_is_shared_for_its_input_is_checked(plan, rank):
    first, other = ({"sharing": ["0", "2"], "rank": rank, "ranks": [rank]} for _ in range(2))
    with pytest.raises(RankError, match=rf"rank {rank} for 0, wanted 1\.\.47 of a shared factor"):
        pc.sketchify(mlp(), plan=edited(plan, **{"0": first, "2": other}), data=batches(), **OPTIONS)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.last = nn.Linear(48, 32), nn.Linear(48, 16), nn.Linear(32, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.last(torch.relu(self.one(x)) * self.two(x).repeat(1, 2)))


@pytest.mark.parametrize("names", [["one", "two"], ["two", "one"]])
def test_numbers_of_a_factor_shared_for_its_input_are_counted_anew(names):
    model, options = Branches(), {"min_params": 0, "allow_slower": True, **OPTIONS}
    plan = pc.plan_sketch(model, 0.5, **options)
    change = {"sharing": names, "rank": 5, "ranks": [12]}
    small = pc.sketchify(model, plan=edited(plan, one=change, two=change), data=batches(), **OPTIONS)
    report = pc.sketch_report(small)
    assert small.one.down.weight is small.two.down.weight
    assert report.plan.stored_numbers == report.replaced_stored_numbers
    assert [line.choice.ranks for line in report.plan.sketched[:2]] == [(5,), (5,)]


def test_layers_of_other_inputs_share_no_factor():
    plan = pc.plan_sketch(Branches(), 0.5, min_params=0, allow_slower=True, **OPTIONS)
    change = {"sharing": ["two", "last"], "rank": 5}
    with pytest.raises(ConfigError, match="two share a factor with last, which have other inputs"):
        pc.sketchify(Branches(), plan=edited(plan, two=change, last=change), data=batches(), **OPTIONS)


def narrow_plan(**changes):
    """A plan of narrow layers 0 and 2, of an `mlp`, with changes of their choices."""
    plan = pc.plan_sketch(mlp(), 0.5, min_params=0, allow_slower=True, **OPTIONS)
    narrow = {"scheme": "narrow", "rank": 20, "ranks": [20], "link": ["0", "2"]}
    return edited(plan, **{name: narrow | changes.get(f"of_{name}", {}) for name in ("0", "2")})


@pytest.mark.parametrize("inner", [[], [7]])
def test_numbers_of_narrow_layers_are_counted_anew(inner):
    plan = narrow_plan(of_2={"ranks": [20, *inner]})
    report = pc.sketch_report(pc.sketchify(mlp(), plan=plan, data=batches(), **OPTIONS))
    assert [row.ranks for row in report.sketched[:2]] == [(20,), (20, *inner)]
    assert report.plan.stored_numbers == report.replaced_stored_numbers


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {key: {"rank": 96} for key in ("of_0", "of_2")},
            RankError,
            r"rank 96 for 0, wanted 1\.\.95 features",
        ),
        (
            {key: {"rank": -1} for key in ("of_0", "of_2")},
            RankError,
            r"rank -1 for 0, wanted 1\.\.95 features",
        ),
        ({"of_2": {"ranks": [20, 20]}}, RankError, r"\[20, 20\] for 2 .*wanted \[20\] or \[20, 1\.\.19\]"),
        ({"of_0": {"ranks": []}}, RankError, r"ranks \[\] for 0 of rank 20, wanted \[20\] or"),
        ({"of_0": {"ranks": [1000]}}, RankError, r"ranks \[1000\] for 0 of rank 20, wanted \[20\] or"),
        ({"of_0": {"rank": 10}}, ConfigError, r"0 keep 10 features .* with 2, but not 2 with 0 as many"),
        (
            {"of_0": {"scheme": "pivoted"}},
            ConfigError,
            r"0 as 'pivoted' narrowed with 0 > 2, wanted 'narrow'",
        ),
    ],
)
def test_ranks_of_narrow_layers_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        pc.sketchify(mlp(), plan=narrow_plan(**changes), data=batches(), **OPTIONS)
