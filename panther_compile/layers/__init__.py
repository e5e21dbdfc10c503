"""The layers that stand in for dense ones.

attention        SketchedMultiheadAttention: nn.MultiheadAttention with four sketched projections
attention_masks  What `nn.MultiheadAttention` accepts, checked as torch checks it, and its masks in one form
base             What every sketched layer can do, whatever it replaces
capture          Whether a graph is being captured, and by whom
conv2d           SketchedConv2d: nn.Conv2d as a chain of smaller ones
conv_on_plane    SketchedConv1d and 3d: the schemes of SketchedConv2d, of kernels laid on a plane
conv_transpose   SketchedConvTranspose1d, 2d and 3d: a 1 x 1 convolution and a thinner transposed one
convolution      SketchedConvolution: what the sketched convolutions have in common
embedding        SketchedEmbedding: a table (V, D) as codes (V, r) times a basis (r, D)
experts          SketchedExperts: a mixture of experts, a linear layer for each weight of each expert
factor           What stands for a weight in the text of a forward
favor            FavorAttention
lazy_weight      A weight that is multiplied out only when its values are read
linear           SketchedLinear
linear_replacement  What stands in for a dense linear layer
matrix_stacks    Matrices of one 3-D parameter as linear layers, and the way back
narrow           NarrowLinear
nested_tensors   nn.TransformerEncoder turns padded inputs into nested tensors, which sketched layers do not
own_weights      Weights that a module's own forward multiplies by, as layers that do it
parts            Layers that hold a linear layer for each of their weights
recurrent        SketchedLSTM and SketchedGRU
recurrent_cell   SketchedLSTMCell and SketchedGRUCell
recurrent_parts  RecurrentParts: what those have in common, and one step of each
residual         ResidualLinear: a quantized layer and a low-rank branch beside it
stack_product    Equations of einsum that multiply rows by the matrices of a stack
weight_products  Products with the matrices of a stack, and with a kernel, as calls of layers
"""

from panther_compile.layers.attention import SketchedMultiheadAttention
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.conv_on_plane import SketchedConv1d, SketchedConv3d
from panther_compile.layers.conv_transpose import (
    SketchedConvTranspose1d,
    SketchedConvTranspose2d,
    SketchedConvTranspose3d,
)
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.experts import SketchedExperts
from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.layers.narrow import NarrowConv1D, NarrowLinear
from panther_compile.layers.recurrent import SketchedGRU, SketchedLSTM
from panther_compile.layers.recurrent_cell import SketchedGRUCell, SketchedLSTMCell
from panther_compile.layers.residual import ResidualLinear

__all__ = [
    "NarrowConv1D",
    "NarrowLinear",
    "ResidualLinear",
    "SketchedConv1D",
    "SketchedConv1d",
    "SketchedConv2d",
    "SketchedConv3d",
    "SketchedConvTranspose1d",
    "SketchedConvTranspose2d",
    "SketchedConvTranspose3d",
    "SketchedEmbedding",
    "SketchedExperts",
    "SketchedGRU",
    "SketchedGRUCell",
    "SketchedLSTM",
    "SketchedLSTMCell",
    "SketchedLayer",
    "SketchedLinear",
    "SketchedMultiheadAttention",
]
