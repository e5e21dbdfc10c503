"""What compression costs in accuracy: this library beside its peers, at equal stored numbers.

    python benchmarks/accuracy.py [--models minilm gpt ...] [--methods ...] [--ratios 0.5] [--seeds 3]

Every method replaces the same layers, those that `plan_sketch` would, and may store the same number of
numbers, parameters and buffers alike; that is asserted. Calibration data is drawn from the model's own
domain and from another one, and never from what the model is judged on. Dense models are trained once and
kept below ~/.cache/panther_compile/bench, as are the results, line by line, so that an interrupted run goes
on where it was; `--table-only` writes the report from what is there, `--redo METHOD` measures again.
"""

import argparse
import copy
import hashlib
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy_models import CACHE, SUBJECTS, load_subject
from accuracy_models.subject import Subject
from accuracy_report import Result, Store, draw, report
from peers import PEERS
from peers.budget import count_numbers
from peers.int_weights import quantize_weights
from peers.job import Job, NotDefinedError
from torch import nn

import panther_compile as pc

ROOT = Path(__file__).resolve().parents[1]
RATIOS = (0.75, 0.5, 0.35, 0.25)
TOLERANCE = 0.01
OURS = {
    "ours-free": "**ours, data-free**",
    "ours": "**ours, closed form**",
    "ours-healed": "**ours, healed**",
    "ours-int8": "**ours, closed form**, then int8 (a quarter of the bytes)",
    "ours-healed-int8": "**ours, healed**, then int8 (a quarter of the bytes)",
}
TITLES = OURS | {name: peer.title for name, peer in PEERS.items()}
QUANTIZED = {"ours-int8": "ours", "ours-healed-int8": "ours-healed"}
CALIBRATED = {*OURS, *PEERS} - {"ours-free"} - {n for n, peer in PEERS.items() if not peer.calibrated}


def fingerprint(model: nn.Module) -> str:
    """A fingerprint of the weights, so that results of another training are not taken for its own."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def replaced_layers(subject: Subject, ratios: Sequence[float]) -> tuple[tuple[str, ...], int]:
    """The names of the layers that all methods replace, and their dense count of numbers."""
    plans = [pc.plan_sketch(subject.model, ratio, progress=False, **subject.options) for ratio in ratios]
    names = {tuple(line.name for line in plan.sketched) for plan in plans}
    if len(names) != 1:
        raise SystemExit(f"{subject.title}: which layers are replaced depends on the ratio; nothing compares")
    return names.pop(), plans[0].dense_numbers


def compress(job: Job, subject: Subject, method: str, domain: str, ratio: float) -> nn.Module:
    """One method at one ratio.

    Raises:
        NotDefinedError: it is not defined here.
    """
    if method in PEERS:
        return PEERS[method].compress(job, ratio)
    if method in QUANTIZED:
        small = compress(job, subject, QUANTIZED[method], domain, ratio)
        return quantize_weights(copy.deepcopy(small), job.names)
    if (method, ratio) not in job.memory:
        job.memory[method, ratio] = _sketch(job, subject, method, domain, ratio)
    return job.memory[method, ratio]


def _sketch(job: Job, subject: Subject, method: str, domain: str, ratio: float) -> nn.Module:
    options: dict[str, Any] = {"progress": False, "seed": job.seed}
    if method == "ours-free":
        return pc.sketchify(job.model, ratio, **subject.options, **options)
    if method == "ours":
        return pc.sketchify(job.model, ratio, data=list(job.batches), **subject.options, **options)
    small = compress(job, subject, "ours", domain, ratio)
    data = subject.healing(domain, job.seed)
    return pc.heal(small, teacher=job.model, data=data, steps=subject.heal_steps, **options)


def achieved_ratio(small: nn.Module, job: Job, replaced: int) -> float:
    """Stored over dense numbers of the replaced layers: what the rest of the model stores is the same."""
    return (count_numbers(small) - count_numbers(job.model) + replaced) / replaced


def check_ratio(method: str, ratio: float, achieved: float) -> None:
    """Raise unless the budget was kept, and used."""
    counted = PEERS[method].counted if method in PEERS else method not in QUANTIZED
    if counted and not ratio - TOLERANCE <= achieved <= ratio + 1e-9:
        raise SystemExit(f"{method} stores {achieved:.4f} of the numbers, wanted {ratio}")


def measure(name: str, options: argparse.Namespace, store: Store) -> None:
    """All methods, ratios, domains and seeds of one model that are not stored yet."""
    subject = load_subject(name, quick=options.quick)
    mark = fingerprint(subject.model)
    names, replaced = replaced_layers(subject, options.ratios)
    store.describe(
        name,
        mark,
        {
            "title": subject.title,
            "dense": subject.evaluate(subject.model),
            "metrics": dict(subject.metrics),
            "layers": len(names),
            "replaced": replaced,
            "numbers": count_numbers(subject.model),
            "healing": f"{subject.heal_steps} steps on {subject.healed_on}",
            "in": subject.in_domain,
            "off": subject.off_domain,
            "remark": subject.remark,
        },
        quick=options.quick,
    )
    for seed in range(options.seeds):
        for domain in ("none", *options.domains):
            batches = [] if domain == "none" else subject.calibration(domain, seed)
            job = Job(subject.model, names, batches, subject.blocks, subject.outputs, seed)
            for method in options.methods:
                if (method in CALIBRATED) == (domain == "none"):
                    continue
                for ratio in options.ratios:
                    key = Result(name, mark, options.quick, method, domain, ratio, seed)
                    if key not in store:
                        _measure_one(key, job, subject, replaced, store)


def _measure_one(key: Result, job: Job, subject: Subject, replaced: int, store: Store) -> None:
    where = f"{key.model:7} {key.method:14} {key.domain:4} {key.ratio:<5} seed {key.seed}"
    begin = time.perf_counter()
    try:
        small = compress(job, subject, key.method, key.domain, key.ratio)
    except NotDefinedError as error:
        print(f"{where}  skipped: {error}", flush=True)
        return
    seconds = time.perf_counter() - begin
    achieved = achieved_ratio(small, job, replaced)
    check_ratio(key.method, key.ratio, achieved)
    metrics = subject.evaluate(small.eval())
    store.add(key, metrics, achieved, seconds)
    found = "  ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
    print(f"{where}  stored {achieved:.3f}  {found}  {seconds:.1f} s", flush=True)


def circumstances() -> str:
    """Processor, versions and commit."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpus = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = cpus[0] if cpus else platform.processor() or "unknown"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    return (
        f"{platform.machine()} CPU ({cpu}), float32, PyTorch {torch.__version__}, Python "
        f"{platform.python_version()}, commit {commit or 'unknown'}"
    )


