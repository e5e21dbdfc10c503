"""Cut a model into pipeline stages and shards by minimum cuts, and predict what a training step takes.

capture     model ──► FX graph under the user's names
observe     what each node does: products, bytes, what it keeps and writes
flow_graph  ──► flow.FlowGraph: seconds on vertices, bytes on values
cut         minimum cuts, one way only, nested             (no torch)
chains      dynamic program over nested cuts               (no torch)
stages      cuts to choose from ──► the ends of stages     (no torch)
rates       what kinds of operations take on this device ──► hardware.Hardware
sharding_problem  what could be sharded, along features or the sequence, and what that costs
label       layouts of tensors, kinds of layers ──► label.Labelling, by an energy and its cuts
shards      collectives, records, lighter stages
mesh_search devices ──► meshes, the most promising first     (no torch)
schedule    gpipe, 1f1b, interleaved; event simulator      (no torch)
assemble    ──► result.Partition, made of records
traffic     bytes of a step inside nodes and between them      (no torch)
split       one module a stage, with its own parameters
"""

from panther_compile.partition.hardware import Hardware, Link
from panther_compile.partition.partition import partition_model
from panther_compile.partition.rates import measure_hardware
from panther_compile.partition.records import Collective, Mesh, Shard, SharedParameter, Stage, TensorSpec
from panther_compile.partition.result import Partition
from panther_compile.partition.skeleton import sketch_skeleton
from panther_compile.partition.split import StagedModel
from panther_compile.partition.traffic import Traffic

__all__ = [
    "Collective",
    "Hardware",
    "Link",
    "Mesh",
    "Partition",
    "Shard",
    "SharedParameter",
    "Stage",
    "StagedModel",
    "TensorSpec",
    "Traffic",
    "measure_hardware",
    "partition_model",
    "sketch_skeleton",
]
