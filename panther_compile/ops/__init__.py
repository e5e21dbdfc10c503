"""The library's operators: one node each for Dynamo, export, autograd and activation checkpointing.

    linear         sketched_linear        a((x downᵀ) upᵀ + b) m + r, pivoted a((x₁ + x₂ downᵀ) upᵀ + b) m + r
    multi_linear   sketched_multi_linear  the layers alone, for several layers of one x: q, k and v at once
    conv2d         sketched_conv2d        a kh x kw convolution, then a 1 x 1 one
    attention      favor_attention        random-feature attention
    linear_dispatch                       which implementation serves linear layers
    checks                                what the operators ask of their arguments

Each function checks its arguments and calls one `torch.ops.panther_compile` operator. On a CPU that is the
plain arithmetic of kernels/; on a GPU a Triton kernel or torch, whichever kernels/dispatch.py expects to
be faster, or what PANTHER_COMPILE_KERNEL=triton or torch says. They can be differentiated once, backwards.
`has_kernel` and its like tell the layers in eager mode whether calling the operator is worth it.
"""

from panther_compile.kernels.factor_set import Factors
from panther_compile.ops.attention import favor_attention, has_attention_kernel
from panther_compile.ops.conv2d import has_conv2d_kernel, sketched_conv2d
from panther_compile.ops.linear import sketched_linear
from panther_compile.ops.linear_dispatch import has_kernel
from panther_compile.ops.multi_linear import sketched_multi_linear

__all__ = [
    "Factors",
    "favor_attention",
    "has_attention_kernel",
    "has_conv2d_kernel",
    "has_kernel",
    "sketched_conv2d",
    "sketched_linear",
    "sketched_multi_linear",
]
