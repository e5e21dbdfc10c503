"""Whole models, dense and sketched, eager and compiled: latency, compile seconds, memory, file size.

    python benchmarks/models.py [--quick] [--models bert-base vit ...] [--output docs/benchmarks/models.md]

BERT-base at batch 8 and sequence 128, random weights, and the models of the test zoo, which are so small that
a sketch has little to gain: they show what compiling costs, and where it loses. Rows that lose are printed
like the others, and so are models that cannot be measured, with the reason. "For latency" is the model that
`objective="latency"` makes, which keeps dense what does not pay, run eagerly; where nothing pays it is the
dense model. Each model has a process of its own, and memory is the peak of another one that loads the model
and runs it eagerly.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from zoo import ZOO, call  # noqa: E402

RATIO = 0.5
QUICK = ("bert-2-layers", "vit", "mixer")
BERT = {"bert-base": 12, "bert-2-layers": 2}
NOISE = 1.02  # of two times of one model
HEADS = ("model", "dense ms", "sketched ms", "dense compiled ms", "sketched compiled ms")
HEADS += ("speed-up", "speed-up compiled", "weights sketched for latency", "ms", "speed-up for latency")
HEADS += ("dense compile s", "sketched compile s", "ratio")
HEADS += ("dense peak MiB", "sketched peak MiB", "dense file MiB", "sketched file MiB")


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


def best_seconds(runs: list[Callable[[], Any]], budget: float) -> list[float]:
    """The fastest of many turns of each, one after the other."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(runs)
    deadline, turns = time.perf_counter() + budget, 0
    while turns < 4 or (time.perf_counter() < deadline and turns < 300):
        for place, run in enumerate(runs):
            begin = clock()
            run()
            best[place] = min(best[place], clock() - begin)
        turns += 1
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
    """Of the saved state."""
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file.name)
        return Path(file.name).stat().st_size


@torch.inference_mode()
def measure(name: str, seconds: float) -> dict[str, float]:
    """All but the memory; in a process of its own."""
    # A compiler started once before is not part of anybody's compile time.
    compile_seconds(nn.Linear(4, 4), (torch.ones(1, 4),), "inductor")
    model, inputs = load(name)
    try:
        small = sketch(model)
    except pc.PantherError as error:
        return {"error": str(error).splitlines()[0]}  # type: ignore[dict-item]
    dense_compile, dense_compiled = compile_seconds(model, inputs, "inductor")
    small_compile, small_compiled = compile_seconds(small, inputs, "panther")
    fast, layers = sketch_for_latency(model, inputs)
    models = (model, small, dense_compiled, small_compiled, fast)
    times = best_seconds([lambda each=each: call(each, inputs) for each in models], seconds)
    keys = ("dense", "sketched", "dense_compiled", "sketched_compiled", "for_latency")
    return dict(zip(keys, times, strict=True)) | {
        "for_latency_layers": layers,
        "dense_compile": dense_compile,
        "sketched_compile": small_compile,
        "dense_bytes": file_bytes(model),
        "sketched_bytes": file_bytes(small),
    }


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
    before = _memory("VmRSS")
    model = torch.load(path, weights_only=False, mmap=False)
    inputs = torch.load(path.with_suffix(".inputs"), weights_only=False)
    call(model, inputs)
    return {"peak": _memory("VmHWM") - before}


