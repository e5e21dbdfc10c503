"""Cut a model into pipeline stages by minimum cuts, its layers into shards, and predict what a step takes.

graph/     a model as a graph: what each node does, and what that takes
stages/    where pipeline stages end: minimum cuts, a dynamic program over them, schedules
shards/    what is sharded over the tp axis: placements and layers, by the labelling of least cost
partition  the verb: capture, observe, weigh, cut, simulate
assemble   ──► result.Partition, made of records
records    the mesh, one record a stage, the tensors between them
result     what `partition_model` gives back
traffic    bytes of a step inside nodes and between them      (no torch)
plot       a partition as a picture
graphs     A model read once, and its flow graph as one device sees it, for any number of devices
options    What the user asked for, and the strategies among which the planner chooses for a mesh
replicas   What the replicas of a model divide among themselves, and what that takes. No torch in here
search     The best strategy and cuts for a mesh, and the best mesh for a number of devices
"""

from panther_compile.partition.graph.hardware import Hardware, Link
from panther_compile.partition.graph.rates import measure_hardware
from panther_compile.partition.partition import partition_model
from panther_compile.partition.records import (
    Collective,
    Mesh,
    ShardedLayer,
    SharedParameter,
    Stage,
    TensorSpec,
)
from panther_compile.partition.result import Partition
from panther_compile.partition.stages.split import StagedModel
from panther_compile.partition.traffic import Traffic

__all__ = [
    "Collective",
    "Hardware",
    "Link",
    "Mesh",
    "Partition",
    "ShardedLayer",
    "SharedParameter",
    "Stage",
    "StagedModel",
    "TensorSpec",
    "Traffic",
    "measure_hardware",
    "partition_model",
]
