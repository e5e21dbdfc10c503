"""Quality against bytes and time: dense and sketched, in float32, int8 and int4, of a decoder and of a CNN.

    python benchmarks/quantized.py smollm2 --cache out/quantized      SmolLM2-135M; 20 minutes a sketch, 10 GB
    python benchmarks/quantized.py crepe-tiny --cache out/quantized   a CNN on sounds; minutes

Models are fitted to the data of accuracy.py with all defaults, and judged as there. int8 and int4 of a
decoder are of its weights alone, with a scale for each block of 64 (ONNX Runtime's MatMulNBits) or each row
(torchao); those of the CNN are `quantize_dynamic`, convolutions too. All run in turns; the fastest turn of
each counts, in processor seconds; with several threads in wall time, as threads that wait take processor time
too, so run those on a quiet machine. MiniLM, whose activations are rounded too, is in frontier.py.
"""

import argparse
import copy
import io
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Here a file is called onnx.py: this folder has to come last.
HERE = Path(__file__).parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE.resolve()]

import torch  # noqa: E402
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

import panther_compile as pc  # noqa: E402

sys.path.append(str(HERE))
from accuracy_models.crepe import FRAME, crepe_tiny  # noqa: E402
from accuracy_models.smollm2 import smollm2  # noqa: E402
from accuracy_models.subject import Subject, kept_sketch  # noqa: E402
from onnx_files import session, write_int8  # noqa: E402

BLOCK = 64


@dataclass(frozen=True)
class Case:
    """A model of the benchmark, and how it is written and run.

    Attributes:
        subject: makes it, as in accuracy.py.
        ratios: of its sketches.
        inputs: the name of its input, and an example by the name of a column.
        free: dimensions of the input that a file leaves open.
        quantized: by a name, what writes a quantized file of a float32 one.
        in_torch: torchao's int8 weights too; it has none for convolutions.
        answers: what makes of a file what `subject` judges.
    """

    subject: Callable[[Path, bool], Subject]
    ratios: tuple[float, ...]
    inputs: tuple[str, dict[str, Tensor]]
    free: dict[int, Any]
    quantized: dict[str, Callable[[Path, Path], None]]
    in_torch: bool
    answers: Callable[[nn.Module], nn.Module]


def weights_in(bits: int) -> Callable[[Path, Path], None]:
    """What writes a file's constant products with weights of so many bits; products are of int8."""

    def write(source: Path, path: Path) -> None:
        quantizer = MatMulNBitsQuantizer(
            str(source), bits=bits, block_size=BLOCK, is_symmetric=True, accuracy_level=4
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))

    return write


def tokens(count: int) -> Tensor:
    """(1, count), drawn."""
    return torch.randint(5, 40_000, (1, count), generator=torch.Generator().manual_seed(0))


def sounds(count: int) -> Tensor:
    """(count, 1024), drawn."""
    return torch.randn(count, FRAME, generator=torch.Generator().manual_seed(0))


class InFile(nn.Module):
    """A file run by ONNX Runtime as the model that it was written from.

    Args:
        path: of the file, with one input.
        threads: of a product.
    """

    def __init__(self, path: Path, threads: int) -> None:
        super().__init__()
        self._session = session(path, threads)
        self._name = self._session.get_inputs()[0].name  # exporters write it in small letters

    def forward(self, inputs: Tensor) -> Tensor:
        """The first output."""
        return torch.from_numpy(self._session.run(None, {self._name: inputs.numpy()})[0])


class WithLoss(nn.Module):
    """A decoder's logits as transformers give them, with the loss of labels.

    Args:
        model: input_ids to logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """With `loss` (), nats a token."""
        logits = self._model(input_ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


CASES = {
    "smollm2": Case(
        smollm2,
        (0.8,),
        ("input_ids", {"1 token": tokens(1), "128 tokens": tokens(128)}),
        {1: torch.export.Dim("tokens", max=2048)},
        {"int8": weights_in(8), "int4": weights_in(4)},
        in_torch=True,
        answers=WithLoss,
    ),
    "crepe-tiny": Case(
        crepe_tiny,
        (0.75, 0.5),
        ("frames_BT", {"1 frame": sounds(1), "32 frames": sounds(32)}),
        {0: torch.export.Dim("frames", max=512)},
        {"int8": write_int8},
        in_torch=False,
        answers=lambda model: model,
    ),
}


def main() -> None:
    """Sketch, write, judge, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("--cache", type=Path, required=True, help="folder of sketches and files, made once")
    parser.add_argument("--ratios", type=float, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)  # the quantizer's import sets it to tell of each node
    case, folder = CASES[options.model], options.cache / options.model
    folder.mkdir(parents=True, exist_ok=True)
    subject = case.subject(folder, False)
    files: dict[str, Path] = {}
    in_torch: dict[str, nn.Module] = {}
    for ratio in (None, *(options.ratios or case.ratios)):
        name = "dense" if ratio is None else f"{ratio:g}"
        model = subject.model if ratio is None else kept_sketch(subject, ratio, folder / name)
        ready = even(model, subject)
        if case.in_torch:
            in_torch |= {f"{name}, torch": model, f"{name}, torch, int8": int8_in_torch(ready)}
        files |= write(model, ready, name, case, folder)
    print("\n".join(table(files, in_torch, case, subject, options.threads, options.rounds)))


