"""Layouts against the tensors themselves: what a rule promises is what the pieces are."""

import pytest
import torch
from torch import nn

from panther_compile.partition import partition_model
from panther_compile.partition.shards.placements import Shard, through_range, through_view
from panther_compile.partition.shards.rules import derive_rule, has_shape, local_arguments

TP = 2


def local_shape(placement, shape):
    return tuple(size // TP if dim == placement.dim else size for dim, size in enumerate(shape))


def pieces(placement, tensor):
    return [placement.local(tensor, TP, rank) for rank in range(TP)]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(1, 3), Shard(2, 2)])
def test_pieces_make_up_the_whole(placement):
    tensor = torch.arange(4 * 12 * 8).reshape(4, 12, 8)
    parts = pieces(placement, tensor)
    assert torch.equal(placement.full(parts), tensor)
    assert all(tuple(part.shape) == local_shape(placement, tensor.shape) for part in parts)


def test_blocks_lie_as_drawn():
    parts = pieces(Shard(0, 3), torch.arange(12))
    assert parts[0].tolist() == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize(
    ("placement", "before", "after", "found"),
    [
        (Shard(2), (2, 10, 64), (2, 10, 4, 16), Shard(2)),
        (Shard(2), (2, 10, 64), (2, 10, 3, 16), None),
        (Shard(2), (2, 10, 4, 16), (2, 10, 64), Shard(2)),
        (Shard(2), (2, 10, 64), (20, 64), Shard(1)),
        (Shard(2, 3), (6, 2, 96), (6, 2, 3, 32), Shard(3)),
        (Shard(2), (6, 2, 96), (6, 2, 3, 32), None),
        (Shard(2), (6, 2, 32), (6, 8, 8), Shard(1, 2)),
        (Shard(0, 2), (8, 6, 8), (2, 4, 6, 8), Shard(1)),
        (Shard(1), (3, 2, 5), (3, 1, 2, 5), Shard(2)),
    ],
)
def test_views(placement, before, after, found):
    if after != (2, 10, 3, 16):
        tensor = torch.arange(torch.Size(before).numel()).reshape(before)
        assert through_view(placement, before, after, TP) == found
        if found is not None:
            shape = local_shape(found, after)
            for part, own in zip(
                pieces(placement, tensor), pieces(found, tensor.reshape(after)), strict=True
            ):
                assert torch.equal(part.reshape(shape), own)
    else:
        assert through_view(placement, (2, 10, 48), after, TP) is None


def test_slices_of_whole_blocks_only():
    assert through_range(Shard(0, 3), 12, 4, 12, TP) == Shard(0, 2)
    assert through_range(Shard(0, 3), 12, 2, 12, TP) is None


class Operations(nn.Module):
    """Every operation of the table, each on the input."""

    def forward(self, x, mask):
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        parts = torch.cat([*x.chunk(2, dim=-1)], dim=1)
        first, rest = x.split([16, 16], dim=-1)
        return (
            torch.nn.functional.gelu(x * 2 + 1).masked_fill(mask, 0.0),
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
            torch.softmax(heads @ heads.transpose(-1, -2), dim=-1).mean(dim=-1),
            nn.functional.layer_norm(heads, (8,)) + nn.functional.rms_norm(heads, (8,)),
            heads.permute(0, 2, 1, 3).reshape(2, 6, 32).flatten(0, 1),
            x.view(2, 1, 6, 32).squeeze(1).unsqueeze(0).expand(3, 2, 6, 32),
            parts,
            first[..., 0:8] + x.sum(dim=1, keepdim=True)[..., 0:8],
            rest.contiguous()[:, 1:3],
            x.view(2, 6, 2, 16).select(2, 1),
        )


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Shard(2, 2), Shard(2, 4)])
def test_what_a_rule_says_is_what_the_operation_does(placement):
    """Each node that a rule admits gives, on pieces of its operands, the pieces of its result."""
    example = torch.randn(2, 6, 32), torch.rand(2, 6, 1) > 0.5
    part = partition_model(Operations(), example, mesh={"pp": 1}, hardware="cpu")
    graph = part.captured.graph_module.graph
    whole, lies = {}, {}
    tested = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            whole[node] = example[len(whole)]
            if len(whole) == 1:
                lies[node] = placement
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), whole.__getitem__)
            whole[node] = node.target(*args, **kwargs)
            source = next((one for one in node.all_input_nodes if one in lies), None)
            rule = derive_rule(node, source, lies[source], TP) if source is not None else None
            if rule is None:
                continue
            lies[node] = rule.out
            tested.add(node.target)
            for rank in range(TP):

                def own(operand, rule=rule, rank=rank):
                    state = rule.needs[operand]
                    value = whole[operand]
                    if not isinstance(state, Shard):
                        return value
                    if isinstance(value, (list, tuple)):
                        return [
                            lies_as.local(one, TP, rank)
                            for one, lies_as in zip(value, piece_placements(operand, state), strict=True)
                        ]
                    return state.local(value, TP, rank)

                local = local_arguments(node, rule.out, TP)
                args, kwargs = torch.fx.node.map_arg((local, node.kwargs), own)
                found = node.target(*args, **kwargs)
                if has_shape(node):
                    torch.testing.assert_close(found, rule.out.local(whole[node], TP, rank))
    assert len(tested) >= (12 if placement.dim == 0 else 6)


def piece_placements(split, placement):
    """Layouts of the pieces of a split."""
    users = sorted(split.users, key=lambda user: user.args[1])
    return [derive_rule(user, split, placement, TP).out for user in users]
