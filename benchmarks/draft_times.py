"""A sketch of SmolLM2-135M as the draft of its dense model: what `generate` takes of it, and its time.

    python benchmarks/draft_times.py [--ratios 0.8 0.5 0.35 0.25] [--healed ...] [--steps 20] [--kept FOLDER]

A sketch takes 15 minutes of a core and 10 GB, healing it 5 to 9; both are kept in the folder. The dense model
goes on with held-out topics of Python's documentation, greedily, one text at a time, on one thread: alone,
with prompt lookup, with the early exit of transformers (the first layers, then the head), and with each
sketch as `assistant_model`. All ways take turns at each text, so that a busy machine is as busy for each;
time is that of the processor. Of each draft the best way counts: so many tokens at once, or as many as it is
sure of (transformers' own default: up to 20 while each has a probability of .4).

Embeddings, norms and head of a sketch are the dense model's own tensors; `share` says what that saves.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy_models import CACHE
from accuracy_models.smollm2 import BATCH, LENGTH, PIECES, pieces, smollm2_texts
from accuracy_models.subject import kept
from torch import Tensor, nn
from transformers import PreTrainedModel

import panther_compile as pc

RATIOS = [0.8, 0.5, 0.35, 0.25]
PROMPT, NEW = 64, 64
JUDGED = 2  # batches that healing is judged by
SURE = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
AT_ONCE = (1, 3)
LOOKED_UP = (3, 10)
EXITS = (15, 25)  # layers of 30


@dataclass
class Way:
    """One way of generating, and what it took so far.

    Attributes:
        draft: whose row it belongs to.
        how: in words.
        options: of `generate`.
        set_up: done before each text.
        widths: for each text, the tokens that each call of the dense model was given.
        seconds: of the processor.
        same: texts whose tokens were those of the dense model alone.
    """

    draft: str
    how: str
    options: dict[str, Any]
    set_up: Callable[[], None] = lambda: None
    widths: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    same: int = 0

    @property
    def calls(self) -> int:
        """Of the dense model."""
        return sum(map(len, self.widths))

    @property
    def drafted(self) -> int:
        """Tokens that were checked; the last of what came before is in each call, the prompt in the first."""
        return sum(sum(one) - len(one) - PROMPT + 1 for one in self.widths)

    @property
    def taken(self) -> int:
        """Drafted tokens that the dense model said too: all that came of a call but its own."""
        return len(self.widths) * NEW - self.calls


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens in each call that gets to the model's last layer."""
    widths: list[int] = []
    hook = model.model.layers[-1].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    try:
        yield widths
    finally:
        hook.remove()


def share(small: nn.Module, dense: nn.Module) -> int:
    """Make every parameter of the sketch that equals the dense one that one; the bytes that this saves."""
    before = stored(small, dense)
    for name, parameter in dense.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        try:
            own = small.get_parameter(name)
        except AttributeError:
            continue  # of a layer that is sketched
        if torch.equal(own, parameter):
            setattr(small.get_submodule(owner), last, parameter)
    return before - stored(small, dense)


def stored(*models: nn.Module) -> int:
    """Bytes of the parameters of all, what they share once."""
    found = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
    return sum(found.values())


def kept_and_timed(folder: Path, dense: PreTrainedModel, make: Callable[[], nn.Module]) -> Any:
    """See `kept`; prints what it took."""
    begin = time.process_time()
    model = kept(folder, dense, make)
    print(f"{folder.name}: {time.process_time() - begin:.0f} s", flush=True)
    return model


def heal(small: nn.Module, dense: nn.Module, data: Tensor, steps: int) -> nn.Module:
    """A sketch that was taught to say what the dense model says."""
    batches = [{"input_ids": ids} for ids in data.split(BATCH)]
    judged_by = JUDGED / len(batches)
    made = pc.heal(small, teacher=dense, data=batches, steps=steps, held_out=judged_by, progress=False)
    print(pc.heal_report(made), flush=True)
    return made


def sketch_ways(name: str, small: PreTrainedModel) -> Iterator[Way]:
    """A sketch as the draft, by each number of tokens."""
    fixed = [
        (f"{count} at once", {"num_assistant_tokens": count, "assistant_confidence_threshold": 0.0})
        for count in AT_ONCE
    ]
    for how, chosen in [*fixed, ("while sure", SURE)]:
        settings = chosen | {"num_assistant_tokens_schedule": "constant"}

        def set_up(settings: dict[str, Any] = settings) -> None:
            small.generation_config.update(**settings)  # what transformers adapts is not carried over

        yield Way(name, how, {"assistant_model": small}, set_up)


