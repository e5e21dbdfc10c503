"""Weights that no layer of a known kind holds: how many, and of what."""

from collections.abc import Mapping

from torch import nn

from panther_compile.layers.base import SketchedLayer


def other_weights(model: nn.Module, named: set[str]) -> dict[str, int]:
    """Numbers of the parameters of two or more dimensions that no layer of these names holds; most first.

    Counted by the class of the module, with its full name where torch has a class of the same name.
    """
    seen: set[int] = set()
    rest: list[nn.Module] = []
    for name, module in model.named_modules():
        if name in named or isinstance(module, SketchedLayer):
            seen.update(id(parameter) for parameter in module.parameters())
        else:
            rest.append(module)
    numbers: dict[str, int] = {}
    for module in rest:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dim() > 1 and id(parameter) not in seen:
                seen.add(id(parameter))
                cls = type(module)
                has_namesake = getattr(nn, cls.__name__, cls) is not cls
                kind = f"{cls.__module__}." * has_namesake + cls.__name__
                numbers[kind] = numbers.get(kind, 0) + parameter.numel()
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def others_text(others: Mapping[str, int]) -> str:
    """What `other_weights` found, in words; empty if nothing."""
    counts = ", ".join(f"{numbers:,} of {kind}" for kind, numbers in others.items())
    return f"weights of other kinds of module: {counts}" if counts else ""