def pick(text: str) -> list[str]:
    """Names between commas or blanks."""
    return text.replace(",", " ").split()


def parse(
    arguments: Sequence[str] | None = None,
    *,
    description: str | None = __doc__,
    models: Sequence[str] = tuple(SUBJECTS),
    ratios: Sequence[float] = RATIOS,
) -> argparse.Namespace:
    """The command line; lists may be given with blanks or commas."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[",".join(models)], help=", ".join(models))
    parser.add_argument("--methods", nargs="+", default=[",".join(TITLES)], help=", ".join(TITLES))
    parser.add_argument("--ratios", nargs="+", default=[",".join(map(str, ratios))])
    parser.add_argument("--domains", nargs="+", default=["in,off"], help="of the calibration: in, off")
    parser.add_argument("--seeds", type=int, default=1, help="draws of calibration data and of random signs")
    parser.add_argument("--quick", action="store_true", help="a quarter of the data; nothing is written")
    parser.add_argument("--redo", nargs="+", default=[], help="methods to measure again")
    parser.add_argument("--table-only", action="store_true", help="write the report from the stored results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args(arguments)
    for key, known in (
        ("models", models),
        ("methods", TITLES),
        ("domains", ("in", "off")),
        ("redo", TITLES),
    ):
        setattr(options, key, pick(" ".join(getattr(options, key))))
        unknown = set(getattr(options, key)) - set(known)
        if unknown:
            parser.error(f"--{key}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    options.ratios = [float(ratio) for ratio in pick(" ".join(options.ratios))]
    return options


def lines_of(store: Store, quick: bool) -> Iterator[str]:
    """The report."""
    known = [name for name in SUBJECTS if (name, quick) in store.descriptions]
    yield from report(store, known, TITLES, circumstances(), quick=quick)


def main() -> None:
    """Measure what is missing, print the report and write it."""
    options = parse()
    store = Store(CACHE / "accuracy.jsonl")
    store.forget(options.redo, options.models, quick=options.quick)
    if not options.table_only:
        for name in options.models:
            measure(name, options, store)
    text = "\n".join(lines_of(store, options.quick)) + "\n"
    print(text)
    if not options.quick:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "accuracy.md").write_text(text, encoding="utf-8")
        draw(store, list(SUBJECTS), TITLES, options.output / "accuracy.png")


if __name__ == "__main__":
    main()
