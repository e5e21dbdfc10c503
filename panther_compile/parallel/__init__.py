"""Run a partition on many devices: each rank its part, replicated or sharded, as one module to train.

parallelize        the verb: agree, lay out, shard, wrap, schedule
options            of `parallelize_model`, checked against the plan
agreement          same plan on every rank, a process group that fits     ──► the first collective
devices            part.mesh ──► device mesh, groups, the stages of this rank
tensor             a stage in this rank's shards, with collectives of shard_functions
stage_module       one stage, fit for a pipeline: contiguous gradients, train and eval
units              blocks of a module tree
graph_units        parts of a stage's graph
writes             what operations of a graph write in place
activation_checkpointing   which activations of a unit are kept
kept_results       given back where a unit is computed again
kept_within_budget         chosen from what a unit's first call does
replicas           DDP, fully_shard; sums of gradients over replicas and over stages that share
rank_modules       the modules of one rank: its stages, and what runs them
batch_norms        statistics over the rows of all replicas
whole_model        no pipeline: the user's own module tree, or its graph in shards
pipeline           GPipe, 1F1B, interleaved, zero-bubble of torch.distributed.pipelining
crossing           shapes and dtypes between stages, under the autocast of a step
divided_backward   which weights' gradients a zero-bubble schedule has to compute together
microbatches       a batch in parts; the last may be short
losses             of each microbatch, its share of the loss over all rows or tokens
clipping           the norm of the whole model's gradients
engine             step, evaluate, predict; the user's own call
model_state        parameters and buffers under the user's names
checkpoints        of a training, written in the background, whole or not at all; read by any mesh
training_state     what a checkpoint holds; pieces and optimizer_state of it
checkpoint_folder  files of checkpoints: manifest, checksums, what is left unfinished
metrics            seconds, memory, and what is sent, of each step
layout             any number of ranks checked in one process, one of each kind
batch_size         the largest batch that every rank has the memory for
"""

from panther_compile.parallel.batch_size import find_batch_size
from panther_compile.parallel.checkpoints import Resumed, TrainingCheckpoints, read_state_dict
from panther_compile.parallel.engine import ParallelEngine
from panther_compile.parallel.layout import CheckedRank, check_layout
from panther_compile.parallel.metrics import TrainingMetrics
from panther_compile.parallel.parallelize import parallelize_model

__all__ = [
    "CheckedRank",
    "ParallelEngine",
    "Resumed",
    "TrainingCheckpoints",
    "TrainingMetrics",
    "check_layout",
    "find_batch_size",
    "parallelize_model",
    "read_state_dict",
]
