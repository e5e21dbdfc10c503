"""SVD-LLM v2: Wang et al., "SVD-LLM V2: Optimizing Singular Value Truncation", NAACL 2025.

Each type of weight (all queries, all outputs, ...) has the same budget. With L_i the loss of truncating
matrix i at the uniform rank, the share that is removed from it is R n (1 / log L_i) / sum_j (1 / log L_j)
over the n matrices of its type, R the share removed from all. Here types are the last parts of the names and
the shapes; losses below e count as e, as the rule is undefined from 1 downwards; what is removed is capped
at `MOST`. Then SVD-LLM with eigh.
"""

import math
import re
from collections import defaultdict

from torch import nn

from peers.job import Job
from peers.nested import replace_all
from peers.svd_llm import decompose

MOST = 0.97


def allocate(losses: dict[str, float], ratio: float) -> dict[str, float]:
    """The ratio of each matrix of one type."""
    weights = {name: 1 / math.log(max(loss, math.e)) for name, loss in losses.items()}
    total = sum(weights.values())
    removed = {name: (1 - ratio) * len(losses) * weight / total for name, weight in weights.items()}
    excess = sum(max(0.0, share - MOST) for share in removed.values())
    room = sum(max(0.0, MOST - share) for share in removed.values())
    return {
        name: 1 - min(MOST, share + excess * max(0.0, MOST - share) / room) for name, share in removed.items()
    }


def compress(job: Job, ratio: float) -> nn.Module:
    """Allocate within each type, whiten, truncate."""
    if "svd-llm" not in job.memory:
        job.memory["svd-llm"] = {name: decompose(job, name) for name in job.names}
    factors = job.memory["svd-llm"]
    uniform = job.ranks(ratio)
    types: dict[object, dict[str, float]] = defaultdict(dict)
    for name, (left, _) in factors.items():
        kind = (re.sub(r"\d+", "#", name), job.shapes[name])
        types[kind][name] = float(left[:, uniform[name] :].norm())
    ratios: dict[str, float] = {}
    for losses in types.values():
        ratios |= allocate(losses, ratio)
    return replace_all(job, factors, job.ranks(ratios))
