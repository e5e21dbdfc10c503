"""Methods that treat each layer by itself, and whose smaller ranks are parts of the larger ones."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from peers.job import Job
from peers.layers import factored

Factors = tuple[Tensor, Tensor]
"""Left (O, k) and right (k, I) in float64, the most telling directions first."""


def replace_all(job: Job, factors: Mapping[str, Factors], ranks: Mapping[str, int]) -> nn.Module:
    """A copy of the model, each layer cut to its rank."""
    small = job.copy()
    for name, (left, right) in factors.items():
        rank = ranks[name]
        small.set_submodule(name, factored(small.get_submodule(name), left[:, :rank], right[:rank]))
    return small


def nested(method: str, decompose: Callable[[Job, str], Factors]) -> Callable[[Job, float], nn.Module]:
    """A method that cuts the factors of each layer, found once, at the rank that a uniform ratio gives."""

    def compress(job: Job, ratio: float) -> nn.Module:
        if method not in job.memory:
            job.memory[method] = {name: decompose(job, name) for name in job.names}
        return replace_all(job, job.memory[method], job.ranks(ratio))

    return compress
