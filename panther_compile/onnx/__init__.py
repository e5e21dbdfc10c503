"""ONNX files: written from a model, or sketched whoever wrote them.

export      a model ──► a file, checked against ONNX Runtime
sketch      a file ──► a sketched file: the verb
files       read what is sound, write what is whole
sites       what can be sketched in a graph, and why the rest is left alone
halves      weights that are stored in a half type and cast
taken_apart  operators that ONNX Runtime fuses, as what they were fused of
made_weights  weights that nodes make of constants, made once
patterns    small questions about a graph: what feeds what
data        inputs of a file, and what its nodes read while it runs on them
branches    values in branches, handed out to be seen
fit_to_data plan and weights from data: by torch, or by ONNX Runtime alone
fit_in_torch  as in `sketchify`, by gradients and in lockstep
as_torch    a graph as a module of torch
torch_ops   operators in torch
torch_cells recurrent ones
torch_attention  attention
torch_windows  windows and samples of images
torch_runtime  operators of ONNX Runtime's own
torch_indexed  what indices point to
fit         weights fitted to what ONNX Runtime shows of them
made_up     images, sounds and texts for a file without data
damage      what cutting each weight does to the outputs
rewrite     sketched layers in place of weights
lowering    sketched layers as nodes
pivots      pivoted convolutions that read their input whole
int8        products of a file in int8
int8_conv   convolutions in int8, with ranges that data show
int8_tables tables of embeddings in int8, a scale for each row
pair_range  weights in int8 that no CPU overflows on
smooth      inputs of products scaled, for int8
centre      means taken out of products, for int8
forms       operators as ONNX Runtime runs them fastest
fold_scales scales and shifts by constants, in the convolutions beside them
free_sizes  sizes that a caller of `export_onnx` wants free
quantized   products by weights that somebody has quantized
residual    a low-rank branch beside each
output_parts  outputs that hold boxes and chances side by side
verify      whether a file computes what a model, or another file, computes
"""

import importlib.util

from panther_compile.errors import MissingExtraError

_MISSING = [
    name
    for name in ("onnx", "onnx_ir", "onnxscript", "onnxruntime")
    if importlib.util.find_spec(name) is None
]
if _MISSING:
    raise MissingExtraError(
        f'ONNX files need {", ".join(_MISSING)}: pip install "panther-compile[onnx]"', name=_MISSING[0]
    )
