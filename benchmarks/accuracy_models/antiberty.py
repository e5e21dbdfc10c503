"""AntiBERTy, a BERT of antibodies' sequences (Ruffolo et al. 2021), from the package antiberty.

Sequences are sampled by IgLM, a language model of them (Shuai et al. 2023), from the package iglm.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, GPT2LMHeadModel

from accuracy_models.efficientnet import folder_of
from accuracy_models.subject import Subject

HUMAN = ("[HUMAN]",)
OTHERS = ("[MOUSE]", "[RAT]", "[RHESUS]", "[RABBIT]")
COUNT, HEAL_COUNT, HELD_OUT, BATCH = 64, 256, 128, 8
HIDDEN = 0.15  # of the residues, as in training
LEAST, MOST = 90, 140  # residues of a variable domain
KEYS = ("input_ids", "attention_mask")


@cache
def sequences(count: int, species: tuple[str, ...], seed: int) -> tuple[str, ...]:
    """Variable domains of heavy and light chains, sampled at a temperature of 1."""
    folder = folder_of("iglm") / "trained_models"
    tokens = (folder / "vocab.txt").read_text().split()
    model = GPT2LMHeadModel.from_pretrained(folder / "IgLM").eval()
    end = tokens.index("[SEP]")
    others = [[place] for place, token in enumerate(tokens) if token[0] == "[" and place != end]
    found: list[str] = []
    generator = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        while len(found) < count:
            start = [generator.choice(("[HEAVY]", "[LIGHT]")), generator.choice(species)]
            ids = torch.tensor([[tokens.index(token) for token in start]] * 16)
            options = {"pad_token_id": 0, "eos_token_id": end, "bad_words_ids": others, "top_k": 0}
            for row in model.generate(ids, max_length=MOST + 10, do_sample=True, **options):
                text = "".join(tokens[place] for place in row[2:] if tokens[place][0] != "[")
                if LEAST < len(text) < MOST:
                    found.append(text)
    return tuple(found[:count])


def masked(texts: tuple[str, ...], seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches of sequences, some of whose residues are hidden, and which."""
    tokens = (folder_of("antiberty") / "trained_models" / "vocab.txt").read_text().split()
    first, last, hidden = (tokens.index(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for place in range(0, len(texts), BATCH):
        rows = [
            torch.tensor([first, *map(tokens.index, text), last]) for text in texts[place : place + BATCH]
        ]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        chosen = (torch.rand(ids.shape, generator=generator) < HIDDEN) & (ids > max(first, last, hidden))
        found.append((dict(zip(KEYS, (ids.masked_fill(chosen, hidden), real), strict=True)), chosen))
    return found


def antiberty(cache: Path, quick: bool) -> Subject:
    """The subject; nothing is kept in the cache."""
    del cache
    part = 4 if quick else 1
    folder = folder_of("antiberty") / "trained_models" / "AntiBERTy_md_smooth"
    model = BertForMaskedLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    held_out = masked(sequences(HELD_OUT // part, HUMAN, 1000), 1000)

    @torch.no_grad()
    def chances(candidate: nn.Module) -> Tensor:
        return torch.cat([candidate(**batch).logits[chosen].log_softmax(-1) for batch, chosen in held_out])

    dense = chances(model)

    def evaluate(candidate: nn.Module) -> dict[str, float]:
        found = chances(candidate)
        same = (found.argmax(-1) == dense.argmax(-1)).float().mean()
        return {"same residue": float(same), "KL": float((dense.exp() * (dense - found)).sum(-1).mean())}

    def batches(domain: str, seed: int, count: int) -> list[Any]:
        species = HUMAN if domain == "in" else OTHERS
        return [batch for batch, _ in masked(sequences(count // part, species, seed), seed)]

    return Subject(
        title="AntiBERTy (a BERT of antibodies), hidden residues against those that the dense model finds",
        model=model,
        blocks=tuple(f"bert.encoder.layer.{i}" for i in range(model.config.num_hidden_layers)),
        calibration=lambda domain, seed: batches(domain, seed, COUNT),
        in_domain=f"{COUNT // part} other human antibodies",
        off_domain=f"{COUNT // part} antibodies of mice, rats, rhesus monkeys and rabbits",
        healing=lambda domain, seed: batches(domain, seed, HEAL_COUNT),
        healed_on=f"{HEAL_COUNT // part} such antibodies, {BATCH} at a time",
        heal_steps=25 if quick else 100,
        evaluate=evaluate,
        metrics={"same residue": True, "KL": False},
        outputs="classes",
    )
