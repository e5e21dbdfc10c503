"""A zoo of small models with random weights, one for each way a model can be built.

Nothing is downloaded: every model comes from a configuration. An entry is deterministic by its
name, and its initialisation is livelier than usual: no bias is zero, no norm is trivial, no signal
dies on its way. A layer that loses its bias shows.

Every dropout, stochastic depth and masking rate is zero, so train mode is deterministic too (batch
norms still update their statistics there).
"""

from zoo import handwritten, hugging_face  # each registers its models
from zoo.entry import (
    NEW_TOKENS,
    VOCAB,
    ZOO,
    Inputs,
    ZooModel,
    call,
    generate,
    generating,
    names,
    scalar,
    tensors,
)

__all__ = [
    "NEW_TOKENS",
    "VOCAB",
    "ZOO",
    "Inputs",
    "ZooModel",
    "call",
    "generate",
    "generating",
    "handwritten",
    "hugging_face",
    "names",
    "scalar",
    "tensors",
]
