"""Context parallelism in plans: closed forms on small Llamas of grouped queries."""

import functools
import json

import pytest
import torch
import transformers
from torch import nn

import panther_compile as pc
from panther_compile.errors import MeshError, ParallelError
from panther_compile.partition import Hardware, Link, Mesh
from panther_compile.partition.graph.context import divide_sequence
from panther_compile.partition.graph.flow_graph import Costs
from panther_compile.partition.graphs import read_graphs
from panther_compile.partition.replicas import find_context, find_replica_links

pytestmark = pytest.mark.usefixtures("models_are_read_once")

LAYERS, HIDDEN, HEADS, GROUPS, VOCABULARY = 1, 256, 8, 2, 512
FAST, SLOW = Link(1e15, 0.0), Link(1e9, 0.0)


def cluster(intra=FAST, inter=FAST, nodes_of=8):
    return Hardware("test", 1e12, 1e15, 10**15, intra, inter, nodes_of, launch_seconds=0.0)


@functools.cache
def llama(tokens=1024):
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        return model, {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}


KEYS_AND_VALUES = 2 * 1024 * GROUPS * (HIDDEN // HEADS) * 2  # of 1024 positions, in bfloat16


def plan(model, inputs, mesh, **options):
    options = {"hardware": cluster(), "microbatches": 1, "data_parallel": "ddp"} | options
    return pc.partition_model(model, inputs, mesh=mesh, **options)


def test_work_and_memory_are_divided():
    model, inputs = llama()
    whole, half = (plan(model, inputs, {"cp": cp}).stages[0] for cp in (1, 2))
    assert half.forward_seconds == pytest.approx(whole.forward_seconds / 2, rel=1e-3)
    assert half.backward_seconds == pytest.approx(whole.backward_seconds / 2, rel=1e-3)
    assert half.activation_bytes == pytest.approx(whole.activation_bytes / 2, rel=1e-3)
    states = whole.parameter_bytes, whole.gradient_bytes, whole.optimizer_bytes
    assert (half.parameter_bytes, half.gradient_bytes, half.optimizer_bytes) == states
    assert half.memory.gathered == 0  # there is room for it where the loss was
    whole, half = (plan(model, inputs, {"pp": 2, "cp": cp}).stages[0] for cp in (1, 2))
    assert (whole.memory.gathered, half.memory.gathered) == (0, 2 * KEYS_AND_VALUES)


def test_attention_and_the_rest_are_divided():
    model, inputs = llama()
    graphs = read_graphs(model, inputs, (), Costs(cluster()))
    divided = divide_sequence(graphs.captured, graphs.notes, 4)
    kinds = {"attention": 0, "product": 0}
    for node, note in graphs.notes.items():
        before, after = (sum(one.macs for one in notes.operations) for notes in (note, divided[node]))
        assert after == before / 4
        for kind in kinds:
            kinds[kind] += kind in {one.kind for one in note.operations} and before > 0
    assert kinds == {"attention": LAYERS, "product": 7 * LAYERS + 1}


def test_keys_and_values_are_gathered_as_counted_by_hand():
    """Of two groups of queries, each once: not of the eight heads that they are repeated for."""
    model, inputs = llama()
    part = plan(model, inputs, {"cp": 2}, hardware=cluster(intra=SLOW))
    assert [(one.kind, one.phase, one.bytes) for one in part.context] == LAYERS * [
        ("all_gather", "forward", KEYS_AND_VALUES),
        ("all_gather", "backward", KEYS_AND_VALUES),
        ("reduce_scatter", "backward", KEYS_AND_VALUES),
    ]
    hidden = plan(model, inputs, {"cp": 2}, hardware=cluster()).stages[0]
    seconds = LAYERS * SLOW.seconds(KEYS_AND_VALUES / 2)
    assert part.stages[0].forward_seconds - hidden.forward_seconds == pytest.approx(seconds, rel=1e-4)
    assert part.stages[0].backward_seconds - hidden.backward_seconds == pytest.approx(2 * seconds, rel=1e-4)
    sent = {one.purpose: one.intra_node_bytes for one in part.traffic}
    assert sent["context"] == 2 * 3 * LAYERS * KEYS_AND_VALUES / 2


def test_heads_in_shards_gather_their_own():
    model, inputs = llama()
    part = plan(model, inputs, {"cp": 2, "tp": 2})
    assert {one.bytes for one in part.context} == {KEYS_AND_VALUES // 2}
    alone = plan(model, inputs, {"tp": 2})
    assert len(part.collectives) == len(alone.collectives)
    activations = {
        one.tensor: one.bytes for one in alone.collectives if one.tensor != "parameters used on the sequence"
    }
    for one in part.collectives:
        if one.tensor in activations and not one.tensor.endswith("weight"):
            assert one.bytes == activations[one.tensor] // 2


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_states_are_shared_over_dp_and_cp(kind):
    model, inputs = llama()
    alike, part = (plan(model, inputs, mesh, data_parallel=kind) for mesh in ({"dp": 4}, {"dp": 2, "cp": 2}))
    assert part.data_parallel == alike.data_parallel
    assert part.data_parallel.sharers == part.data_parallel.replicas == 4
    assert part.stages[0].memory.states == alike.stages[0].memory.states
    assert part.microbatches_per_second == 2 / part.step_seconds
    sent = [{one.purpose: one.intra_node_bytes for one in each.traffic} for each in (alike, part)]
    assert sent[0]["replicas"] == sent[1]["replicas"] > 0


def test_what_crosses_between_stages_is_divided():
    model, inputs = llama()
    whole, half = (plan(model, inputs, {"pp": 2, "cp": cp}) for cp in (1, 2))
    assert half.cut_bytes == whole.cut_bytes / 2 > 0


def test_long_sequences_take_their_share_of_memory():
    model, inputs = llama(tokens=16384)
    whole, quarter = (plan(model, inputs, {"cp": cp}).device_memory_bytes for cp in (1, 4))
    assert 0.25 < quarter / whole < 0.28


def test_one_device_a_sequence_changes_nothing():
    model, inputs = llama()
    alone, named = (
        plan(model, inputs, mesh, recompute="auto")
        for mesh in ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "cp": 1})
    )
    assert alone.to_json() == named.to_json()
    assert str(alone) == str(named)
    assert str(alone.mesh) == "dp 2 x pp 1 x tp 2"
    assert {one.purpose for one in alone.traffic} == {"pipeline", "shards", "replicas", "tied"}


