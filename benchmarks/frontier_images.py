"""Quality against time and bytes of convolutional networks in ONNX Runtime: dense, int8, sketched, both.

    python benchmarks/frontier_images.py [--models efficientnet crepe-tiny ocr-rec ocr-det] [--ratios 0.75]

All are fitted to the calibration data of the gauntlet, and judged by what it holds out. "quantize_static
alone" is what ONNX Runtime makes of the file without this library: ranges of four batches, unsigned
activations, which x86 is fastest at, a scale for each output. Files take turns; the fastest turn of each
counts, in processor seconds of one thread.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Here a file is called onnx.py: this folder has to come last.
HERE = Path(__file__).parent.resolve()
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != HERE), str(HERE)]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import torch  # noqa: E402
from accuracy_models import load_subject  # noqa: E402
from accuracy_models.efficientnet import folder_of  # noqa: E402
from accuracy_models.subject import kept_sketch  # noqa: E402
from ocr import BATCH, CALIBRATION, READERS, answers  # noqa: E402
from onnx.version_converter import convert_version  # noqa: E402
from onnx_files import processor_seconds, session, write_static  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import panther_compile as pc  # noqa: E402

TORCH_MODELS = ("efficientnet", "crepe-tiny")
ALONE = "dense, quantize_static alone"
SIZES = (1, 8)
SHOWN = 4  # batches to quantize_static, which keeps them all in memory


class OnnxModule(nn.Module):
    """A file as a module of one input and one output.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._run = session(path, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return torch.from_numpy(self._run.run(None, {self._run.get_inputs()[0].name: x.numpy()})[0])


@dataclass(frozen=True)
class Network:
    """Files of one network, and how they are judged.

    Attributes:
        title: for the report.
        files: by the name of the row.
        judge: of a file.
        pictures: inputs to take the time with.
    """

    title: str
    files: dict[str, Path]
    judge: Callable[[Path], dict[str, float]]
    pictures: np.ndarray


def of_torch(name: str, ratios: Sequence[float], cache: Path) -> Network:
    """A subject of the gauntlet, exported."""
    subject = load_subject(name)
    data = subject.calibration("in", 0)
    free = ({0: torch.export.Dim("batch", max=512)},)
    files: dict[str, Path] = {}
    for row, ratio in (("dense", None), *((str(ratio), ratio) for ratio in ratios)):
        model = subject.model
        if ratio is not None:
            model = kept_sketch(subject, ratio, cache / row, **subject.options)
        files[row], files[f"{row}, int8"] = cache / f"{row}.onnx", cache / f"{row}.int8.onnx"
        pc.export_onnx(model, data[0], files[row], dynamic_shapes=free)
        pc.export_onnx(model, data[0], files[f"{row}, int8"], dynamic_shapes=free, then="int8", data=data)
        if ratio is None:
            files[ALONE] = cache / "alone.onnx"
            write_static(files[row], files[ALONE], [batch.numpy() for batch in data[:SHOWN]])
    pictures = torch.cat(list(data))[: max(SIZES)].numpy()
    return Network(subject.title, files, lambda path: subject.evaluate(OnnxModule(path)), pictures)


def of_file(name: str, ratios: Sequence[float], cache: Path) -> Network:
    """A reader of PP-OCR, sketched as a file."""
    reader = READERS[name]
    source = folder_of("rapidocr_onnxruntime") / "models" / reader.file
    pictures = reader.pictures(CALIBRATION, 100, held_out=False)
    data = np.split(pictures, range(BATCH, len(pictures), BATCH))
    files = {"dense": source}
    for row, ratio in (("dense", 1.0), *((str(ratio), ratio) for ratio in ratios)):
        for rounding in ("int8",) if ratio == 1.0 else ("none", "int8"):
            label = row if rounding == "none" else f"{row}, int8"
            files[label] = cache / f"{row}.{rounding}.onnx"
            pc.sketch_onnx(source, files[label], ratio, data=data, then=rounding, progress=False)
    files[ALONE], newer = cache / "alone.onnx", cache / "newer.onnx"
    onnx.save(convert_version(onnx.load(source), 13), newer)
    write_static(newer, files[ALONE], data[:SHOWN])
    held_out = reader.pictures(reader.held_out, 1, held_out=True)
    wanted = answers(source, held_out)
    return Network(
        reader.title,
        files,
        lambda path: reader.judge(answers(path, held_out), wanted, source),
        held_out[: max(SIZES)],
    )


def seconds(network: Network, rounds: int) -> dict[tuple[str, int], float]:
    """Processor seconds of a call, by row and number of pictures."""
    runs = {row: session(path, 1) for row, path in network.files.items()}
    calls = {
        (row, size): partial(run.run, None, {run.get_inputs()[0].name: network.pictures[:size]})
        for size in SIZES
        for row, run in runs.items()
    }
    return processor_seconds(calls, rounds)


def table(network: Network, rounds: int) -> Iterator[str]:
    """A line for each file."""
    taken = seconds(network, rounds)
    judged = {row: network.judge(path) for row, path in network.files.items()}
    metrics = list(judged["dense"])
    yield f"## {network.title}"
    yield ""
    columns = ["", *metrics, "MB", *(f"{size} at once" for size in SIZES)]
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + "--:|" * (len(columns) - 1)
    for row, path in network.files.items():
        speeds = (f"{taken['dense', size] / taken[row, size]:.2f}" for size in SIZES)
        quality = (f"{judged[row][metric]:.3f}" for metric in metrics)
        yield f"| {' | '.join([row, *quality, f'{path.stat().st_size / 1e6:.1f}', *speeds])} |"
    yield ""


def main() -> None:
    """Make the files, judge them, time them, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*TORCH_MODELS, *READERS]
    parser.add_argument("--models", nargs="+", default=known, choices=known)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.75])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", pc.SketchQualityWarning)  # the table tells
    print(f"ONNX Runtime {version('onnxruntime')}; times as fast as dense, of processor time.\n")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            make = of_torch if name in TORCH_MODELS else of_file
            print(*table(make(name, options.ratios, Path(folder)), options.rounds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
