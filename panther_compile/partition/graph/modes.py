"""Whether a model does the same in train and in eval mode, dropout and batch norms aside.

A graph is read in one of the modes. Dropout and batch norms are operators that say which, and are set to the
other (`parallel/stage_module.py`); what a model's own code does `if self.training` stays as it was read.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from panther_compile.errors import CaptureError
from panther_compile.models.surroundings import eval_mode, undisturbed, unwritten, without_fast_attention


class _Called(TorchFunctionMode):
    """The functions of torch that are called, in their order, but not those that they call; by whom, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []  # type of the module that calls, function
        self._within: list[str] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A hook before the forward of any module."""
        self._within.append(type(module).__name__)

    def leave(self, *_: Any) -> None:
        """A hook after it."""
        self._within.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        counts = name == "torch.Tensor.add_" and args[0].dim() == 0  # batches, by a batch norm
        if not counts and not name.endswith("__get__"):
            self.seen.append((self._within[-1], name))
        return func(*args, **(kwargs or {}))


def differs_by_mode(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The type of a module within a model in train mode that does something else in eval mode.

    Args:
        model: runs on tensors without numbers, and is left as it is.
        args: an example of its inputs.
        kwargs: likewise.

    Returns:
        None where there is none, or the model does not run without numbers.
    """
    in_train = _seen(model, args, kwargs)
    with eval_mode(model):
        in_eval = _seen(model, args, kwargs)
    if in_train is None or in_eval is None:
        return None
    return next(
        ((one or other)[0] for one, other in zip_longest(in_train, in_eval) if one != other),  # type: ignore[index]
        None,
    )


def check_batch_norms(model: nn.Module) -> None:
    """Check that a graph in train mode can keep the statistics of a model's batch norms.

    Raises:
        CaptureError: some are means over all batches, and a graph would keep the share of one batch alone.
    """
    for name, module in model.named_modules():
        kept = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if kept and module.training and module.momentum is None:
            raise CaptureError(
                f"{name} is a {type(module).__name__} with momentum=None, whose share of each batch in the "
                "statistics a graph cannot count: give it a momentum, or put it into eval mode"
            )


def _seen(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    called, fake = _Called(), FakeTensorMode(allow_non_fake_inputs=True)
    hooks = register_module_forward_pre_hook(called.enter), register_module_forward_hook(called.leave)
    try:
        given = pytree.tree_map_only(Tensor, fake.from_tensor, (tuple(args), dict(kwargs)))
        with undisturbed(), without_fast_attention(), unwritten(model), fake, called:
            model(*given[0], **given[1])
    # The model's own code, on tensors without numbers: it may raise anything, and says nothing then.
    except Exception:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return called.seen