def test_the_mesh_is_told_and_read():
    model, inputs = llama()
    part = plan(model, inputs, {"dp": 2, "cp": 2})
    read = json.loads(part.to_json())
    assert Mesh.read(read["mesh"]) == part.mesh == Mesh(dp=2, cp=2)
    assert len(read["context"]) == 3 * LAYERS
    assert "dp 2 x pp 1 x cp 2 x tp 1" in str(part)
    assert f"sequences are divided over 2 devices: {LAYERS} attentions gather" in str(part)


def test_ranks_of_a_sequence_are_neighbours():
    mesh = Mesh(dp=2, pp=2, cp=2, tp=2)
    ranks = [
        mesh.rank(dp, pp, tp, cp) for dp in range(2) for pp in range(2) for cp in range(2) for tp in range(2)
    ]
    assert ranks == list(range(16))
    hardware = cluster(inter=SLOW)
    assert find_context(hardware, mesh).link == FAST
    assert find_context(hardware, Mesh(cp=4, tp=8)).link == SLOW
    # Two along cp in a node, and another node for each replica: both devices share its links.
    assert find_replica_links(hardware, mesh, 4).sharers.bytes_per_second == 2 * SLOW.bytes_per_second
    assert find_replica_links(hardware, mesh, 2).sharers == FAST


class Attentions(nn.Module):
    """One over each input, after a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, *inputs):
        return [nn.functional.scaled_dot_product_attention(*[self.layer(x)] * 3) for x in inputs]


def test_what_has_no_sequence_is_refused():
    with pytest.raises(
        MeshError, match="cp=2 divides a sequence, and the graph has no scaled_dot_product_attention"
    ):
        plan(nn.Linear(8, 8), torch.randn(4, 8), {"cp": 2})
    long, short, odd = (torch.zeros(2, 4, positions, 16) for positions in (32, 16, 34))
    with pytest.raises(MeshError, match="its 34 positions are not divisible by 4"):
        plan(Attentions(), (odd,), {"cp": 2})
    with pytest.raises(MeshError, match="attention is over several, of 16, 32 positions"):
        plan(Attentions(), (long, short), {"cp": 2})


def test_devices_divide_sequences_where_asked():
    model, inputs = llama()
    options = {"devices": 4, "hardware": cluster(), "global_batch": 8}
    part = pc.partition_model(model, inputs, context_parallel=2, **options)
    assert part.mesh.cp == 2
    assert part.mesh.dp * part.microbatches == 8
    assert pc.partition_model(model, inputs, **options).mesh.cp == 1
    # One long sample in all, over slow links: keys and values are fewer bytes than what layers exchange.
    options |= {"devices": 2, "global_batch": 1, "hardware": cluster(intra=SLOW)}
    auto = pc.partition_model(*llama(tokens=16384), context_parallel="auto", **options)
    assert auto.mesh == Mesh(cp=2)
    with pytest.raises(MeshError, match=r"no mesh of 12 devices .*\n.*are not divisible by 6"):
        pc.partition_model(model, inputs, context_parallel=3, **options | {"devices": 12, "global_batch": 12})
    for wanted, said in ((0, "wanted a whole number"), ("all", "or 'auto'")):
        with pytest.raises(MeshError, match=said):
            pc.partition_model(model, inputs, context_parallel=wanted, **options)
    with pytest.raises(MeshError, match="is for devices=; with mesh= give it as 'cp'"):
        plan(model, inputs, {"cp": 2}, context_parallel=2)


def test_it_is_planned_and_not_run():
    model, inputs = llama()
    part = plan(model, inputs, {"cp": 2})
    with pytest.raises(ParallelError, match=r"cp=2 is planned .* no sharding strategy"):
        pc.parallelize_model(model, part, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ParallelError, match="cp=2 is planned and cannot be run"):
        pc.check_layout(part)


def test_recomputation_gathers_again():
    model, inputs = llama()
    full = plan(model, inputs, {"cp": 2}, hardware=cluster(intra=SLOW), recompute=True).stages[0]
    hidden = plan(model, inputs, {"cp": 2}, recompute=True).stages[0]
    seconds = LAYERS * SLOW.seconds(KEYS_AND_VALUES / 2)
    assert full.backward_seconds - hidden.backward_seconds == pytest.approx(3 * seconds, rel=1e-4)
    kept = plan(model, inputs, {"cp": 2}, hardware=cluster(intra=SLOW), recompute="selective").stages[0]
    hidden = plan(model, inputs, {"cp": 2}, recompute="selective").stages[0]
    assert kept.backward_seconds - hidden.backward_seconds == pytest.approx(2 * seconds, rel=1e-4)