def _memory(which: str) -> float:
    """Bytes resident now, or at the peak; getrusage would start from the peak of the parent process."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [float(line.split()[1]) * 1024 for line in lines if line.startswith(which)]
    return found[0] if found else float("nan")


def memory(name: str, folder: Path) -> dict[str, float]:
    """Peak memory of the dense and of the sketched model, eager."""
    model, inputs = load(name)
    found = {}
    for kind, each in (("dense", model), ("sketched", sketch(model))):
        path = folder / f"{kind}.pt"
        torch.save(each, path)
        torch.save(inputs, path.with_suffix(".inputs"))
        run = worker(["--run", str(path)])
        if "error" in run:
            return run
        found[f"{kind}_peak"] = run["peak"]
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in found:
        return f"| {name} | {found['error'].split(': wanted')[0]} |" + " |" * (len(HEADS) - 2)
    ms = [found[key] * 1e3 for key in ("dense", "sketched", "dense_compiled", "sketched_compiled")]
    seconds = found["dense_compile"], found["sketched_compile"]
    cells = [f"{value:.2f}" for value in ms]
    cells += [_speed(ms[0] / ms[1]), _speed(ms[2] / ms[3])]
    if found["for_latency_layers"]:
        fast = found["for_latency"] * 1e3
        cells += [f"{found['for_latency_layers']}", f"{fast:.2f}", _speed(ms[0] / fast)]
    else:
        cells += ["none", cells[0], "1, is dense"]
    cells += [*(f"{value:.1f}" for value in seconds), _cost(seconds[1] / seconds[0])]
    cells += [f"{found[key] / 2**20:.1f}" for key in ("dense_peak", "sketched_peak")]
    cells += [f"{found[key] / 2**20:.2f}" for key in ("dense_bytes", "sketched_bytes")]
    return f"| {name} | " + " | ".join(cells) + " |"


def _speed(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}** slower"


def _cost(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio <= 1.3 else f"**{ratio:.2f}**"


def report(names: list[str], seconds: float) -> Iterator[str]:
    """The lines of the report."""
    threads = torch.get_num_threads()
    clock = "processor time of one core" if threads == 1 else f"wall time, {threads} threads"
    yield "# Speed of whole models"
    yield ""
    yield (
        f"{platform.machine()} CPU ({_cpu()}), {clock}; processor time for compiling, float32, PyTorch "
        f"{torch.__version__}, ratio {RATIO}, inference. The fastest of many turns taken side by side. "
        "Bert-base has batch 8 and sequence 128, the others are the small models of `tests/zoo.py`, sketched "
        "from 512 numbers a weight. Compiled: dense by Inductor, sketched by `panther`, which hands it to "
        "Inductor; caches off. For latency: run eagerly, made with `objective='latency'` on the same inputs. "
        "Peak memory is what a process needs beyond its imports to load the model and run it eagerly. Made "
        "by `benchmarks/models.py`."
    )
    yield ""
    yield "| " + " | ".join(HEADS) + " |"
    yield "|" + "---|" * len(HEADS)
    rows = []
    for name in names:
        found = worker(["--measure", "--models", name, "--seconds", str(seconds), "--threads", str(threads)])
        if "error" not in found:
            with tempfile.TemporaryDirectory() as folder:
                found |= memory(name, Path(folder))
        rows.append(found)
        yield row(name, found)
    yield ""
    yield summary([found for found in rows if "error" not in found], len(rows))


def summary(rows: list[dict[str, Any]], total: int) -> str:
    """How many rows gain and lose, in a sentence."""
    slower = sum(found["sketched"] > found["dense"] for found in rows)
    slower_compiled = sum(found["sketched_compiled"] > found["dense_compiled"] for found in rows)
    fast = [found for found in rows if found["for_latency_layers"]]
    lost = sum(found["for_latency"] > NOISE * found["dense"] for found in fast)
    ratios = sorted(found["sketched_compile"] / found["dense_compile"] for found in rows)
    middle = f"{ratios[len(ratios) // 2]:.2f}" if ratios else "nan"
    return (
        f"Of {total} models {len(rows)} were measured: {slower} are slower sketched in eager mode, "
        f"{slower_compiled} compiled; of {len(fast)} that are sketched for latency {lost} are more than "
        f"{NOISE - 1:.0%} slower, the others stay dense; {sum(ratio > 1.3 for ratio in ratios)} take over "
        f"1.3 times as long to compile, the median ratio is {middle}."
    )


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
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, help="of timing for each model")
    parser.add_argument("--output", type=Path, help="also write the report here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # the compilers are children then, whose time is known
    seconds = options.seconds or (2.0 if options.quick else 10.0)
    if options.measure:
        print(json.dumps(measure(options.models[0], seconds)))
        return
    if options.run:
        print(json.dumps(run_saved(options.run)))
        return
    names = options.models or (list(QUICK) if options.quick else ["bert-base", *ZOO])
    lines = []
    for line in report(names, seconds):
        print(line, flush=True)
        lines.append(line)
        if options.output is not None:  # as far as it got: the whole takes long
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
