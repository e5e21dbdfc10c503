"""nn.TransformerEncoder turns padded inputs into nested tensors, which sketched layers do not take."""

from torch import nn

from panther_compile.layers.base import outermost

_MARK = "_panther_nested_tensor"


def turn_off_nested_tensors(model: nn.Module) -> None:
    """Let no encoder that holds a sketched layer use nested tensors; it pads, with the same valid outputs."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not getattr(encoder, "use_nested_tensor", False):
            continue
        if next(outermost(encoder), None) is not None:
            encoder.use_nested_tensor = False
            setattr(encoder, _MARK, True)


def turn_on_nested_tensors(model: nn.Module) -> None:
    """Undo `turn_off_nested_tensors` in a model that is dense again."""
    for encoder in model.modules():
        if encoder.__dict__.pop(_MARK, False):
            encoder.use_nested_tensor = True  # type: ignore[assignment]