def even(model: nn.Module, subject: Subject) -> nn.Module:
    """The model, its factors of linear layers such that rounding costs them little."""
    if not any(isinstance(one, pc.SketchedLinear) for one in model.modules()):
        return model
    return pc.prepare_int8(model, subject.calibration("in", 0)[:2])


def int8_in_torch(model: nn.Module) -> nn.Module:
    """A copy with torchao's int8 weights."""
    result = copy.deepcopy(model)
    quantize_(
        result,
        Int8WeightOnlyConfig(),
        filter_fn=lambda one, _: isinstance(one, nn.Linear) and type(one.weight) is nn.Parameter,
    )
    return result


def write(model: nn.Module, ready: nn.Module, name: str, case: Case, folder: Path) -> dict[str, Path]:
    """The files of a model by row, the quantized ones made of `ready`; what is there is taken."""
    files = {name: folder / f"{name}.onnx"} | {
        f"{name}, {form}": folder / f"{name}-{form}.onnx" for form in case.quantized
    }
    example = {case.inputs[0]: list(case.inputs[1].values())[-1]}
    free = {case.inputs[0]: case.free}
    if not files[name].exists():
        pc.export_onnx(model, (), files[name], kwargs=example, dynamic_shapes=free)
    missing = {form: files[f"{name}, {form}"] for form in case.quantized}
    missing = {form: path for form, path in missing.items() if not path.exists()}
    source = files[name]
    if missing and ready is not model:
        source = folder / f"{name}-even.onnx"
        pc.export_onnx(ready, (), source, kwargs=example, dynamic_shapes=free)
    for form, path in missing.items():
        case.quantized[form](source, path)
    return files


def table(
    files: dict[str, Path],
    in_torch: dict[str, nn.Module],
    case: Case,
    subject: Subject,
    threads: list[int],
    rounds: int,
) -> Iterator[str]:
    """Markdown, line by line; times are of a call, ms."""
    examples = case.inputs[1]
    columns = [(count, example) for count in threads for example in examples]
    heads = [*subject.metrics, "MB", *(f"{example}, {count} threads" for count, example in columns)]
    yield f"{subject.title}; ms, of wall time on several threads; ONNX Runtime {version('onnxruntime')}, "
    yield f"torch {torch.__version__}, torchao {version('torchao')}, {platform.machine()}."
    yield ""
    yield "| | " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * len(heads)
    sizes = {
        row: sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))
        for row, path in files.items()
    }
    sizes |= {row: saved_bytes(model) for row, model in in_torch.items()}
    taken: dict[tuple[str, int, str], float] = {}
    for count in threads:
        torch.set_num_threads(count)
        runs = {row: InFile(path, count) for row, path in files.items()} | in_torch
        for _ in range(rounds):
            for example, inputs in examples.items():
                for row, run in runs.items():
                    key, seconds = (row, count, example), time_of(run, inputs, count)
                    taken[key] = min(seconds, taken.get(key, seconds))
    for row in sizes:
        model = in_torch[row] if row in in_torch else case.answers(InFile(files[row], max(threads)))
        quality = subject.evaluate(model)
        cells = [f"{quality[one]:.3f}" for one in subject.metrics]
        cells += [f"{sizes[row] / 1e6:.1f}"]
        cells += [f"{1e3 * taken[row, count, example]:.1f}" for count, example in columns]
        yield f"| {row} | " + " | ".join(cells) + " |"


def saved_bytes(model: nn.Module) -> int:
    """Of a file of its state dict."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


@torch.inference_mode()
def time_of(run: nn.Module, inputs: Tensor, threads: int) -> float:
    """Seconds of a call: the processor's on one thread, else those that pass."""
    clock = time.process_time if threads == 1 else time.perf_counter
    start = clock()
    run(inputs)
    return clock() - start


if __name__ == "__main__":
    main()
