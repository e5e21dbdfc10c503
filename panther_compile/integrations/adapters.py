"""LoRA of PEFT on sketched layers, by the names of the dense ones, and its start from what a sketch left out.

PEFT wraps a layer by what kind it is. For sketched linear layers its table has no line, so ours is asked
before it, once PEFT is imported: `get_peft_model`, `add_adapter` and saved adapters all come by there.

    y = L R x + s B A x + b            L (O, r), R (r, I); B (O, k), A (k, I), s the scale of the adapter
    merged: [L, s B] [R; A] x + b      of rank r + k, equal but for rounding; dense where that stores less

An adapter usually starts at B = 0. It can start as the best one of its rank for what the sketch left out: of
the weight, s B A = [W - L R]ₖ by truncated SVD; or of what the layer computes, see calibration/branch_fit.py.
"""

# O out_features, I in_features, R rank of the sketch, k rank of the adapter
import copy
import dataclasses
import importlib
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from panther_compile.calibration.branch_fit import fit_branches
from panther_compile.calibration.branch_sums import Branch, best_of_matrix
from panther_compile.errors import (
    ConfigError,
    NoTargetError,
    SketchQualityWarning,
    TeacherMismatchError,
)
from panther_compile.integrations.pretrained import empty_weights
from panther_compile.kinds.registry import kind_of
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import check_factors, outermost, take_over
from panther_compile.layers.experts import SketchedExperts
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.linear_replacement import LinearReplacement
from panther_compile.layers.narrow import NarrowLinear, inner_layer
from panther_compile.models.batches import Data, record_calls, spread_out

# What PEFT may start an adapter with that leaves the layer's own weight as it is.
STARTS = (True, False, "gaussian", "orthogonal", "eva")


