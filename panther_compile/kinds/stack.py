"""Modules whose own forward multiplies by the matrices of 3-D parameters become SketchedStack.

Before:
    experts: Llama4TextExperts(gate_up_proj (E, H, 2 F), down_proj (E, F, H))
After:
    experts: SketchedStack(gate_up_0, ..., down_0, ...: SketchedLinear)

Mixtures of one's own, ensembles (`torch.bmm`, `torch.baddbmm`, `einsum`, a loop over `self.w1[expert]`): what
is done with the parameters is read in the text of the forward, see `stack_uses.py`, which then runs as it is.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.kinds.base import CompositeKind
from panther_compile.kinds.match import is_plain_linear, why_not_plain
from panther_compile.kinds.stack_uses import StackUses, read_uses
from panther_compile.layers.matrix_stacks import copied_part, is_stack, sharing_sets
from panther_compile.layers.stack import SketchedStack, stack_parts


class StackKind(CompositeKind):
    """See the module's docstring."""

    wanted = "matrices of a 3-D parameter"
    layers = (SketchedStack,)

    def matches(self, module: nn.Module) -> str | None:
        """Called "Stack": it holds 3-D parameters, and of other layers no more than linear ones.

        Where it must be left alone, its linear layers are layers by themselves.
        """
        if type(module).__module__.startswith("torch.") or not _stacked_names(module):
            return None
        inside = [part for child in module.children() for part in child.modules()]
        if not all(_may_be_inside(part) for part in inside):
            return None
        has_linears = any(type(part) is nn.Linear for part in inside)
        return None if has_linears and self.why_not(module) is not None else "Stack"

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        uses = _uses(module)
        if not uses.stacks:
            return next(iter(uses.reasons.values()))
        if uses.asks_above:
            return f"the forward of {type(module).__name__} calls that of the class above"
        taken = sorted(uses.read & _TAKEN)
        if taken:
            return f"the forward of {type(module).__name__} reads {taken[0]}, which its sketch has of its own"
        own = {**module._parameters, **module._buffers}
        return why_not_plain(
            module,
            type(module),
            tensors=frozenset(uses.stacks),
            besides=frozenset(own) - frozenset(uses.stacks),
            children=frozenset(module._modules),
        )

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """A linear layer for each matrix, whose weight is a view of it, and linear layers of its own."""
        return stack_parts(module, _stacks(module))

    def may_share(self, module: nn.Module) -> Sequence[tuple[str, ...]]:
        """The matrices of each parameter."""
        named = [(name, len(module.get_parameter(name))) for name in _stacks(module)]
        return [one for name, count in named for one in sharing_sets((name,), count)]

    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """See `Kind.assemble`."""
        if config is not None:
            parts = {name: copied_part(part) for name, part in parts.items()}
        return SketchedStack.from_parts(module, _stacks(module), parts)


# What a sketched stack has, and a module of one's own may have too.
_TAKEN = frozenset(name for name in dir(SketchedStack) if not hasattr(nn.Module, name)) | {"rest"}


def _stacked_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the 3-D parameters."""
    return tuple(name for name, one in module._parameters.items() if is_stack(one))


def _stacks(module: nn.Module) -> dict[str, bool]:
    """The names of those that are used as stacks, and whether each is (n, I, O)."""
    return _uses(module).stacks


def _uses(module: nn.Module) -> StackUses:
    return read_uses(type(module), _stacked_names(module))  # type: ignore[arg-type]


def _may_be_inside(part: nn.Module) -> bool:
    """Whether a module inside is a linear layer, or has nothing that could be sketched."""
    if type(part) is nn.Linear:
        return is_plain_linear(part)
    return all(parameter.dim() < 2 for parameter in part.parameters())
