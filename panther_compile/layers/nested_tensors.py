"""nn.TransformerEncoder turns padded inputs into nested tensors, which sketched layers do not take.

    dense:      padded inputs ──► nested ──► layers ──► padded with zeros ──► norm
    sketched:   padded inputs ─────────────► layers ────────────────────────► norm ──► norm(0) at the padding

The zeros, or what the norm makes of them, are part of the result: who pools it may not look at the mask. A
hook of the encoder writes them wherever torch would.
"""

from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import outermost

_MARK = "_panther_nested_tensor"
_ARGUMENTS = ("src", "mask", "src_key_padding_mask", "is_causal")


def turn_off_nested_tensors(model: nn.Module) -> None:
    """Let no encoder that holds a sketched layer use nested tensors; its results are the same without."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not getattr(encoder, "use_nested_tensor", False):
            continue
        if next(outermost(encoder), None) is not None:
            encoder.use_nested_tensor = False
            setattr(encoder, _MARK, True)
            encoder.register_forward_hook(blank_padding, with_kwargs=True)


def turn_on_nested_tensors(model: nn.Module) -> None:
    """Undo `turn_off_nested_tensors` in a model that is dense again."""
    for encoder in model.modules():
        if not encoder.__dict__.pop(_MARK, False):
            continue
        encoder.use_nested_tensor = True  # type: ignore[assignment]
        for key, hook in list(encoder._forward_hooks.items()):
            if hook is blank_padding:
                del encoder._forward_hooks[key]
                encoder._forward_hooks_with_kwargs.pop(key, None)


def blank_padding(
    encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """The output of an encoder as it is with nested tensors; a forward hook.

    Args:
        encoder: an `nn.TransformerEncoder`.
        args: of the call.
        kwargs: likewise.
        output: (N, S, E).
    """
    assert isinstance(encoder, nn.TransformerEncoder)
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    src, padding = given["src"], given.get("src_key_padding_mask")
    if padding is None or given.get("mask") is not None or not _would_nest(encoder, src, padding):
        return output
    blank = torch.zeros(1, 1, output.shape[-1], dtype=src.dtype, device=src.device)
    if encoder.norm is not None:
        blank = encoder.norm(blank)
    return torch.where((padding != 0).unsqueeze(-1), blank, output)


def _would_nest(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> bool:
    """Whether torch would use nested tensors if all layers were dense; as in `TransformerEncoder.forward`."""
    first = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or first.training or src.dim() != 3 or src.is_nested:
        return False
    if torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in (src, *first.parameters())):
        return False
    if not getattr(encoder, "mask_check", True):
        return True
    return not torch.compiler.is_compiling() and torch._nested_tensor_from_mask_left_aligned(
        src, padding.logical_not()
    )
