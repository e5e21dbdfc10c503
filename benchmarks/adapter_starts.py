"""What LoRA adapters start from: what a sketch left out, beside zero, PiSSA, CorDA and EVA of PEFT.

    python benchmarks/adapter_starts.py [--ratio 0.25] [--weights]     ten minutes of a core
    python benchmarks/adapter_starts.py --model smollm2 --ratio 0.8 --rank 16 --steps 20 --rates 2e-4 \
        [--kept FOLDER] [--bases sketch]                               an hour and 6 GB; the sketch is kept

The models are the small GPT of accuracy.py, which is trained first if it is not yet, and SmolLM2-135M, as
examples/compress_smollm2.py has it: adapters start from and are trained on other pieces than those that the
sketch was fitted to. Every row has adapters of the same rank on the same layers, sees the same batches in the
same order, and is judged by text that neither the sketch nor the adapter has seen. Each start is trained at
each of the rates; the one that ends best counts. PiSSA and CorDA change the weight of a layer, so they start
on the sketch with its factors multiplied out, which is the same function. Rows of the dense model show what
the sketch cost. Seconds are the processor's.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy_models import load_subject
from accuracy_models.gpt import calibration as draw_calibration
from accuracy_models.gpt import prepare
from accuracy_models.subject import kept
from compress_smollm2 import LENGTH, PROJECTIONS, load_smollm2
from peft import EvaConfig, LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import panther_compile as pc
from panther_compile.integrations.adapters import init_lora_from_dense

STARTS = {
    "sketch": ("zero", "ours, data", "pissa", "eva", "corda", "ours, weights"),
    "dense": ("zero", "eva", "pissa", "corda"),
}
PIECES = 24  # of SmolLM2, that the sketch is fitted to, and as many that adapters start from


@dataclass(frozen=True)
class Subject:
    """A trained decoder and its texts.

    Attributes:
        model: dense; ids (B, T) to logits.
        targets: names of the layers with adapters, as PEFT takes them.
        fitted: ids (N, T) that the sketch is fitted to.
        start: ids that adapters start from.
        train: ids that they are trained on.
        unseen: ids to be judged by.
        batch: rows of a training step.
        options: of `sketchify` with data.
    """

    model: nn.Module
    targets: str
    fitted: Tensor
    start: Tensor
    train: Tensor
    unseen: Tensor
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        found = model(ids)
        logits = getattr(found, "logits", found)
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        """The loss on unseen text."""
        model.eval()
        parts = self.unseen.split(self.batch)
        return sum(float(self.loss(model, part)) * len(part) for part in parts) / len(self.unseen)


def small_gpt() -> Subject:
    """The byte-level GPT that accuracy.py trains."""
    texts = prepare()
    model = load_subject("gpt").model
    seen = torch.cat(draw_calibration(texts, "in", 0, 1024))
    # In full: the factors of a sketched layer are called up and down as well.
    targets = r"blocks\.\d+\.(attention\.(query|key|value|out)|up|down)"
    return Subject(model, targets, seen[:64], seen[:64], seen, texts["held out"][:64, :-1], 8)


def smollm2() -> Subject:
    """SmolLM2-135M, in the pieces of examples/compress_smollm2.py."""
    model, tokens = load_smollm2()
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    fitted, start, rest = rows.split([PIECES, PIECES, len(rows) - 2 * PIECES])
    targets = rf".*\.({'|'.join(PROJECTIONS)})"
    unseen = rows[-len(rows) // 5 :][:16]
    options = {"objective": "cache"}  # the sketch that the example makes
    return Subject(model, targets, fitted, start, rest[: -len(rows) // 5], unseen, 1, options)


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt": small_gpt, "smollm2": smollm2}


def with_adapters(
    start: str, rank: int, subject: Subject, model: nn.Module, calibration: list[Tensor]
) -> nn.Module:
    """A model with adapters of a rank, started as said."""
    dense = subject.model
    named: dict[str, object] = {}
    if start in ("pissa", "corda", "eva"):
        named["init_lora_weights"] = start
    if start == "corda":
        named["corda_config"] = CordaConfig(corda_method="ipm")
    if start == "eva":
        # rho=1: every layer keeps the rank that it is given, as those of the other starts do.
        named["eva_config"] = EvaConfig(rho=1.0)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=subject.targets, **named)
    if start == "corda":

        def run() -> None:
            model.eval()
            with torch.no_grad():
                for row in torch.cat(calibration):
                    model(row[None])  # its statistics are of one text at a time

        preprocess_corda(model, config, run_model=run)
    tuned = get_peft_model(model, config)
    if start == "eva":
        initialize_lora_eva_weights(
            tuned,
            [{"input_ids": ids} for ids in calibration],
            forward_fn=lambda one, inputs: one(inputs["input_ids"]),
            prepare_model_inputs_fn=None,
            prepare_layer_inputs_fn=lambda inputs, *_: inputs[0].flatten(0, -2),
            show_progress_bar=False,
        )
    if start.startswith("ours"):
        init_lora_from_dense(tuned, dense, data=calibration if start == "ours, data" else None)
    return tuned


def train(subject: Subject, tuned: nn.Module, rate: float, checked: list[int]) -> Iterator[float]:
    """AdamW on the adapters, dropout off; the loss on unseen text after each number of steps."""
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=rate, weight_decay=0)
    batches = subject.train.split(subject.batch)
    for step in range(checked[-1] + 1):
        if step in checked:
            yield subject.judge(tuned)
        if step < checked[-1]:
            loss = subject.loss(tuned, batches[step % len(batches)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def sketch(subject: Subject, given: argparse.Namespace) -> nn.Module:
    """The model at the ratio; kept in the folder given, if one is."""
    name = f"{given.model}-{given.ratio:g}-{'weights' if given.weights else 'data'}"
    fitted = list(subject.fitted.split(subject.batch))
    options = {"data": fitted, "narrow": False, **subject.options}
    if given.weights:
        options = {"synthetic": False}
    make = partial(pc.sketchify, subject.model, given.ratio, progress=False, **options)
    return kept(given.kept and given.kept / name, subject.model, make)


def table(
    subject: Subject, given: argparse.Namespace, checked: list[int], show: Callable[[str], None]
) -> None:
    """Sketch the model, then a row for each start on it, and on the dense model."""
    calibration = list(subject.start.split(subject.batch))
    begin = time.process_time()
    small = sketch(subject, given)
    took = time.process_time() - begin
    dense, sketched = (subject.judge(model) for model in (subject.model, small))
    show(f"loss: dense {dense:.4f}, sketch {sketched:.4f}, made in {took:.0f} s\n")
    heads = [f"after {count}" for count in checked[1:]]
    show(f"| base | start | before | {' | '.join(heads)} | rate | seconds to start |")
    show(f"|---|---|{'--:|' * (len(heads) + 3)}")
    for base in given.bases:
        for start in STARTS[base]:
            model = small if base == "sketch" else subject.model
            if base == "sketch" and start in ("pissa", "corda"):
                model = pc.densify(small)
            ends = []
            torch.manual_seed(0)
            begin = time.process_time()
            tuned = with_adapters(start, given.rank, subject, copy.deepcopy(model), calibration)
            took = time.process_time() - begin
            for rate in given.rates:
                losses = list(train(subject, copy.deepcopy(tuned), rate, checked))
                ends.append((losses[-1], rate, losses))
            _, rate, losses = min(ends)
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            show(f"| {base} | {start} | {cells} | {rate:g} | {took:.0f} |")


def main() -> None:
    """Measure, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SUBJECTS, default="gpt")
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--weights", action="store_true", help="a sketch of the weights alone, without data")
    parser.add_argument(
        "--bases", nargs="+", choices=STARTS, default=list(STARTS), help="that adapters are on"
    )
    parser.add_argument("--kept", type=Path, help="a folder to keep the sketch in")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table(
        SUBJECTS[given.model](),
        given,
        [0, given.steps // 4, given.steps],
        lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    main()
