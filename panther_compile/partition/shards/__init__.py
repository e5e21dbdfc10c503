"""What is sharded over the tp axis.

placements     how a tensor lies on the devices of a tensor-parallel group, in torch's terms
rules          what an operation does to a sharded tensor: one table
layers         layers whose parameters can be sharded, and the ways to shard each
sequence       where the positions of a sequence lie in each tensor
problem        what could be sharded in a graph, and what it costs
choices        the same as labels of variables
label          the labelling of least cost, by one of
elimination      one variable after the other, exact, in narrow graphs         (no torch)
energy           one minimum cut, exact for most graphs without a sequence     (no torch)
expansion        moves that are minimum cuts, in wide graphs with a sequence   (no torch)
sharding_plan  what comes of it: a step for each node that runs on shards
collectives    which tensors are summed or gathered, where
device_flow    the flow graph of one device
describe       records for the user
"""
