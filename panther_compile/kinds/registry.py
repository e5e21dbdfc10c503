"""All kinds of layers, in the order in which they claim modules; a new kind is a line here."""

from typing import Any

import torch
from torch import nn

from panther_compile.errors import CheckpointCorruptError, CheckpointVersionError, first_line
from panther_compile.kinds.attention import AttentionKind
from panther_compile.kinds.base import Functional, Kind
from panther_compile.kinds.conv1d_hf import HuggingFaceConv1DKind
from panther_compile.kinds.conv2d import Conv2dKind
from panther_compile.kinds.conv_on_plane import Conv1dKind, Conv3dKind
from panther_compile.kinds.conv_transpose import ConvTranspose1dKind, ConvTranspose2dKind, ConvTranspose3dKind
from panther_compile.kinds.embedding import EmbeddingKind
from panther_compile.kinds.experts import ExpertsKind
from panther_compile.kinds.linear import LinearKind
from panther_compile.kinds.recurrent import GRUCellKind, GRUKind, LSTMCellKind, LSTMKind
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.own_weights import holds_own_weights
from panther_compile.typed_json import read_arguments

# Attention first: it claims its projections, which would look like any other linear layer.
KINDS: tuple[Kind, ...] = (
    AttentionKind(),
    Conv2dKind(),
    Conv1dKind(),
    Conv3dKind(),
    ConvTranspose1dKind(),
    ConvTranspose2dKind(),
    ConvTranspose3dKind(),
    LinearKind(),
    HuggingFaceConv1DKind(),
    LSTMKind(),
    GRUKind(),
    LSTMCellKind(),
    GRUCellKind(),
    EmbeddingKind(),
    ExpertsKind(),
)


def find_kind(module: nn.Module) -> Kind | None:
    """The kind of a dense layer; None if it is of no kind that can be sketched."""
    if holds_own_weights(module):
        return None  # its own layers can
    return next((kind for kind in KINDS if kind.matches(module) is not None), None)


def kind_of(module: nn.Module) -> Kind:
    """The kind of a dense layer that is known to have one."""
    kind = find_kind(module)
    assert kind is not None, type(module)
    return kind


def is_known(module: nn.Module) -> bool:
    """Whether a module is sketched, or of a kind that could be."""
    return isinstance(module, SketchedLayer) or find_kind(module) is not None


def layer_types() -> dict[str, type[SketchedLayer]]:
    """The sketched layers that kinds make, by the name under which saved models know them."""
    return {layer.__name__: layer for kind in KINDS for layer in kind.layers}


def described_layer(
    type_name: str, spec: object, where: str, dtype: torch.dtype | None = None
) -> SketchedLayer:
    """A sketched layer as a file describes it, on the meta device.

    Args:
        type_name: see `layer_types`.
        spec: the arguments of its constructor, see `SketchedLayer.sketch_spec`.
        where: which file and layer, for messages.
        dtype: of its tensors.

    Raises:
        CheckpointCorruptError: no layer can be made of it.
        CheckpointVersionError: the type, or one of its arguments, is not known here.
    """
    layer_type = layer_types().get(type_name)
    if layer_type is None:
        raise CheckpointVersionError(
            f"{where} is a {type_name}, which this panther_compile does not know: upgrade it"
        )
    arguments = read_arguments(layer_type, spec, f"{where}, a {type_name},")
    try:
        return layer_type(**arguments, device="meta", dtype=dtype)
    # Numbers of a file that was written by hand: torch may say anything of them.
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointCorruptError(f"{where}, a {type_name}, cannot be made: {said}") from error


def find_functional(target: Any) -> Functional | None:
    """How a function of a graph is lifted to a layer; None if no kind knows it."""
    known = (one for kind in KINDS for one in kind.functionals)
    return next((one for one in known if target in one.targets), None)


def onnx_operators(*, flat: bool | None = None, tables: bool = False) -> tuple[str, ...]:
    """The op types of ONNX nodes that kinds compute: products, or look-ups.

    Args:
        flat: whether those of matrices alone, or all other products; None for both.
        tables: whether look-ups in place of products.
    """
    forms = [kind.onnx for kind in KINDS if kind.onnx is not None and kind.onnx.is_table == tables]
    found = [op for form in forms if flat is None or form.flat == flat for op in form.operators]
    return tuple(dict.fromkeys(found))


def find_onnx_kinds(operator: str) -> tuple[Kind, ...]:
    """The kinds that compute a node of an ONNX file, one for each number of dimensions of its weight."""
    return tuple(kind for kind in KINDS if kind.onnx is not None and operator in kind.onnx.operators)


def wanted() -> str:
    """What can be sketched, for messages."""
    names = list(dict.fromkeys(kind.wanted for kind in KINDS if kind.unless_included is None))
    return f"an {', '.join(names[:-1])} or {names[-1]}"
