"""The results of `accuracy.py`: kept line by line, and made into a table and a picture."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Rows = dict[tuple[str, str], dict[float, list[dict[str, float]]]]
"""(method, domain) to ratio to the metrics of each seed."""

INTRODUCTION = """\
Made by `benchmarks/accuracy.py`. A ratio is stored over dense numbers of the replaced layers, parameters and
buffers, biases included; all methods replace the same layers and are held to the same count, within 1 % below
it, which is asserted (2:4 and int8 store what their rows say, int8 a scale a row besides). Peers are written
from their equations, `benchmarks/peers/`, and keep the same ratio in every layer, unless they allocate.
Calibration data comes from the model's own domain ("in") or from another one ("off"), never from the data
that the model is judged on. Beside it ours make up texts of the data, the tokenizer or the model itself
(`docs/calibration.md`), and healing, as its line says, may see more of the data; no peer has either. The best
of a column is bold, int8 and int4 aside; of a peer that beats ours of the same domain by more than the digits
shown there is a line below the table."""
_APART = ("int8", "int4")  # in the names of methods of other types, which are not compared by their ratio
_OURS = "ours"


def _is_apart(method: str) -> bool:
    return any(kind in method for kind in _APART)


@dataclass(frozen=True)
class Result:
    """What was measured: the key of a stored line."""

    model: str
    mark: str
    quick: bool
    method: str
    domain: str
    ratio: float
    seed: int


class Store:
    """A file of JSON lines; the last line for a key counts.

    Attributes:
        descriptions: of each (model, quick), with the mark of its weights.
        found: key to {"metrics", "stored", "seconds"}.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptions: dict[tuple[str, bool], dict[str, Any]] = {}
        self.found: dict[Result, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._read(json.loads(line))

    def __contains__(self, key: Result) -> bool:
        return key in self.found

    def add(self, key: Result, metrics: Mapping[str, float], stored: float, seconds: float) -> None:
        """Keep one result."""
        found = {"metrics": dict(metrics), "stored": round(stored, 5), "seconds": round(seconds, 2)}
        self._write({"key": asdict(key)} | found)

    def describe(self, model: str, mark: str, description: Mapping[str, Any], *, quick: bool) -> None:
        """Say what a model is; only results with its mark count from now on."""
        line = {"model": model, "quick": quick, "mark": mark, **description}
        if self.descriptions.get((model, quick)) != line:
            self._write({"description": line})

    def forget(self, methods: Sequence[str], models: Sequence[str], *, quick: bool) -> None:
        """Drop the results of some methods on some models, to measure them again."""
        self.found = {
            key: value
            for key, value in self.found.items()
            if not (key.method in methods and key.model in models and key.quick == quick)
        }

    def rows(self, model: str, *, quick: bool) -> Rows:
        """The results of one model."""
        mark = self.descriptions[model, quick]["mark"]
        rows: Rows = defaultdict(lambda: defaultdict(list))
        for key, value in self.found.items():
            if (key.model, key.mark, key.quick) == (model, mark, quick):
                rows[key.method, key.domain][key.ratio].append(value["metrics"])
        return rows

    def _write(self, line: dict[str, Any]) -> None:
        self._read(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self, line: dict[str, Any]) -> None:
        if "description" in line:
            description = line["description"]
            self.descriptions[description["model"], description["quick"]] = description
        else:
            self.found[Result(**line["key"])] = {k: v for k, v in line.items() if k != "key"}


def report(
    store: Store, models: Sequence[str], titles: Mapping[str, str], circumstances: str, *, quick: bool
) -> Iterator[str]:
    """The lines of the Markdown report."""
    yield "# Accuracy at equal stored numbers"
    yield ""
    yield f"{circumstances}. {INTRODUCTION}"
    yield ""
    yield "![ratio against quality](accuracy.png)"
    for model in models:
        rows = store.rows(model, quick=quick)
        if rows:
            yield ""
            yield from section(store.descriptions[model, quick], rows, titles)


def section(description: Mapping[str, Any], rows: Rows, titles: Mapping[str, str]) -> Iterator[str]:
    """The table of one model."""
    metrics: dict[str, bool] = description["metrics"]
    dense = ", ".join(f"{name} {_number(description['dense'][name])}" for name in metrics)
    seeds = max((len(found) for row in rows.values() for found in row.values()), default=0)
    arrows = " / ".join(f"{name} {'↑' if higher else '↓'}" for name, higher in metrics.items())
    yield f"## {description['title']}"
    yield ""
    yield (
        f"{description['layers']} layers replaced, {description['replaced']:,} of {description['numbers']:,} "
        f"numbers. Dense: {dense}. Calibration in domain: {description['in']}; off domain: "
        f"{description['off']}; healing: {description['healing']}. Cells: {arrows}"
        + (
            f"; ± is the standard deviation over draws of calibration data, up to {seeds}."
            if seeds > 1
            else "."
        )
    )
    yield ""
    ratios = sorted({ratio for row in rows.values() for ratio in row}, reverse=True)
    yield "| method | calibration | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |"
    yield "|---|---|" + "--:|" * len(ratios)
    best = _best(rows, metrics)
    for method, title in titles.items():
        for domain in ("none", "in", "off"):
            if (method, domain) in rows:
                row = rows[method, domain]
                cells = [_cell(row.get(ratio, []), metrics, best[ratio]) for ratio in ratios]
                yield f"| {title} | {'' if domain == 'none' else domain} | " + " | ".join(cells) + " |"
    ahead = list(beaten(rows, metrics, titles))
    if ahead:
        yield ""
        yield f"Where a peer is ahead: {'; '.join(ahead)}. {description.get('remark', '')}".rstrip()


def beaten(rows: Rows, metrics: Mapping[str, bool], titles: Mapping[str, str]) -> Iterator[str]:
    """Where a peer is better than the best of ours that saw data of the same domain, or no data."""
    for (method, domain), row in rows.items():
        if method.startswith(_OURS) or _is_apart(method):
            continue
        for ratio, found in sorted(row.items(), reverse=True):
            ours = [
                other[ratio]
                for (name, theirs), other in rows.items()
                if name.startswith(_OURS) and not _is_apart(name) and theirs == domain and ratio in other
            ]
            for metric, higher in metrics.items() if ours else ():
                theirs_is = mean(f[metric] for f in found)
                best = (max if higher else min)(mean(f[metric] for f in each) for each in ours)
                better = theirs_is > best if higher else theirs_is < best
                if better and _number(theirs_is) != _number(best):
                    where = "" if domain == "none" else f" {domain} domain"
                    yield (
                        f"{metric} at {ratio:g}{where}: {titles[method]} {_number(theirs_is)}, "
                        f"ours {_number(best)}"
                    )


def _best(rows: Rows, metrics: Mapping[str, bool]) -> dict[float, dict[str, float]]:
    best: dict[float, dict[str, float]] = defaultdict(dict)
    for (method, _), row in rows.items():
        for ratio, found in row.items() if not _is_apart(method) else ():
            for metric, higher in metrics.items():
                value = mean(f[metric] for f in found)
                old = best[ratio].get(metric, value)
                best[ratio][metric] = max(old, value) if higher else min(old, value)
    return best


def _cell(found: list[dict[str, float]], metrics: Mapping[str, bool], best: Mapping[str, float]) -> str:
    if not found:
        return ""
    parts = []
    for metric in metrics:
        values = [f[metric] for f in found]
        text = _number(mean(values))
        if len(values) > 1:
            text += f" ± {_number(stdev(values))}"
        parts.append(f"**{text}**" if _number(mean(values)) == _number(best.get(metric, 0.0)) else text)
    return " / ".join(parts)


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:.3g}"
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def draw(store: Store, models: Sequence[str], titles: Mapping[str, str], path: Path) -> None:
    """Ratio against quality, a panel for each model and a line for each method, calibrated in domain."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = [model for model in models if (model, False) in store.descriptions]
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    palette = [*plt.get_cmap("tab20").colors, *plt.get_cmap("tab20b").colors]
    colours = dict(zip(titles, palette, strict=False))
    handles = {}
    for axis, model in zip(axes.flat, models, strict=False):
        description = store.descriptions[model, False]
        metric = next(iter(description["metrics"]))
        for (method, domain), row in store.rows(model, quick=False).items():
            if domain == "off" or method not in titles or method.endswith("-int8"):
                continue
            ratios = sorted(row)
            values = [mean(found[metric] for found in row[ratio]) for ratio in ratios]
            ours = method.startswith("ours")
            style = {"linewidth": 2.4 if ours else 1.2, "zorder": 3 if ours else 2, "markersize": 4}
            marker = {"int8": "*", "int8-weights": "*", "int4-weights": "*", "2:4": "s"}.get(method, "o")
            (line,) = axis.plot(ratios, values, marker=marker, color=colours[method], **style)
            handles[titles[method].strip("*")] = line
        axis.axhline(description["dense"][metric], color="black", linewidth=0.8, linestyle=":")
        if metric == "over dense":
            axis.set_yscale("log")
        axis.set(title=model, xlabel="stored over dense numbers", ylabel=metric)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
