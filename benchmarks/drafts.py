"""A sketch as the draft of its dense model: how many of its tokens are taken, and what that could be worth.

    python benchmarks/drafts.py [--ratios 0.8 0.5 0.35 0.25]     a few minutes of a core

The small GPT of accuracy.py goes on with held-out texts, greedily. A draft is taken as far as it says what
the dense model would; so whether the sketch agrees at each place of the dense model's own texts tells what is
taken, whatever the number of tokens that are drafted at once. Worth counts a call of the dense model as 1,
whether it checks one token or nine, and a token of the sketch as its share of the stored numbers: what
decoding one text is bound by at best. The best number of drafted tokens is taken for each row.
"""

import argparse
import copy

import torch
from accuracy_models import load_subject
from accuracy_models.gpt import calibration, prepare
from torch import Tensor, nn

import panther_compile as pc

PROMPT, NEW, TEXTS = 64, 64, 64
MOST = 8  # tokens drafted at once
LOOKED_UP = 3  # bytes that are looked for in the text so far


@torch.inference_mode()
def continued(model: nn.Module, prompts: Tensor) -> Tensor:
    """Prompts (N, S) and what the model adds to them, greedily."""
    ids = prompts
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.inference_mode()
def agreement(model: nn.Module, texts: Tensor) -> list[list[list[bool]]]:
    """For each text and place of it, whether the tokens that are drafted there are right."""
    right = (model(texts[:, :-1]).argmax(-1) == texts[:, 1:])[:, PROMPT - 1 :]
    return [[row[place : place + MOST] for place in range(NEW)] for row in right.tolist()]


def looked_up(texts: Tensor) -> list[list[list[bool]]]:
    """The same of what followed the last tokens where these stood before in the text; empty where not."""
    found = []
    for text in texts.tolist():
        places = []
        for end in range(PROMPT, PROMPT + NEW):
            last = text[end - LOOKED_UP : end]
            before = [at for at in range(end - LOOKED_UP) if text[at : at + LOOKED_UP] == last]
            draft = text[before[-1] + LOOKED_UP : end][:MOST] if before else []
            places.append([a == b for a, b in zip(draft, text[end:], strict=False)])
        found.append(places)
    return found


def decoded(texts: list[list[list[bool]]], most: int) -> tuple[int, int, int]:
    """Calls of the dense model, drafted tokens and taken ones, at so many drafted at once."""
    calls = drafts = taken = 0
    for places in texts:
        at = 0
        while at < NEW:
            draft = places[at][: min(most, NEW - at - 1)]
            right = draft.index(False) if False in draft else len(draft)
            calls, drafts, taken = calls + 1, drafts + len(draft), taken + right
            at += right + 1
    return calls, drafts, taken


def row(name: str, texts: list[list[list[bool]]], cost: float) -> str:
    """A line of the table."""
    total = len(texts) * NEW
    ways = {most: decoded(texts, most) for most in range(1, MOST + 1)}
    worth = {most: total / (calls + drafts * cost) for most, (calls, drafts, _) in ways.items()}
    best = max(worth, key=lambda most: worth[most])
    calls, drafts, taken = ways[best]
    first = sum(places[at][:1] == [True] for places in texts for at in range(NEW))
    return (
        f"| {name} | {100 * first / total:.0f} % | {cost:.2f} | {best} | {100 * taken / drafts:.0f} % | "
        f"{total / calls:.2f} | {worth[best]:.2f} |"
    )


def main() -> None:
    """Measure, and print a table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.5, 0.35, 0.25])
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, texts = load_subject("gpt").model, prepare()
    data = list(torch.cat(calibration(texts, "in", 0, 256)).split(8))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    wanted = continued(model, texts["held out"][:TEXTS, :PROMPT])
    heads = ("draft", "right", "its cost", "drafted at once", "taken", "tokens a call", "worth")
    print(f"| {' | '.join(heads)} |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    print(row("prompt lookup", looked_up(wanted), 0.0), flush=True)
    for ratio in given.ratios:
        small = pc.sketchify(copy.deepcopy(model), ratio, data=data, progress=False)
        stored = sum(parameter.numel() for parameter in small.parameters())
        print(row(f"`ratio={ratio}`", agreement(small, wanted), stored / numbers), flush=True)


if __name__ == "__main__":
    main()
