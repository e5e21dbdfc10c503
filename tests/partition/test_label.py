"""Shards by cuts: Megatron's layout, sketched layers, and how the result is shown."""

import functools
import json
from collections import Counter

import pytest
import torch
from partition.shard_problems import device
from torch import nn

from panther_compile.errors import ConfigError, MeshError, StageMemoryError
from panther_compile.layers import SketchedLinear
from panther_compile.partition import partition_model
from panther_compile.partition.shards.collectives import BUCKETED_GRADIENTS
from panther_compile.partition.shards.placements import Replicate, Shard

# --------------------------------------------------------------------------------------- transformers


@functools.cache
def whole_sequences(name):
    """A transformer's partition without sequence parallelism."""
    model, inputs = transformer(name)
    return partition_model(model, inputs, mesh={"tp": 2}, hardware="h100", sequence_parallel=False)


def transformer(name):
    """Two layers, wide enough to be worth two H100s, without data."""
    import transformers as hf

    sizes = dict(hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096)
    calm = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ids = torch.zeros(8, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        if name == "bert":
            model, inputs = hf.BertModel(hf.BertConfig(**sizes, **calm)), {"input_ids": ids}
        elif name == "gpt2":
            config = hf.GPT2Config(
                n_embd=1024, n_layer=2, n_head=16, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0
            )
            model, inputs = hf.GPT2Model(config), {"input_ids": ids}
        elif name == "vit":
            config = hf.ViTConfig(**sizes, **calm)
            model = hf.ViTForImageClassification(config)
            inputs = {"pixel_values": torch.zeros(16, 3, 224, 224)}
        else:
            layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
            model = nn.Sequential(nn.Embedding(1000, 1024), nn.TransformerEncoder(layer, 2))
            inputs = ids
    return model.train(), inputs


TRANSFORMERS = pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "encoder", "vit"))]
)


@TRANSFORMERS
def test_megatrons_layout_is_found(name):
    part = whole_sequences(name)
    layers = [shard for shard in part.shards if "mbedding" not in shard.name and shard.kind != "sharded"]
    kinds = {}
    for shard in layers:
        kinds.setdefault(shard.kind, []).append(shard.name)
    # Attention output and the second layer of the MLP by rows, all others by columns.
    assert len(kinds["row"]) == 4
    ends = ("output.dense", "c_proj", "o_proj", "fc2", "out_proj", "linear2")
    assert all(row.endswith(ends) for row in kinds["row"])
    assert len(kinds["column"]) == (4 if name in ("gpt2", "encoder") else 8)
    assert part.sharding.plan.gap == 0
    rows = {shard.node for shard in layers if shard.kind == "row"}
    forward = [one for one in part.collectives if one.phase == "forward"]
    assert {one.tensor for one in forward if one.kind == "all_reduce"} >= rows
    assert all(one.kind == "all_reduce" for one in forward)
    assert len(forward) == 4
    assert {one.bytes for one in forward} == {part.stages[0].outputs[0].shape[0] * 1024 * 4 * tokens(part)}
    # Heads stay together: attention runs on half of them.
    steps = part.sharding.plan.steps
    attentions = [step for node, step in steps.items() if node.startswith("scaled_dot_product")]
    assert [step.out for step in attentions] == [Shard(1)] * 2


@TRANSFORMERS
def test_megatrons_sequence_parallelism_is_found(name):
    """Between the layers that are sharded everything is on shards of the sequence; the bytes are the same."""
    model, inputs = transformer(name)
    part = partition_model(model, inputs, mesh={"tp": 2}, hardware="h100")
    whole = whole_sequences(name)
    assert whole.sequence == ()
    ends = {shard.node for shard in part.shards if shard.kind == "row"}
    assert ends == {shard.node for shard in whole.shards if shard.kind == "row"}
    assert ends <= set(part.sequence)
    norms = {node for node in part.stage_of if node.startswith("layer_norm")}
    assert norms <= set(part.sequence)
    assert {shard.kind for shard in part.shards if shard.node in norms} == {"sequence"}
    # The axis before the features; ViT's 197 positions do not divide, its images do.
    steps = part.sharding.plan.steps
    assert {steps[norm].out for norm in norms} == {Shard(0 if name == "vit" else 1)}
    # Where the rows of all sequences are stored one after the other, each sequence is divided.
    assert name != "gpt2" or {steps[end].out for end in ends} == {Shard(0, 8)}
    attentions = [step for node, step in steps.items() if node.startswith("scaled_dot_product")]
    assert [step.out for step in attentions] == [Shard(1)] * 2
    counts = Counter((one.phase, one.kind) for one in part.collectives if one.tensor in ends)
    assert counts[("forward", "reduce_scatter")] == len(ends) == 4
    assert counts[("forward", "all_reduce")] == 0
    summed = [one for one in part.collectives if one.kind == "all_reduce"]
    assert [one.bytes for one in summed if one.tensor == BUCKETED_GRADIENTS] == [joined_bytes(part)]
    assert part.step_seconds < whole.step_seconds
    assert part.stages[0].activation_bytes < 0.95 * whole.stages[0].activation_bytes


