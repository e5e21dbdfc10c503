"""SketchedExperts: a mixture of experts whose weights, one of each expert, are sketched or dense.

    y_t = Σₖ p_tk down_e(gate(gate_up_e(x_t))),   e = index_tk

It stands in for the classes that transformers runs through its experts interface, which hold the weights of
all experts in 3-D parameters `gate_up_proj` (or `up_proj`, without a gate) and `down_proj`, with biases or
without, as (E, O, I) or transposed as (E, I, O). The gate, the activation and a norm behind the experts are
those of the module that it replaces.
"""

# T tokens, K experts of a token, S = T K pairs, E experts, O out_features, I in_features, R rank
import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from panther_compile.errors import CheckpointMismatchError, ConfigError, LayerError
from panther_compile.layers.base import Spec, copy_into, spec_of_part
from panther_compile.layers.capture import is_captured
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.matrix_stacks import parts_of_stack, stack_of_parts
from panther_compile.layers.parts import LayerOfParts, part_of_spec

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


class SketchedExperts(LayerOfParts):
    """Stands in for the experts of a Hugging Face mixture.

    The weight of expert e in `gate_up_proj` is the linear layer `gate_up_{e}`, and so on: names that
    transformers does not take for those of dense experts in a checkpoint. Experts may have the output factor
    `up.weight`, or the input factor `down.weight`, in common.

    Args:
        experts: E.
        sizes: I and O of each projection, by the name of the dense parameter.
        bias: whether the experts have biases.
        transposed: whether the dense parameters are (E, I, O).
        parts: spec of a `SketchedLinear` for each weight; None for an `nn.Linear`.
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        rest: the dense module without its projections; set by `adopt`.
        visits_all: whether experts are called that no token is routed to, also without gradients.

    Raises:
        ConfigError: sizes are of other projections, or parts names what is no weight.
    """

    rest: nn.Module
    sizes: dict[str, tuple[int, int]]
    visits_all: ClassVar[bool] = False
    no_factors = frozenset({"rest"})

    def __init__(
        self,
        experts: int,
        sizes: Mapping[str, tuple[int, int]],
        bias: bool = False,
        transposed: bool = False,
        *,
        parts: Mapping[str, Spec | None] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        what = type(self).__name__
        if "down_proj" not in sizes or len(sizes) != 2 or not set(sizes) <= set(_PROJECTIONS):
            raise ConfigError(f"{what}: sizes of {list(sizes)}, wanted down_proj and gate_up_proj or up_proj")
        self.experts, self.bias, self.transposed = experts, bias, transposed
        self.sizes = {name: sizes[name] for name in _PROJECTIONS if name in sizes}
        given = dict(parts or {})
        shapes = {part_name(name, e): size for name, size in self.sizes.items() for e in range(experts)}
        if not set(given) <= set(shapes):
            wrong = sorted(set(given) - set(shapes))
            raise ConfigError(f"{what}: parts {wrong[:3]}, wanted some of {list(shapes)}")
        for name, (inputs, outputs) in shapes.items():
            part = part_of_spec(given.get(name), inputs, outputs, bias=bias, device=device, dtype=dtype)
            self.add_module(name, part)

    @classmethod
    def from_parts(cls, dense: nn.Module, parts: Mapping[str, nn.Module]) -> Self:
        """The replacement of a module with weights made elsewhere, which are not copied.

        Args:
            dense: a module for which `projections` are known.
            parts: by the names of `expert_parts`.
        """
        experts = len(dense.get_parameter("down_proj"))
        new = cls(experts, _sizes(dense), has_bias(dense), is_transposed(dense), device="meta")
        for name, part in parts.items():
            setattr(new, name, part)
        return new.adopt(dense).train(dense.training)

    def adopt(self, dense: nn.Module) -> Self:
        """See `SketchedLayer.adopt`: what belongs to the module's class, and parameters of no expert.

        Raises:
            CheckpointMismatchError: the module holds experts of other shapes, or none.
        """
        if isinstance(dense, SketchedExperts):
            sizes, experts = dense.sizes, dense.experts
        elif projections(dense):
            sizes, experts = _sizes(dense), len(dense.get_parameter("down_proj"))
        else:
            raise CheckpointMismatchError(f"a {type(dense).__name__} holds no experts in 3-D parameters")
        if (sizes, experts) != (self.sizes, self.experts):
            raise CheckpointMismatchError(
                f"a {type(dense).__name__} of {experts} experts of sizes {sizes}, wanted {self.experts} of "
                f"{self.sizes}"
            )
        rest = _without_projections(dense.rest if isinstance(dense, SketchedExperts) else dense)
        self.rest = rest
        # transformers draws initial values into the projections of the experts that it knows.
        rest._is_hf_initialized = True  # type: ignore[assignment]
        return self

    def __getattr__(self, name: str) -> Any:
        """Read what the module around it asks of its experts, such as their number, from the dense module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            rest = self._modules.get("rest")
            if rest is None or name.startswith("_"):
                raise
            return getattr(rest, name)

    def part(self, name: str, expert: int) -> nn.Module:
        """The linear layer of one expert in one projection."""
        return self._modules[part_name(name, expert)]  # type: ignore[return-value]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run each token through its experts.

        Args:
            hidden_states: (T, I).
            top_k_index: (T, K), integers; E and above are no expert, and give zeros.
            top_k_weights: (T, K).

        Returns:
            (T, O), in the dtype of the hidden states.

        Raises:
            LayerError: `adopt` was not called.
        """
        if "rest" not in self._modules:
            raise LayerError(
                f"{type(self).__name__} lacks the module that it replaces: call adopt(dense) first"
            )
        tokens, top_k = top_k_index.shape
        ids = top_k_index.reshape(-1)
        run = self._gathered if _has_no_values(ids) else self._routed
        out = run(hidden_states, ids, top_k)
        if getattr(self.rest, "has_post_expert_norm", False):
            out = self.rest.post_expert_norm(out)  # type: ignore[operator]
        out = out * top_k_weights.reshape(-1, 1)
        out = out.masked_fill((ids >= self.experts)[:, None], 0.0)
        return out.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)

    def _routed(self, x_TI: Tensor, ids_S: Tensor, top_k: int) -> Tensor:
        """What the experts give to each pair, (S, O), expert after expert."""
        order = ids_S.argsort(stable=True)
        counts = torch.bincount(ids_S, minlength=self.experts).tolist()
        tokens = (order // top_k).split(counts)
        every = self.visits_all or torch.is_grad_enabled()  # so that all weights have a gradient
        called = [expert for expert in range(self.experts) if every or counts[expert]]
        outs = [self.run_expert(expert, x_TI[tokens[expert]], tokens[expert]) for expert in called]
        out = torch.cat(outs) if outs else x_TI.new_zeros(0, self.sizes["down_proj"][1])
        out = F.pad(out, (0, 0, 0, len(ids_S) - len(out)))
        return out[order.argsort()]

    def run_expert(self, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """What one expert gives to its rows (n, I), which are of the tokens (n,)."""
        first, last = self.sizes
        out: Tensor = self.part(last, expert)(self.gate(self.part(first, expert)(rows)))
        return out

    def gate(self, hidden: Tensor) -> Tensor:
        """What is between the projections, row by row."""
        rest: Any = self.rest
        gated: Tensor = rest._apply_gate(hidden) if "gate_up_proj" in self.sizes else rest.act_fn(hidden)
        return gated

    def _gathered(self, x_TI: Tensor, ids_S: Tensor, top_k: int) -> Tensor:
        """The same in operators whose shapes depend on no values, for graphs: pairs gather their factors."""
        ids = ids_S.clamp(max=self.experts - 1)
        first, last = self.sizes
        hidden = self._product(first, x_TI.repeat_interleave(top_k, dim=0), ids)
        return self._product(last, self.gate(hidden), ids)

    def _product(self, name: str, x_SI: Tensor, ids_S: Tensor) -> Tensor:
        parts = [self.part(name, expert) for expert in range(self.experts)]
        y = x_SI.unsqueeze(-1)
        for factor in _stacked_factors(parts):
            y = factor @ y if factor.dim() == 2 else torch.bmm(factor[ids_S], y)
        y = y.squeeze(-1)
        return y + torch.stack([part.bias for part in parts])[ids_S] if self.bias else y  # type: ignore[misc]

    @property
    def dense_weight(self) -> str:
        """See `SketchedLayer`."""
        return next(iter(self.sizes))

    @property
    def empty_shape(self) -> tuple[int, ...]:
        """See `SketchedLayer`."""
        inputs, outputs = self.sizes[self.dense_weight]
        return self.experts, inputs if self.transposed else outputs, 0

    def to_dense(self) -> nn.Module:
        """The module that it replaces, of its own class, with the factors multiplied out."""
        dense = _without_projections(self.rest)
        vars(dense).pop("_is_hf_initialized", None)
        for name in self.sizes:
            parts = [self.part(name, expert) for expert in range(self.experts)]
            weights, biases = stack_of_parts(parts, transposed=self.transposed)
            setattr(dense, name, weights)
            if biases is not None:
                setattr(dense, f"{name}_bias", biases)
        return dense.train(self.training)

    @property
    def dense_numbers(self) -> int:
        """See `SketchedLayer.dense_numbers`."""
        biases = self.experts * sum(outputs for _, outputs in self.sizes.values()) if self.bias else 0
        rest = [*self.rest.parameters(), *self.rest.buffers()] if "rest" in self._modules else []
        return self.dense_macs + biases + sum(tensor.numel() for tensor in rest)

    @property
    def dense_macs(self) -> int:
        """See `SketchedLayer.dense_macs`; of a row in every expert."""
        return self.experts * sum(inputs * outputs for inputs, outputs in self.sizes.values())

    def sketch_spec(self) -> Spec:
        """See `SketchedLayer.sketch_spec`."""
        experts = range(self.experts)
        parts = {part_name(name, e): self.part(name, e) for name in self.sizes for e in experts}
        return {
            "experts": self.experts,
            "sizes": {name: list(size) for name, size in self.sizes.items()},
            "bias": self.bias,
            "transposed": self.transposed,
            "parts": {name: spec_of_part(part) for name, part in parts.items()},
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Refuse the weights of dense experts; see `SketchedLayer`."""
        for name in self.sizes:
            dense = state_dict.get(prefix + name)
            if dense is not None and dense.numel() > 0:
                raise CheckpointMismatchError(
                    f"{prefix}{name} {tuple(dense.shape)} holds the weights of dense experts, and here is a "
                    f"{type(self).__name__}: load it into the dense model and call sketchify"
                )
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """The sizes and the stored share; the parts show themselves."""
        share = self.stored_numbers / self.dense_numbers
        return f"experts={self.experts}, sizes={self.sizes}, stored={share:.3f}"


def projections(module: nn.Module) -> tuple[str, ...]:
    """The names of the 3-D parameters in which a module holds its experts, the first one first; else none."""
    held = module._parameters
    first = next((name for name in _PROJECTIONS[:2] if name in held), "")
    names = (first, "down_proj")
    whole = all(held.get(name) is not None and held[name].dim() == 3 for name in names)  # type: ignore[union-attr]
    return names if whole else ()


def is_transposed(module: nn.Module) -> bool:
    """Whether a module's projections are (E, I, O)."""
    return bool(getattr(module, "is_transposed", False))


def has_bias(module: nn.Module) -> bool:
    """Whether a module's experts have biases."""
    return bool(getattr(module, "has_bias", False))


def part_name(stack: str, place: int) -> str:
    """What the linear layer of one matrix is called."""
    return f"{stack.removesuffix('_proj')}_{place}"


def expert_parts(module: nn.Module) -> dict[str, nn.Module]:
    """A linear layer for each expert of each projection, whose parameters are views of the module's."""
    found: dict[str, nn.Module] = {}
    for name in projections(module):
        biases = module.get_parameter(f"{name}_bias") if has_bias(module) else None
        parts = parts_of_stack(module.get_parameter(name), biases, transposed=is_transposed(module))
        found |= {part_name(name, expert): part for expert, part in enumerate(parts)}
    return found


def copied_part(part: nn.Module) -> nn.Module:
    """A dense part with parameters of its own; others as they are."""
    if type(part) is not nn.Linear:
        return part
    new = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None, device="meta")
    new.to_empty(device=part.weight.device).to(part.weight.dtype)
    for mine, theirs in zip(new.parameters(), part.parameters(), strict=True):
        copy_into(mine, theirs)
        mine.requires_grad_(theirs.requires_grad)
    return new


def _sizes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """I and O of each projection."""
    shapes = {name: tuple(module.get_parameter(name).shape[1:]) for name in projections(module)}
    turned = is_transposed(module)
    return {name: shape if turned else shape[::-1] for name, shape in shapes.items()}  # type: ignore[misc]


def _without_projections(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with copies of all tensors and parts but the projections."""
    names = projections(module)
    gone = {*names, *(f"{name}_bias" for name in names)}
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    new._parameters = {
        name: copy.deepcopy(held) for name, held in module._parameters.items() if name not in gone
    }
    new._buffers = copy.deepcopy(module._buffers)
    new._modules = copy.deepcopy(module._modules)
    return new


def _stacked_factors(parts: list[nn.Module]) -> tuple[Tensor, ...]:
    """Factors right (E, R, I) and left (E, O, R), padded to one rank; weights (E, O, I) if one is dense.

    A factor that all experts share is (R, I) or (O, R).
    """
    if not all(isinstance(part, SketchedLinear) for part in parts):
        return (torch.stack([part.weight + 0 for part in parts]),)  # type: ignore[operator, misc]
    pairs = [part.factors() for part in parts]  # type: ignore[operator]
    largest = max(left.shape[1] for left, _ in pairs)
    left = torch.stack([F.pad(one, (0, largest - one.shape[1])) for one, _ in pairs])
    right = torch.stack([F.pad(one, (0, 0, 0, largest - one.shape[0])) for _, one in pairs])
    if all(part.up.weight is parts[0].up.weight for part in parts):  # type: ignore[union-attr]
        left = pairs[0][0]
    if all(part.down.weight is parts[0].down.weight for part in parts):  # type: ignore[union-attr]
        right = pairs[0][1]
    return right, left


def _has_no_values(ids: Tensor) -> bool:
    """Whether it is not known which tokens go where: in a graph, or of a tensor without data."""
    return is_captured() or ids.is_meta or isinstance(ids, FakeTensor)
