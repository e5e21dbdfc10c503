"""What an entry of the zoo is, how one is made, and the inputs that several share."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

Inputs = dict[str, Tensor] | tuple[Tensor, ...]

VOCAB = 128
NEW_TOKENS = 4


# ------------------------------------------------------------------------------------------ helpers


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Run the model on the inputs of its entry."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensors(output: Any) -> list[Tensor]:
    """Every floating tensor of an output, depth first, in the output's own order.

    Mappings (a `ModelOutput` is one), sequences and dataclasses are walked; caches and other
    objects are not.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        children = list(output.values())
    elif isinstance(output, (list, tuple)):
        children = list(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        children = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        children = []
    return [tensor for child in children for tensor in tensors(child)]


def scalar(output: Any) -> Tensor:
    """A loss for any output: mean squared distances of its tensors to a fixed wave, summed.

    Not the plain mean square: that is constant for the output of a layer norm, so nothing would
    learn.
    """
    found = tensors(output)
    if not found:
        raise ValueError(f"no floating tensor in an output of type {type(output).__name__}")
    terms = []
    for tensor in found:
        flat = tensor.reshape(-1)
        wave = torch.cos(1.7 * torch.arange(flat.numel(), device=flat.device, dtype=torch.float32))
        terms.append((flat - wave.to(flat.dtype)).square().mean())
    return torch.stack([term.to(terms[0].device, terms[0].dtype) for term in terms]).sum()


def generate(model: nn.Module, entry: ZooModel) -> Tensor:
    """Greedy tokens from a model of an entry that has `generate`."""
    if entry.generate is None:
        raise ValueError(f"{entry.name} does not generate")
    inputs = entry.inputs()
    assert isinstance(inputs, dict)
    prompt = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    return model.generate(**prompt, **entry.generate)  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One model: how to build it (in eval mode), what to feed it, how to train and to sample it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = scalar
    generate: dict[str, Any] | None = None
    notes: str = ""
    # Parameters that the plain forward cannot reach (by prefix), so that have no gradient.
    no_grad: tuple[str, ...] = ()
    # What the plain forward is known to warn of (regular expressions).
    warns: tuple[str, ...] = ()


ZOO: dict[str, ZooModel] = {}


def names() -> list[str]:
    """The names of all models, in the order of registration."""
    return list(ZOO)


def generating() -> list[str]:
    """The names of the models that have `generate`."""
    return [name for name, entry in ZOO.items() if entry.generate is not None]


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())


def _enliven(model: nn.Module, inputs: Inputs) -> None:
    """Make every layer matter: no zero bias, no unit norm, no signal that dies on its way.

    Convolutions keep the variance of their input, and batch norms get the statistics of `inputs`.
    With the usual small weights the output of a deep convnet is its biases, and no error in a layer
    would show.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d)) and not is_parametrized(module):
                fan_in = module.weight[0].numel()
                module.weight.normal_(std=(2 / fan_in) ** 0.5)
        for norm in norms:
            norm.weight.fill_(1.0)
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if norms:
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = 1.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(model.train(), inputs)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def register(
    name: str,
    inputs: Callable[[torch.Generator], Inputs],
    *,
    generate: bool = False,
    notes: str = "",
    no_grad: tuple[str, ...] = (),
    warns: tuple[str, ...] = (),
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def decorate(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def draw() -> Inputs:
            return inputs(torch.Generator().manual_seed(_seed(name + "/inputs")))

        def build() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(name))
                model = make()
                _enliven(model, draw())
            return model.eval()

        ZOO[name] = ZooModel(
            name=name,
            build=build,
            inputs=draw,
            generate=dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
            if generate
            else None,
            notes=notes,
            no_grad=no_grad,
            warns=warns,
        )
        return make

    return decorate


def token_ids(generator: torch.Generator, batch: int = 2, length: int = 10) -> Tensor:
    return torch.randint(4, VOCAB, (batch, length), generator=generator)


def text_inputs(generator: torch.Generator) -> Inputs:
    """Token ids and a mask; the second row is padded on the right by three."""
    ids = token_ids(generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def prompt_inputs(generator: torch.Generator) -> Inputs:
    """Token ids and a full mask, for the decoders."""
    ids = token_ids(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pair_inputs(generator: torch.Generator) -> Inputs:
    inputs = text_inputs(generator)
    assert isinstance(inputs, dict)
    return {**inputs, "decoder_input_ids": token_ids(generator, length=6)}


def pixel_inputs(size: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def image_inputs(size: int, channels: int = 3) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randn(2, channels, size, size, generator=generator),)


def vector_inputs(*shape: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randn(*shape, generator=generator),)
