"""The experts of Hugging Face mixtures, all in one 3-D parameter, become SketchedExperts: a layer for each.

Before:
    experts: MixtralExperts(gate_up_proj (E, 2 F, H), down_proj (E, H, F))
After:
    experts: SketchedExperts(gate_up_0, ..., down_0, ...: SketchedLinear)

transformers runs a class of experts through its experts interface: attributes of the module say how the
weights lie and what stands between them. So nothing depends on the class, nor on which implementation is set.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.kinds.base import CompositeKind
from panther_compile.kinds.match import why_not_plain
from panther_compile.kinds.stack_uses import why_no_stacks
from panther_compile.layers.experts import (
    SketchedExperts,
    copied_part,
    expert_parts,
    has_bias,
    part_name,
    projections,
)
from panther_compile.layers.matrix_stacks import is_stack
from panther_compile.models.rows import with_tokens

# Experts that may share a factor: it is a small part of theirs then, and a plan names them all for each.
MOST_SHARING = 32


class ExpertsKind(CompositeKind):
    """See the module's docstring."""

    wanted = "experts of transformers"
    layers = (SketchedExperts,)

    def matches(self, module: nn.Module) -> str | None:
        """Called "Experts", also where all are in one parameter of a class of the user's own."""
        return "Experts" if projections(module) or _holds_stacked_matrices(module) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        if not _is_of_interface(module):
            return why_no_stacks(module) or "its 3-D parameters could not be lifted to layers"
        if getattr(module, "_is_expert_parallel", False):
            return "its experts are divided among devices (expert parallelism): sketch the model before that"
        names = projections(module)
        biases = {f"{name}_bias" for name in names} if has_bias(module) else set()
        others = set(module._parameters) - set(names) - biases
        if others:
            return f"its experts hold more than projections: {', '.join(sorted(others))}"
        return why_not_plain(
            module,
            type(module),
            tensors=frozenset({*names, *biases}),
            children=frozenset(module._modules),
        )

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """A linear layer for each expert of each projection, whose parameters are views of the module's."""
        return expert_parts(module)

    def may_share(self, module: nn.Module) -> Sequence[tuple[str, ...]]:
        """The experts of each projection."""
        names = projections(module)
        experts = range(len(module.get_parameter(names[0])))
        return [
            tuple(part_name(name, expert) for expert in experts[first : first + MOST_SHARING])
            for name in names
            for first in experts[::MOST_SHARING]
        ]

    def assemble(
        self, module: nn.Module, parts: Mapping[str, nn.Module], config: SketchConfig | None = None
    ) -> nn.Module:
        """See `Kind.assemble`; where parts are watched, experts are called that get no token too."""
        if config is None:
            return _WatchedExperts.from_parts(module, parts)
        return SketchedExperts.from_parts(module, {name: copied_part(part) for name, part in parts.items()})


class _WatchedExperts(SketchedExperts):
    """Calls all experts in their order, whatever the tokens, and says which tokens their rows are of."""

    visits_all = True

    def run_expert(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """See `SketchedExperts`."""
        first, last = self.sizes
        hidden = self.gate(self.part(first, expert)(with_tokens(rows, tokens)))
        out: Tensor = self.part(last, expert)(with_tokens(hidden, tokens))
        return out


def _is_of_interface(module: nn.Module) -> bool:
    """Whether transformers decides how the experts run, told without importing it."""
    known = all(hasattr(module, name) for name in ("is_transposed", "has_bias", "num_experts", "_apply_gate"))
    return known and bool(projections(module)) and hasattr(type(module).forward, "__wrapped__")


def _holds_stacked_matrices(module: nn.Module) -> bool:
    """Whether a module that is no layer of torch, nor made of layers, holds several matrices as one."""
    if type(module).__module__.startswith("torch.") or next(module.children(), None) is not None:
        return False
    return any(is_stack(one) for one in module._parameters.values())
