"""Whether two models are a sketched one and the dense one that it was made of."""

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from panther_compile.config import check_is_module
from panther_compile.errors import ConfigTypeError, TeacherMismatchError, WeightError
from panther_compile.layers.base import check_factors, sketched_layers
from panther_compile.models.batches import device_of
from panther_compile.models.surroundings import eval_mode
from panther_compile.names import dotted
from panther_compile.planning.own_weights import lifted
from panther_compile.planning.sites import check_module


def check_pair(small: nn.Module, teacher: nn.Module) -> None:
    """Check that the models are alike but for the sketched layers.

    A weight that a layer makes of its parameters, as pruning and parametrizations have it, counts as the
    weight: either model may have gained or lost one of those.

    Raises:
        ConfigTypeError: one is no module, or was made under `torch.inference_mode()`.
        NoTargetError: `small` holds no sketched layer.
        TeacherMismatchError: the teacher is not the dense model that `small` was made of, or elsewhere.
        WeightError: a factor was quantized or sharded, or has no numbers.
        WrappedModelError: a model is wrapped in DDP, FSDP or torch.compile.
    """
    for role, model in (("small", small), ("teacher", teacher)):
        check_is_module(role, model)
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ConfigTypeError(
                f"{role}, {type(model).__name__}, was made under torch.inference_mode(), which rules "
                "gradients out: make it outside"
            )
    for model in (small, teacher):
        check_module(model)
    sketched = set(sketched_layers(small))
    check_factors(small, "heal the model")
    if small is teacher:
        raise TeacherMismatchError("small and teacher are the same model, wanted the dense one as teacher")
    ours, its = device_of(small), device_of(teacher)
    if ours != its:
        raise TeacherMismatchError(f"small is on {ours}, the teacher on {its}, wanted one device")
    if ours is not None and ours.type == "meta":
        raise WeightError(f"{type(small).__name__} is on the meta device: load the weights before healing")
    every = small.named_modules(remove_duplicate=False)
    inside = tuple(f"{name}." if name else "" for name, module in every if module in sketched)
    dense = lifted(teacher)  # where layers stand for its parameters, as in a sketch of it
    theirs = _shapes(teacher) | _shapes(dense)
    for name, shape in _shapes(small).items():
        if not name.startswith(inside) and theirs.get(name) != shape:
            there = f"of shape {tuple(theirs[name])}" if name in theirs else "missing"
            raise TeacherMismatchError(
                f"{name} {tuple(shape)} of {type(small).__name__} is {there} in the teacher, "
                f"{type(teacher).__name__}: wanted the dense model that was sketched"
            )
    graphs = isinstance(small, fx.GraphModule)  # whose functional calls were made into layers
    known = {name for name, _ in dense.named_modules(remove_duplicate=False)}
    for name in inside:
        if not graphs and name[:-1] not in known:
            raise TeacherMismatchError(
                f"the sketched layer {name[:-1]} of {type(small).__name__} is missing in the teacher, "
                f"{type(teacher).__name__}: wanted the dense model that was sketched"
            )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of every parameter by name; of a tensor that is made of parameters, in place of theirs."""
    shapes: dict[str, torch.Size] = {}
    with eval_mode(model), torch.no_grad():
        for prefix, module in model.named_modules(remove_duplicate=False):
            if "parametrizations" in prefix.split("."):
                continue
            tensors = {name: one for name, one in module._parameters.items() if one is not None}
            if parametrize.is_parametrized(module):
                tensors |= {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
            for name in list(tensors):
                made = vars(module).get(key := name.rpartition("_")[0])
                if isinstance(made, Tensor):  # by a hook: weight of weight_orig, or of weight_g and weight_v
                    del tensors[name]
                    tensors[key] = made
            shapes |= {dotted(prefix, name): one.shape for name, one in tensors.items()}
    return shapes
