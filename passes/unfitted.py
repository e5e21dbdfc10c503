"""A stand-in of the scheme and rank chosen, before any weight is fitted: its shape and form alone."""

import torch
from torch import nn

from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.passes.sketch_linear import weight_and_bias
from panther_compile.records import Choice


def unfitted_sketch(layer: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
    """The stand-in of one dense layer with initial numbers, or with none on the meta device.

    Args:
        layer: a linear layer, a `Conv1D`, a convolution or an embedding.
        choice: how its weight is to be stored.
        device: where the numbers are made; their dtype is the dense weight's.
    """
    rank = choice.ranks[0]
    if isinstance(layer, nn.Conv2d):
        return SketchedConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            choice.ranks if choice.scheme == "tucker2" else rank,
            scheme=choice.scheme,
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            dilation=layer.dilation,  # type: ignore[arg-type]
            groups=layer.groups,
            bias=layer.bias is not None,
            padding_mode=layer.padding_mode,
            device=device,
            dtype=layer.weight.dtype,
        )
    if isinstance(layer, nn.Embedding):
        return SketchedEmbedding(
            layer.num_embeddings,
            layer.embedding_dim,
            rank,
            padding_idx=layer.padding_idx,
            scale_grad_by_freq=layer.scale_grad_by_freq,
            sparse=layer.sparse,
            device=device,
            dtype=layer.weight.dtype,
        )
    weight, bias = weight_and_bias(layer)
    out_features, in_features = weight.shape
    layer_type = SketchedLinear if isinstance(layer, nn.Linear) else SketchedConv1D
    return layer_type(
        in_features,
        out_features,
        rank,
        bias=bias is not None,
        form=choice.scheme,
        device=device,
        dtype=weight.dtype,
    )
