"""A model as a graph: what each node does, and what that takes.

capture     model ──► FX graph under the user's names
observe     what each node does: products, bytes, what it keeps and writes
narrowing   what selective activation checkpointing keeps
budget      what it keeps within a share of the bytes  (no torch)
measure     seconds of each node on this device
functions   the user's own `torch.autograd.Function`s, kept
modes       whether a model does the same in train and in eval mode
reached     which parameters a backward from the outputs reaches
flow        the graph that is cut: seconds on vertices, bytes on edges  (no torch)
flow_graph  an observed graph ──► flow.FlowGraph
fused       the graph as a compiler runs it
fp8         products in eight bits, and what is kept of what they read
context     what is computed, kept and sent where devices divide sequences
hardware    what a cluster is made of
rates       what kinds of operations take on this device ──► hardware.Hardware
recomputed  The user's own `torch.utils.checkpoint` calls, which an exporter would drop without a word
"""
