"""Activations s -> a(s) inside a kernel, and their slopes a'(s); all in float32.

none       s                        gelu       s Φ(s), Φ the normal distribution function
relu       max(s, 0)                gelu_tanh  s σ(2t), t = sqrt(2/π) (s + 0.044715 s³)
silu       s σ(s)                   with σ the logistic function
"""

import triton
import triton.language as tl

# They stand on the right of a product: on the left the interpreter takes the product for a constant.
_HALF_ROOT = tl.constexpr(0.7071067811865476)  # sqrt(1/2)
_DENSITY = tl.constexpr(0.3989422804014327)  # sqrt(1/(2π))
_TWO_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2/π)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(s, ACTIVATION: tl.constexpr):
    """The activation of s."""
    if ACTIVATION == "relu":
        # Not maximum, which would lose a NaN.
        s = tl.where(s < 0.0, 0.0, s)
    elif ACTIVATION == "silu":
        s = s * tl.sigmoid(s)
    elif ACTIVATION == "gelu":
        s = s * 0.5 * (1.0 + tl.erf(s * _HALF_ROOT))
    elif ACTIVATION == "gelu_tanh":
        s = s * tl.sigmoid((s + s * s * s * _CUBIC) * _TWO_ROOT)
    else:
        tl.static_assert(ACTIVATION == "none")
    return s


@triton.jit
def activation_slope(s, ACTIVATION: tl.constexpr):
    """The derivative of the activation at s."""
    if ACTIVATION == "relu":
        slope = tl.where(s > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(s)
        slope = gate * (1.0 + s * tl.sigmoid(-s))
    elif ACTIVATION == "gelu":
        slope = 0.5 * (1.0 + tl.erf(s * _HALF_ROOT)) + s * _DENSITY * tl.exp(-0.5 * s * s)
    elif ACTIVATION == "none":
        slope = tl.full(s.shape, 1.0, tl.float32)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        t = (s + s * s * s * _CUBIC) * _TWO_ROOT
        gate = tl.sigmoid(t)
        # The second sigmoid is 1 - gate without the cancellation.
        slope = gate + s * gate * tl.sigmoid(-t) * (s * s * _CUBIC * 3.0 + 1.0) * _TWO_ROOT
    return slope