def other_ways(dense: PreTrainedModel) -> Iterator[Way]:
    """The dense model alone, and what needs no second model."""
    yield Way("none", "", {})
    for count in LOOKED_UP:
        yield Way("prompt lookup", f"{count} at once", {"prompt_lookup_num_tokens": count})
    for layers in EXITS:

        def set_up() -> None:
            dense.generation_config.update(
                num_assistant_tokens=1,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )

        name = f"early exit after {layers} layers of {len(dense.model.layers)}"
        yield Way(name, "1 at once", {"assistant_early_exit": layers}, set_up)


def measure(dense: PreTrainedModel, ways: list[Way], prompts: Tensor) -> None:
    """All ways take turns at prompts (N, S); the first is the dense model alone."""
    for prompt in prompts:
        wanted = None
        for way in ways:
            way.set_up()
            with watched(dense) as widths:
                begin = time.process_time()
                # min_new_tokens: an end of the text would end it sooner.
                ids = dense.generate(
                    prompt[None], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **way.options
                )
                way.seconds += time.process_time() - begin
            way.widths.append(list(widths))
            wanted = ids if wanted is None else wanted
            way.same += torch.equal(ids, wanted)


def rows(ways: list[Way], sizes: dict[str, str]) -> Iterator[str]:
    """Lines of the table: of each draft the way that took least time."""
    alone = ways[0]
    for draft in dict.fromkeys(way.draft for way in ways):
        way = min((way for way in ways if way.draft == draft), key=lambda way: way.seconds)
        tokens = len(way.widths) * NEW
        taken = f"{100 * way.taken / way.drafted:.0f} %" if way.drafted else ""
        yield (
            f"| {draft} | {sizes.get(draft, '')} | {way.how} | {taken} | {tokens / way.calls:.2f} | "
            f"{1e3 * way.seconds / tokens:.0f} | {alone.seconds / way.seconds:.2f} | "
            f"{way.same} of {len(way.widths)} |"
        )


def main() -> None:
    """Make what is not kept, measure, and print a table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS)
    parser.add_argument("--healed", type=float, nargs="*", default=RATIOS)
    parser.add_argument("--steps", type=int, default=20, help="of healing")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--kept", type=Path, default=CACHE / "sketches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dense, texts = smollm2_texts()
    prompts = pieces(texts["held out"], PROMPT, given.texts, seed=0)
    fitted = [{"input_ids": ids} for ids in pieces(texts["topics"], LENGTH, PIECES, seed=0).split(BATCH)]
    # Of the topics that sketches are fitted to, a new batch for each step.
    fresh = pieces(texts["topics"], LENGTH, BATCH * (given.steps + JUDGED), seed=1)
    ways, sizes = list(other_ways(dense)), {}
    for ratio in sorted({*given.ratios, *given.healed}, reverse=True):
        folder = given.kept / f"smollm2-{ratio:g}"
        small = kept_and_timed(
            folder, dense, partial(pc.sketchify, dense, ratio, data=fitted, progress=False)
        )
        models = {f"`ratio={ratio:g}`": small} if ratio in given.ratios else {}
        if ratio in given.healed:
            folder = folder.with_name(f"{folder.name}-healed-{given.steps}")
            made = kept_and_timed(folder, dense, partial(heal, small, dense, fresh, given.steps))
            models[f"`ratio={ratio:g}`, healed"] = made
        for name, model in models.items():
            saved = share(model, dense)
            sizes[name] = f"{(stored(dense, model) - stored(dense)) / 1e6:.0f}"
            print(f"{name}: {saved / 1e6:.0f} MB shared", flush=True)
            ways += sketch_ways(name, model)
    measure(dense, ways, prompts)
    heads = ("draft", "MB more", "drafted", "taken", "tokens a call", "ms a token", "times", "the same texts")
    print(f"\n| {' | '.join(heads)} |\n|---|--:|---|--:|--:|--:|--:|--:|")
    print("\n".join(rows(ways, sizes)))
    for way in ways:
        print(f"{way.draft}, {way.how}: {way.calls} calls, {way.drafted}, {way.taken}, {way.seconds:.1f} s")


if __name__ == "__main__":
    main()