def joined_bytes(part):
    """Bytes of the parameters that are used on the sequence."""
    used = {
        name
        for step in part.sharding.plan.steps.values()
        for name, state in step.needs.items()
        if state is Replicate.BUCKETED_GRADIENT
    }
    nodes = {node.name: node for node in part.captured.graph_module.graph.nodes}
    return 4 * sum(nodes[name].meta["tensor"].numel() for name in used)


def test_axes_that_do_not_divide_say_so():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16))
    part = partition_model(model, torch.randn(3, 5, 16), mesh={"tp": 2}, hardware=device(1e9))
    assert part.sequence == ()
    assert dict(part.whole)["0"] == "its axes of 3 and 5 do not divide by 2"
    with pytest.raises(MeshError, match=r"(?s)nothing of Sequential can run on shards.*axes of 3 and 5"):
        partition_model(
            model, torch.randn(3, 5, 16), mesh={"tp": 2}, hardware=device(1e9), sequence_parallel=True
        )
    with pytest.raises(ConfigError, match="sequence_parallel='yes', wanted one of 'auto', True, False"):
        partition_model(model, torch.randn(4, 16), mesh={"tp": 2}, sequence_parallel="yes")


def test_memory_decides_where_time_does_not():
    """Slow messages leave the sequence whole, unless the activations do not fit or it is asked for."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(torch.exp(self.norm(x)))))

    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(64, 64)
    slow = device(1e8, 1e12, 1e9, latency=1e-6)
    options = {"mesh": {"tp": 2}, "hardware": slow}
    fast = partition_model(model, x, **options)
    lean = partition_model(model, x, sequence_parallel=True, **options)
    assert fast.sequence == ()
    assert json.loads(lean.to_json())["sequence"] == list(lean.sequence)
    assert f"{len(lean.sequence)} operations give shards of the sequence" in str(lean)
    assert "0.norm: sequence (0.norm.weight whole, 0.norm.bias whole)" in str(lean)
    assert lean.step_seconds > fast.step_seconds
    before, after = fast.stages[0].memory_bytes, lean.stages[0].memory_bytes
    assert after < 0.9 * before
    limit = (before + after) // 2
    fitting = partition_model(model, x, memory_per_device=limit, **options)
    assert fitting.sequence
    assert fitting.stages[0].memory_bytes <= limit
    assert fast.step_seconds < fitting.step_seconds
    with pytest.raises(StageMemoryError):
        partition_model(model, x, memory_per_device=limit, sequence_parallel=False, **options)


def test_weights_are_divided_where_they_do_not_fit():
    """Slow messages leave all layers whole; shards of the weights alone fit."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(4, 64)
    options = {"mesh": {"tp": 2}, "hardware": device(1e12, 1e12, 1e6), "sequence_parallel": False}
    whole = partition_model(model, x, **options)
    assert whole.shards == ()
    held = whole.stages[0].memory_bytes
    for share, kinds in ((0.8, {"column", "row"}), (0.51, {"column", "row"})):
        part = partition_model(model, x, memory_per_device=int(share * held), **options)
        assert {shard.kind for shard in part.shards} <= kinds
        assert whole.step_seconds < part.step_seconds
        assert part.stages[0].memory_bytes <= share * held
    with pytest.raises(StageMemoryError):
        partition_model(model, x, memory_per_device=int(0.49 * held), **options)


def tokens(part):
    """Tokens of a row of the batch."""
    nodes = {node.name: node for node in part.captured.graph_module.graph.nodes}
    norm = next(node for name, node in nodes.items() if name.startswith("layer_norm"))
    return norm.meta["tensor"].numel() // (norm.meta["tensor"].shape[0] * 1024)


