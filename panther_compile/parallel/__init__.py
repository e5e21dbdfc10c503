"""Run a partition on many devices: each rank its stages, replicated or sharded, driven by a schedule.

agreement      same plan on every rank, a process group that fits     ──► the first collective
devices        part.mesh ──► device mesh, groups, the stages of this rank
stage_module   one stage, fit for a pipeline: contiguous gradients, train and eval
replicas       DDP, fully_shard; sums of gradients over replicas and over stages that share
pipeline       GPipe, 1F1B, interleaved, zero-bubble of torch.distributed.pipelining
divided_backward  which weights' gradients a zero-bubble schedule has to compute together
engine         step, evaluate, predict; parameters and state under the user's names
checkpoints    saved behind the training's back, whole or not at all; read by any mesh
"""

from panther_compile.parallel.checkpoints import Resumed, TrainingCheckpoints, read_state_dict
from panther_compile.parallel.engine import ParallelEngine
from panther_compile.parallel.parallelize import parallelize_model

__all__ = ["ParallelEngine", "Resumed", "TrainingCheckpoints", "parallelize_model", "read_state_dict"]
