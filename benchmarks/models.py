"""Whole models, dense and sketched: latency, and if asked for compile times, compiled latency and memory.

    python benchmarks/models.py [--quick] [--models bert-base vit ...] [--compile] [--memory]
                                [--results build/models.json] [--output docs/benchmarks/models.md]

BERT-base at batch 8 and sequence 128, random weights, and the models of the test zoo, which are so small that
a sketch has little to gain: they show where it loses. Rows that lose are printed like the others, and so are
models that cannot be measured, with the reason. "For latency" is the model that `objective="latency"` makes,
which keeps dense what does not pay, run eagerly; where nothing pays it is the dense model. Compiled, the
sketched model is also handed to Inductor without our backend: what the backend itself costs. The dense model
has two turns in each round: how far their times are apart is the noise of the row. Each model has a process
of its own, and memory is the peak of another one that loads the model and runs it eagerly. A model that is in
the file of results is not measured again, so that a run that was cut short goes on.
"""

import argparse
import functools
import json
import pickle
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from process_memory import process_memory
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError

ROOT = Path(__file__).resolve().parents[1]
# Run as a script, this folder would come first, and transformers looks for a package called kernels.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"]
sys.path.insert(0, str(ROOT / "tests"))
from zoo import ZOO, call  # noqa: E402

RATIO = 0.5
QUICK = ("bert-2-layers", "vit", "mixer")
BERT = {"bert-base": 12, "bert-2-layers": 2}
MARGIN = 1.03  # what is slower by more than this, and by more than the noise of its row, has lost
MOST_TURNS = 500
COMPILES = 2  # times that each model is compiled; the faster one counts
CALM, PATIENCE = 1.01, 4.0  # the noise at which a row is done, and how much longer it may take else
HEADS = ("model", "dense ms", "sketched ms", "speed-up", "noise")
HEADS += (
    "weights sketched for latency",
    "for latency ms",
    "speed-up for latency",
    "file, sketched / dense MiB",
)
COMPILED = ("model", "dense ms", "sketched ms", "speed-up", "sketched by Inductor ms")
COMPILED += ("dense compile s", "sketched compile s", "over dense", "over Inductor")
MEMORY = ("model", "dense peak MiB", "sketched peak MiB")
PEAKS = ("dense_peak", "sketched_peak")
MOST_COMPILE = 1.3  # times as long as Inductor