class SketchedLoraLinear(LoraLinear):  # type: ignore[misc]
    """PEFT's LoRA layer around a sketched linear layer; the adapter is of the size that the layer works at.

    Raises:
        ConfigError: the start needs to change the layer's weight ("pissa", "corda", "olora" ...): see
            `init_lora_from_dense`.
    """

    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    scaling: Any

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA alone."""
        return {(): None}

    def resolve_lora_variant(self, *, config: Any, **options: Any) -> None:
        """Refuse all others, which PEFT does too, in a riddle.

        Raises:
            ConfigError: one is asked for.
        """
        for one in dataclasses.fields(config):
            if one.metadata.get("is_lora_variant") and (asked := getattr(config, one.name)):
                raise ConfigError(
                    f"{one.name}={asked!r} is more than plain LoRA, which is all that a sketched layer takes"
                )

    @property
    def bias(self) -> Any:
        """The parameter that holds the layer's bias, which `bias="lora_only"` trains; None if it has none."""
        return inner_layer(self.get_base_layer()).bias

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        core = inner_layer(module)
        return core.in_features, core.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **options: Any) -> None:
        """See PEFT."""
        start = config.init_lora_weights
        if start not in STARTS:
            raise ConfigError(
                f"init_lora_weights={start!r} changes the weight of the layer, or is made of it, and a "
                f"sketched one has only factors: wanted one of {STARTS}, then "
                "init_lora_from_dense(model, dense)"
            )
        if start == "eva" and isinstance(self.get_base_layer(), NarrowLinear):
            raise ConfigError(
                "init_lora_weights='eva' of a narrow layer: its adapter works between the features that are "
                "kept, and PEFT sees all; wanted exclude_modules= for it, or another start"
            )
        super().update_layer(adapter_name, r, lora_alpha, config, **options)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """See PEFT; the adapter of a narrow layer works between the features that are kept."""
        base: Any = self.get_base_layer()
        if self.disable_adapters or self.merged or not isinstance(base, NarrowLinear):
            return super().forward(x, *args, **options)
        self._check_forward_args(x, *args, **options)
        y = base(x)
        seen = base.read(x) if base.side == "in" else x
        by_row = options.get("adapter_names")  # of each sample
        for name in self._active() if by_row is None else set(by_row) & set(self.lora_A):
            if by_row is None:
                y = y + self._adapted(base, name, seen).to(y.dtype)
                continue
            rows = torch.tensor([row for row, own in enumerate(by_row) if own == name], device=y.device)
            y = y.index_add(0, rows, self._adapted(base, name, seen[rows]).to(y.dtype))
        return y

    def _adapted(self, base: NarrowLinear, name: str, seen: Tensor) -> Tensor:
        """What an adapter adds to the result of a narrow layer, from the features that are read."""
        a, b = self.lora_A[name], self.lora_B[name]
        dropped = self.lora_dropout[name](self._cast_input_dtype(seen, a.weight.dtype))
        more = b(a(dropped)) * self.scaling[name]
        return base.pad(more, -1) if base.side == "out" and (base.padded or base.wide) else more

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put adapters into the factors, see the file; the layer before is kept for `unmerge`."""
        for name in check_adapters_to_merge(self, adapter_names) or ():
            if name not in self.lora_A:
                continue
            base: Any = self.get_base_layer()
            check_factors(base, "merge adapters into the model")
            a, b = self.lora_A[name], self.lora_B[name]
            new = _with_more(
                base, self.scaling[name] * b.weight.detach().double(), a.weight.detach().double()
            )
            if b.bias is not None:
                if new.bias is None:
                    core = inner_layer(base)
                    raise ConfigError(
                        f"lora_bias=True of the adapter {name!r} cannot be merged: its {type(base).__name__}"
                        f"({core.in_features}, {core.out_features}) has no bias"
                    )
                with torch.no_grad():
                    inner_layer(new).bias.add_(self.scaling[name] * b.bias)
            if safe_merge and not all(bool(torch.isfinite(p).all()) for p in new.parameters()):
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken"
                )
            self.__dict__.setdefault("_before", []).append(base)
            self.base_layer = new
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take the adapters out again."""
        while self.merged_adapters:
            self.merged_adapters.pop()
            now = next(self.base_layer.parameters())  # casts and moves since did not reach the one before
            self.base_layer = self.__dict__["_before"].pop().to(now.device, now.dtype)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What an adapter adds to the weight, as the dense layer keeps it; or within a narrow one."""
        delta: Tensor = self.scaling[adapter] * (self.lora_B[adapter].weight @ self.lora_A[adapter].weight)
        return delta.t() if self.fan_in_fan_out else delta


def init_lora_from_dense(
    model: nn.Module, dense: nn.Module, *, data: Data | None = None, adapter: str = "default"
) -> None:
    """Start the adapters on sketched layers as the best ones of their rank for what the sketch left out.

        >>> from panther_compile.integrations.adapters import init_lora_from_dense
        >>> tuned = get_peft_model(small, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
        >>> init_lora_from_dense(tuned, model, data=calibration)

    Args:
        model: a sketched model with adapters, changed in place.
        dense: the model that was sketched.
        data: inputs of the model, see `sketchify`: layer by layer the adapter is fitted to what the sketch
            lacks of the dense model's outputs there, weighed by what the result minds. A fifth of the data,
            to which no adapter is fitted, judges: where results come no closer there, adapters start as PEFT
            started them, at nothing, and a warning says so. Give other data than the sketch was fitted to,
            where it lacks little. None takes what the weights lack, which suits a sketch that was made from
            the weights alone: one that was fitted to data makes up for its own errors, and such an adapter
            would do so again.
        adapter: its name.

    Raises:
        NoTargetError: no sketched layer has an adapter of that name.
        TeacherMismatchError: the dense model lacks a layer, or has it in another size; or a layer is narrow.
        WeightError: the factors are quantized, and there is no data.
    """
    given: Any = model
    inside: nn.Module = given.get_base_model() if hasattr(model, "get_base_model") else model
    layers = {
        name: layer
        for name, layer in inside.named_modules()
        if isinstance(layer, SketchedLoraLinear) and adapter in layer.lora_A
    }
    if not layers:
        raise NoTargetError(f"no sketched layer of {type(model).__name__} has an adapter {adapter!r}")
    twins = {name: _twin(name, layer, dense) for name, layer in layers.items()}

    def put(name: str, up: Tensor, down: Tensor) -> None:
        layer = layers[name]
        with torch.no_grad():
            layer.lora_A[adapter].weight.copy_(down)
            layer.lora_B[adapter].weight.copy_(up / layer.scaling[adapter])

    if data is None:
        check_factors(inside, "start adapters from what the weights of the model lack")
        for name, layer in layers.items():
            put(name, *best_of_matrix(_residual(layer, twins[name]), layer.r[adapter]))
        return
    started = {}
    for name, layer in layers.items():
        nn.init.zeros_(layer.lora_B[adapter].weight)
        started[name] = layer.lora_A[adapter].weight.detach().clone()
    ranks = {name: layer.r[adapter] for name, layer in layers.items()}

    def put_fitted(name: str, branch: Branch) -> None:
        put(name, branch.up, branch.down)

    calls = spread_out(record_calls(inside, data))
    before, after = fit_branches(inside, layers, dense, twins, ranks, calls, put_fitted)
    if not after < before:
        for name, layer in layers.items():
            put(name, torch.zeros_like(layer.lora_B[adapter].weight), started[name])
        warnings.warn(
            f"adapters fitted to this data bring the results no closer to the dense model's on others: "
            f"{after:.3g} off, {before:.3g} without; they start at nothing. Give more data, and other than "
            "the sketch was fitted to",
            SketchQualityWarning,
            stacklevel=2,
        )


def _twin(name: str, layer: SketchedLoraLinear, dense: nn.Module) -> nn.Module:
    """The dense layer of an adapted one."""
    base: Any = layer.get_base_layer()
    if isinstance(base, NarrowLinear):
        raise TeacherMismatchError(f"{name} is narrow: its features are not those of the dense layer")
    try:
        twin: Any = dense.get_submodule(name)
    except AttributeError as error:
        raise TeacherMismatchError(f"the dense model has no layer {name!r}") from error
    weight = getattr(twin, "weight", None)
    if isinstance(twin, LinearReplacement) or weight is None or weight.shape != base.weight.shape:
        raise TeacherMismatchError(
            f"{name} of the dense model is {twin}: wanted a dense layer whose weight is "
            f"{tuple(base.weight.shape)}"
        )
    return cast(nn.Module, twin)


def _residual(layer: SketchedLoraLinear, twin: Any) -> Tensor:
    """What the factors lack of the dense weight (O, I)."""
    base: Any = layer.get_base_layer()
    own = base.weight.detach().double()
    lacking: Tensor = base.turned(twin.weight.detach().double().to(own.device) - own)
    return lacking


def _with_more(base: nn.Module, left: Tensor, right: Tensor) -> Any:
    """A layer whose weight is that of `base` plus left (O, k) @ right (k, I)."""
    core = inner_layer(base)
    new: Any = _added(core, left, right)
    take_over(new, core, next(core.parameters()).requires_grad)
    return base.with_inner(new) if isinstance(base, NarrowLinear) else new


def _added(core: nn.Module, left: Tensor, right: Tensor) -> nn.Module:
    """The same of a layer that is not narrow: with more factors, or dense where that stores less."""
    if not isinstance(core, SketchedLinear):
        new = copy.deepcopy(core)
        view = kind_of(new).view(new)
        assert isinstance(view, LinearView)
        weight = view.weight_and_bias()[0].detach()  # (O, I), of the same numbers
        weight.copy_(weight.double() + left @ right)
        return new
    old = [factor.detach().double() for factor in core.factors()]
    left, right = torch.cat([old[0], left], dim=1), torch.cat([old[1], right])
    rank, inputs, outputs = left.shape[1], core.in_features, core.out_features
    if rank >= min(inputs, outputs) or rank * (inputs + outputs - rank) >= inputs * outputs:
        return core.dense_with(left @ right)
    like = core.up.weight
    return type(core).from_factors(left, right, core.bias, dtype=like.dtype, device=like.device)


def _dispatch(target: nn.Module, adapter_name: str, config: Any, **options: Any) -> nn.Module | None:
    """PEFT's layer for a target; None leaves it to whoever is asked next."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, LinearReplacement) and options.get("parameter_name") is None:
        return SketchedLoraLinear(target, adapter_name, config=config, **options)
    found: nn.Module | None = _theirs(target, adapter_name, config=config, **options)
    return found


def _check_parameters(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ConfigError where `target_parameters` names weights of sketched layers: PEFT would skip them."""
    dense = list(empty_weights(model))
    for name, module in model.named_modules():
        dense += [f"{name}.{one}" for one in module.sizes] if isinstance(module, SketchedExperts) else []
    for target in targets:
        found = [name for name in dense if f".{name}".endswith(f".{target}")]
        if found:
            raise ConfigError(
                f"target_parameters={target!r} is {found[0]}, of which the sketch has only factors: wanted "
                "its layer in target_modules if that is linear, or exclude= for it when the model is sketched"
            )


def _inject(self: Any, model: nn.Module, adapter_name: str, *args: Any, **options: Any) -> None:
    """PEFT's, to which a sketched layer is one layer: "all-linear" is it, and no factor in it is a target."""
    names = {id(module): name for name, module in model.named_modules()}
    sketched = [layer for layer in outermost(model) if id(layer) in names]
    inside = {names[id(part)] for layer in sketched for part in layer.modules() if part is not layer}
    config = self.peft_config[adapter_name]
    _check_parameters(model, getattr(config, "target_parameters", None) or ())
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        found = _helpers._maybe_include_all_linear_layers(config, model).target_modules
        head = getattr(model, "get_output_embeddings", lambda: None)()
        linear = {
            names[id(one)] for one in sketched if isinstance(one, LinearReplacement) and one is not head
        }
        config.target_modules = found - inside | linear
    matches = self._check_target_module_exists

    def check(config: Any, key: str) -> Any:
        return False if key in inside else matches(config, key)

    self._check_target_module_exists = check
    try:
        _inject_theirs(self, model, adapter_name, *args, **options)
    finally:
        del self._check_target_module_exists


def _bias_names(model: nn.Module) -> dict[str, str]:
    """The names of the biases of sketched layers, and of the dense ones that they are the same numbers as."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for layer in outermost(model):
        own = [(name, one) for name, one in layer.named_parameters() if name.rpartition(".")[2] == "bias"]
        dense = getattr(layer, "bias", None)
        if len(own) == 1 and dense is not None and own[0][1].shape == dense.shape:
            found[f"{names[id(layer)]}.{own[0][0]}"] = f"{names[id(layer)]}.bias"
    return found


def _biases_of(cls: Any, model: nn.Module, state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """PEFT's: the trained biases that are saved; those of sketched layers by their dense names."""
    found: dict[str, Tensor] = _biases_theirs(cls, model, state_dict, config)
    if config.bias == "lora_only":  # PEFT looks for the name of a dense layer's
        layers = [
            f"{name}.base_layer." for name, m in model.named_modules() if isinstance(m, SketchedLoraLinear)
        ]
        found |= {
            name: bias
            for name, bias in state_dict.items()
            if name.startswith(tuple(layers)) and name.endswith(".bias")
        }
    dense = _bias_names(model)
    return {dense.get(name, name): bias for name, bias in found.items()}


def _from_saved(cls: Any, model: nn.Module, *args: Any, **options: Any) -> dict[str, Tensor]:
    """PEFT's: the tensors of an adapter's file by their names in the model, biases among them."""
    own = {dense: name for name, dense in _bias_names(model).items()}
    own |= {f"base_model.model.{dense}": name for dense, name in own.items()}  # of a model without PeftModel
    found: dict[str, Tensor] = _from_saved_theirs(cls, model, *args, **options)
    return {own.get(name, name): value for name, value in found.items()}


_helpers: Any = importlib.import_module("peft.tuners.tuners_utils")
_table: Any = importlib.import_module("peft.tuners.lora.model")
_theirs = _table.dispatch_default
_table.dispatch_default = _dispatch
_inject_theirs = _table.LoraModel.inject_adapter
_table.LoraModel.inject_adapter = _inject
_biases_theirs = _table.LoraModel._get_learnable_bias_state_dict.__func__
_table.LoraModel._get_learnable_bias_state_dict = classmethod(_biases_of)
_from_saved_theirs = _table.LoraModel._remap_adapter_state_dict_for_load.__func__
_table.LoraModel._remap_adapter_state_dict_for_load = classmethod(_from_saved)