def test_heads_that_do_not_divide_keep_attention_whole():
    layer = nn.TransformerEncoderLayer(48, 3, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    part = partition_model(model, torch.randn(4, 8, 48), mesh={"tp": 2}, hardware=device(1e9))
    assert not any("scaled_dot_product" in node for node in part.sharding.plan.steps)
    assert {shard.name: shard.kind for shard in part.shards}["layers.0.linear1"] == "column"


# ------------------------------------------------------------------------------------ sketched layers


def sketched_mlp(form, tokens):
    with torch.device("meta"):
        first = SketchedLinear(1024, 4096, 256, form=form)
        second = SketchedLinear(4096, 1024, 256, form=form)
        return nn.Sequential(nn.LayerNorm(1024), first, nn.GELU(), second), torch.empty(8, tokens, 1024)


@pytest.mark.parametrize("form", ["pair", "pivoted"])
def test_sketched_layers_are_cut_at_the_bottleneck(form):
    model, x = sketched_mlp(form, 1024)
    part = partition_model(model, x, mesh={"tp": 2}, hardware="h100")
    assert {shard.name: shard.kind for shard in part.shards} == {"1.up": "column", "3.down": "row"}
    rank_sized = 8 * 1024 * 256 * 4
    activations = [one for one in part.collectives if not one.tensor.endswith("weight")]
    assert [(one.kind, one.bytes) for one in activations] == [("all_reduce", rank_sized)] * 2
    weights = [one.bytes for one in part.collectives if one.tensor.endswith("weight")]
    # In the pivoted form the columns of a device are uneven: the factor is held whole, its gradient summed.
    assert weights == ([256 * (4096 - 256) * 4] if form == "pivoted" else [])
    assert part.shards[1].parameters == {"3.down.weight": None if form == "pivoted" else 1}


def test_few_tokens_are_not_worth_the_gradient_of_a_whole_factor():
    model, x = sketched_mlp("pivoted", 64)
    part = partition_model(model, x, mesh={"tp": 2}, hardware="h100")
    assert part.shards == ()
    assert {reason for _, reason in part.whole} == {"its collectives take longer than the work they divide"}


# ------------------------------------------------------------------------------------------- results


class Mlp(nn.Module):
    def __init__(self, width=64, classes=6):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(x + self.second(torch.relu(self.first(x))))


def test_table_json_and_lighter_stages():
    x = torch.randn(32, 64)
    hardware = device(1e9, 1e12, 1e10)
    whole = partition_model(Mlp(classes=7), x, mesh={"tp": 1}, hardware=hardware)
    part = partition_model(Mlp(classes=7), x, mesh={"tp": 2}, hardware=hardware)
    assert whole.shards == whole.collectives == whole.whole == ()
    kinds = {shard.name: shard.kind for shard in part.shards}
    assert kinds["first"] == "column"
    assert kinds["second"] == "row"
    shown = str(part)
    for text in ("first: column (first.weight axis 0", "second: row", "forward all_reduce 0.008 MB"):
        assert text in shown
    read = json.loads(part.to_json())
    assert [shard["name"] for shard in read["shards"]] == list(kinds)
    assert read["shards"][1]["parameters"] == {"second.weight": 1, "second.bias": None}
    assert len(read["collectives"]) == len(part.collectives)
    before, after = whole.stages[0], part.stages[0]
    assert 0.5 < after.forward_seconds / before.forward_seconds < 0.6
    assert after.parameter_bytes < 0.6 * before.parameter_bytes
    assert after.optimizer_bytes < 0.6 * before.optimizer_bytes


def test_alike_layers_are_told_in_one_line():
    model = nn.Sequential(nn.Sequential(*(Mlp(classes=64) for _ in range(3))), nn.ReLU())
    part = partition_model(model, torch.randn(32, 64), mesh={"tp": 2}, hardware=device(1e9, 1e12, 1e9))
    assert len([shard for shard in part.shards if shard.name.endswith("second")]) == 3
    assert "3 x 0.*.second: row (0.*.second.weight axis 1" in str(part)


def test_uneven_layers_say_so():
    model = nn.Sequential(nn.Linear(15, 7), nn.ReLU(), nn.Linear(7, 5))
    part = partition_model(model, torch.randn(64, 15), mesh={"tp": 2}, hardware=device(1e6))
    assert part.shards == ()
    assert dict(part.whole)["0"] == "7 outputs do not divide by 2 and 15 inputs do not divide by 2"


def test_between_stages_every_tensor_is_whole():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    part = partition_model(model, torch.randn(64, 64), mesh={"pp": 2, "tp": 2}, hardware=device(1e9))
    steps = part.sharding.plan.steps
    gathered = {one.tensor for one in part.collectives if (one.stage, one.kind) == (0, "all_gather")}
    for spec in part.stages[0].outputs:
        assert spec.name not in steps or steps[spec.name].out is None or spec.name in gathered
    assert {one.stage for one in part.collectives} == {0, 1}
    assert part.stages[0].sent_bytes == 64 * 64 * 4


def test_slow_links_leave_everything_whole():
    part = partition_model(Mlp(), torch.randn(32, 64), mesh={"tp": 2}, hardware=device(1e12, 1e12, 1e6))
    assert part.shards == part.collectives == ()
    assert {name for name, _ in part.whole} == {"first", "second", "head"}