def load(name: str) -> tuple[nn.Module, Any]:
    """A model in eval mode, and its inputs."""
    if name not in BERT:
        return ZOO[name].build(), ZOO[name].inputs()
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=BERT[name])
    ids = torch.randint(1, config.vocab_size, (8, 128))
    return BertModel(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def sketch(model: nn.Module) -> nn.Module:
    """As a user would, but for the zoo's layers, all of them below the usual `min_params`."""
    return pc.sketchify(model, RATIO, min_params=512, progress=False)


def sketch_for_latency(model: nn.Module, inputs: Any) -> tuple[nn.Module, int]:
    """What `objective="latency"` makes, and how many weights it sketches: the model itself and 0 if none."""
    options: Any = {"objective": "latency", "example_inputs": inputs, "min_params": 512, "progress": False}
    try:
        fast = pc.sketchify(model, RATIO, **options)
    except NoTargetError:
        return model, 0
    return fast, len(pc.sketch_report(fast).sketched)


def best_seconds(runs: Mapping[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """The fastest of many turns of each, one after the other.

    Goes on for up to `PATIENCE` times the budget while two times of the dense model are far apart.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    begin, turns, patience = time.perf_counter(), 0, 1.0
    while turns < 4 or (time.perf_counter() - begin < patience * budget and turns < patience * MOST_TURNS):
        for name, run in runs.items():
            run()  # the caches hold this model then, whichever had its turn before
            start = clock()
            run()
            taken = clock() - start
            if taken > 0:  # the clock of a thread stands still now and then on a virtual machine
                best[name] = min(best[name], taken)
        turns += 1
        patience = 1.0 if noise(best) <= CALM else PATIENCE
    return best


def compile_seconds(model: nn.Module, inputs: Any, backend: str) -> tuple[float, nn.Module]:
    """Processor time of the first call and of the compilers it starts, and the compiled model."""
    compiled = torch.compile(model, backend=backend)
    begin = _processor_seconds()
    call(compiled, inputs)
    return _processor_seconds() - begin, compiled


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def file_bytes(model: nn.Module) -> int:
    """Bytes of the saved state."""
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file.name)
        return Path(file.name).stat().st_size


@torch.inference_mode()
def measure(name: str, seconds: float, with_compiled: bool) -> dict[str, Any]:
    """All but the memory; in a process of its own."""
    model, inputs = load(name)
    try:
        small = sketch(model)
    except pc.PantherError as error:
        return {"error": str(error).splitlines()[0]}
    fast, layers = sketch_for_latency(model, inputs)
    found = {
        "for_latency_layers": layers,
        "dense_bytes": file_bytes(model),
        "sketched_bytes": file_bytes(small),
    }
    models = {"dense": model, "sketched": small, "for_latency": fast, "dense_again": model}
    if with_compiled:
        # What is started and imported once is not part of anybody's compile time.
        tiny = pc.sketchify(nn.Linear(8, 8), RATIO, include="*", min_params=0, allow_slower=True)
        for backend in ("inductor", "panther"):
            compile_seconds(tiny, (torch.ones(1, 8),), backend)
        pairs = {
            "dense": (model, "inductor"),
            "sketched": (small, "panther"),
            "by_inductor": (small, "inductor"),
        }
        for _ in range(COMPILES):
            torch._dynamo.reset()
            for kind, (each, backend) in pairs.items():
                taken, models[f"{kind}_compiled"] = compile_seconds(each, inputs, backend)
                found[f"{kind}_compile"] = min(taken, found.get(f"{kind}_compile", taken))
    runs = {kind: functools.partial(call, each, inputs) for kind, each in models.items()}
    return best_seconds(runs, seconds) | found


def worker(arguments: list[str]) -> dict[str, Any]:
    """The result of this script, run with other arguments in a process of its own; or its "error"."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@torch.inference_mode()
def run_saved(path: Path) -> dict[str, float]:
    """Load a pickled model, run it, and tell the peak memory beyond that of the imports, in bytes."""
    torch.load(path.with_suffix(".inputs"), weights_only=False)
    before = process_memory("VmRSS")
    model = torch.load(path, weights_only=False, mmap=False)
    inputs = torch.load(path.with_suffix(".inputs"), weights_only=False)
    call(model, inputs)
    return {"peak": process_memory("VmHWM") - before}


def memory(name: str, folder: Path) -> dict[str, Any]:
    """Peak memory of the dense and of the sketched model, eager; or why it is not known."""
    model, inputs = load(name)
    found: dict[str, Any] = {}
    for kind, each in (("dense", model), ("sketched", sketch(model))):
        path = folder / f"{kind}.pt"
        try:
            torch.save(each, path)
        except (RuntimeError, AttributeError, pickle.PicklingError) as error:  # parametrized, hooked, ...
            return {"memory_error": str(error).partition(". ")[0], **dict.fromkeys(PEAKS)}
        torch.save(inputs, path.with_suffix(".inputs"))
        run = worker(["--run", str(path)])
        if "error" in run:
            return {"memory_error": run["error"], **dict.fromkeys(PEAKS)}
        found[f"{kind}_peak"] = run["peak"]
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in found:
        return f"| {name} | {found['error'].split(': wanted')[0]} |" + " |" * (len(HEADS) - 2)
    dense, sketched, fast = (found[key] * 1e3 for key in ("dense", "sketched", "for_latency"))
    sizes = " / ".join(f"{found[key] / 2**20:.2f}" for key in ("sketched_bytes", "dense_bytes"))
    cells = [f"{dense:.2f}", f"{sketched:.2f}", _speed(dense / sketched), f"{noise(found) - 1:.1%}"]
    if found["for_latency_layers"]:
        cells += [f"{found['for_latency_layers']}", f"{fast:.2f}", _speed(dense / fast)]
    else:
        cells += ["none", "", "1, is dense"]
    return f"| {name} | " + " | ".join([*cells, sizes]) + " |"


def compiled_row(name: str, found: dict[str, Any]) -> str:
    """A line of the table of compiled models."""
    dense, sketched, other = (
        found[f"{kind}_compiled"] * 1e3 for kind in ("dense", "sketched", "by_inductor")
    )
    seconds = found["dense_compile"], found["sketched_compile"]
    cells = [f"{dense:.2f}", f"{sketched:.2f}", _speed(dense / sketched), f"{other:.2f}"]
    cells += [f"{value:.1f}" for value in seconds]
    cells += [_cost(seconds[1] / found[f"{kind}_compile"]) for kind in ("dense", "by_inductor")]
    return f"| {name} | " + " | ".join(cells) + " |"


def memory_row(name: str, found: dict[str, Any]) -> str:
    """A line of the table of peak memory."""
    if "memory_error" in found:
        return f"| {name} | {found['memory_error']} | |"
    cells = [f"{found[key] / 2**20:.1f}" for key in PEAKS]
    return f"| {name} | " + " | ".join(cells) + " |"


def noise(found: dict[str, Any]) -> float:
    """The slower of the two times of the dense model over the faster one."""
    times = sorted(found[key] for key in ("dense", "dense_again"))
    ratio: float = times[1] / times[0]
    return ratio


def _speed(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.995 else f"**{ratio:.2f}** slower"


def _cost(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio <= MOST_COMPILE else f"**{ratio:.2f}**"


class Results:
    """What was measured, by model, kept in a file if one is named.

    Args:
        path: of the file, JSON.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, Any] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    def find(self, name: str, keys: tuple[str, ...]) -> dict[str, Any] | None:
        """What is known of a model, if it has all of the keys or could not be measured."""
        found: dict[str, Any] | None = self._rows.get(name)
        return (
            found if found is not None and ("error" in found or all(key in found for key in keys)) else None
        )

    def keep(self, name: str, found: dict[str, Any]) -> None:
        """Remember a model, and write all to the file."""
        self._rows[name] = found
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._rows, indent=1), encoding="utf-8")


def report(names: list[str], options: argparse.Namespace, seconds: float) -> Iterator[str]:
    """The lines of the report."""
    threads = torch.get_num_threads()
    clock = "processor time of one core" if threads == 1 else f"wall time, {threads} threads"
    yield "# Speed of whole models"
    yield ""
    yield (
        f"{platform.machine()} CPU ({_cpu()}), {clock}, float32, PyTorch {torch.__version__}, ratio {RATIO}, "
        "inference, eager. The fastest of many turns taken side by side. Bert-base has batch 8 and sequence "
        "128, the others are the small models of `tests/zoo/`, sketched from 512 numbers a weight. For "
        "latency: made with `objective='latency'` on the same inputs. Noise: how far two times of the dense "
        "model in the same turns are apart. Made by `benchmarks/models.py`."
    )
    yield ""
    yield from _heading(HEADS)
    results = Results(options.results)
    keys = ("dense_again", *(("by_inductor_compile",) * options.compile), *(PEAKS if options.memory else ()))
    rows = {}
    for name in names:
        found = results.find(name, keys)
        if found is None:
            wanted = ["--measure", "--models", name, "--seconds", str(seconds), "--threads", str(threads)]
            found = worker([*wanted, *(["--compile"] if options.compile else [])])
            if "error" not in found and options.memory:
                with tempfile.TemporaryDirectory() as folder:
                    found |= memory(name, Path(folder))
            results.keep(name, found)
        yield row(name, found)
        if "error" not in found:
            rows[name] = found
    yield ""
    yield summary(list(rows.values()), len(names))
    if options.compile:
        yield from compiled_section(rows)
    if options.memory:
        yield from memory_section(rows)


def compiled_section(rows: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of the report on compiled models."""
    yield ""
    yield "## Compiled"
    yield ""
    yield (
        "Dense by Inductor, sketched by `panther`, which hands it to Inductor; beside it the sketched model "
        "by Inductor alone. Compile times, and how much longer `panther` takes than Inductor for the dense "
        f"and for the same model, are processor time, the less of {COMPILES}, caches off."
    )
    yield ""
    yield from _heading(COMPILED)
    for name, found in rows.items():
        yield compiled_row(name, found)
    yield ""
    yield compiled_summary(list(rows.values()))


def memory_section(rows: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of the report on peak memory."""
    yield ""
    yield "## Memory"
    yield ""
    yield "What a process needs at most beyond its imports to load the model and to run it eagerly."
    yield ""
    yield from _heading(MEMORY)
    for name, found in rows.items():
        yield memory_row(name, found)


def _heading(heads: tuple[str, ...]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)


def summary(rows: list[dict[str, Any]], total: int) -> str:
    """How many rows gain and lose, in a sentence."""
    fast = [found for found in rows if found["for_latency_layers"]]
    lost = sum(_has_lost(found, "for_latency") for found in fast)
    return (
        f"Of {total} models {len(rows)} were measured. Sketched for size, "
        f"{sum(_has_lost(found, 'sketched') for found in rows)} are more than {MARGIN - 1:.0%}, and more "
        f"than their noise, slower than dense. For latency {len(fast)} are sketched; {lost} are "
        "slower by that measure; in the others nothing pays, and they stay dense."
    )


def compiled_summary(rows: list[dict[str, Any]]) -> str:
    """The same of compiled models, and of what it takes to compile them."""
    slower = sum(found["sketched_compiled"] > MARGIN * found["dense_compiled"] for found in rows)
    text = f"Of {len(rows)}, {slower} are more than {MARGIN - 1:.0%} slower than the dense model compiled."
    for kind, which in (("dense", "the dense model"), ("by_inductor", "the same model")):
        ratios = sorted(found["sketched_compile"] / found[f"{kind}_compile"] for found in rows)
        text += (
            f" {sum(ratio > MOST_COMPILE for ratio in ratios)} take over {MOST_COMPILE} times as long to "
            f"compile as {which} by Inductor, the median is {ratios[len(ratios) // 2]:.2f}."
        )
    return text


def _has_lost(found: dict[str, Any], key: str) -> bool:
    times = [found["dense"], found["dense_again"]]
    return bool(found[key] > MARGIN * min(times) and found[key] > max(times))


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def main() -> None:
    """Parse the command line, measure, print, and write the file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three models, fewer turns")
    parser.add_argument("--models", nargs="+", choices=[*BERT, *ZOO], help="the default is all of them")
    parser.add_argument(
        "--compile", action="store_true", help="also compile; a minute or more for each model"
    )
    parser.add_argument("--memory", action="store_true", help="also measure peak memory")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, help="of timing for each model")
    parser.add_argument("--results", type=Path, help="a file of results, to go on from and to add to")
    parser.add_argument("--output", type=Path, help="also write the report here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # the compilers are children then, whose time is known
    seconds = options.seconds or (2.0 if options.quick else 4.0)
    if options.measure:
        print(json.dumps(measure(options.models[0], seconds, options.compile)))
        return
    if options.run:
        print(json.dumps(run_saved(options.run)))
        return
    names = options.models or (list(QUICK) if options.quick else ["bert-base", *ZOO])
    lines = []
    for line in report(names, options, seconds):
        print(line, flush=True)
        lines.append(line)
        if options.output is not None:  # as far as it got
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
