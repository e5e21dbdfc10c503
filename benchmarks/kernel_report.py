"""The records of `kernels.py`: made into a table, and judged by targets.

Everything here is a function of the list of records. A shape is one case in one type; it is judged on its
forward and on its "training", forward and backward together. (The forward is the one without gradients: to
keep the latent is not in it.)
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_cases import DTYPES, LABELS, LOW_PRECISION

from panther_compile.kernels import dispatch

Record = dict[str, Any]
COLUMNS = ("dtype", *LABELS, "pass")
PASSES = ("forward", "training")
PRODUCTS = ("two products", "compiled")
# How far a kernel's results may be from those of plain torch, relatively, before it is listed. Half types
# round the latent and the products; random-feature attention has exponentials of them in torch.
DIFFERENCES = {"bf16": 0.03, "fp16": 0.01, "tf32": 0.01, "fp32": 1e-4}


@dataclass(frozen=True)
class Shape:
    """One case in one type.

    Attributes:
        about: any of its records.
        times: pass to contender to microseconds; "picked" is what dispatch picks, "roofline" the bound.
        picks: pass to the contender that dispatch picks.
    """

    about: Record
    times: dict[str, dict[str, float]]
    picks: dict[str, str]

    @property
    def title(self) -> str:
        """One line to tell it by."""
        about = {name: self.about[name] for name in COLUMNS[:-1]}
        return "{dtype} {op} {model} {shape}, rows {rows}, {form}, ratio {ratio}, rank {rank}".format(**about)

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        rank = self.about["rank"]
        return max(rank) if isinstance(rank, list) else rank

    def gain(self, direction: str, one: str, others: Sequence[str]) -> tuple[float, str] | None:
        """How many times as fast `one` is as the fastest of the others, and which; None if not measured."""
        times = self.times[direction]
        best = min((name for name in others if name in times), key=times.__getitem__, default=None)
        if best is None or one not in times:
            return None
        return times[best] / times[one], best


@dataclass(frozen=True)
class Target:
    """One thing that is wanted.

    Attributes:
        title: what it says.
        wanted: the least gain.
        subject: whose, "picked" or "triton", decides.
        others: over the fastest of these.
        applies: to which shapes.
    """

    title: str
    wanted: float
    subject: str
    others: tuple[str, ...]
    applies: Callable[[Shape], bool]


def is_operation(shape: Shape) -> bool:
    """One operation, not a whole model."""
    return shape.about["op"] != "model"


def is_small(shape: Shape) -> bool:
    """One operation of rank at most 256, or of at most 64 rows."""
    return is_operation(shape) and (shape.rank <= 256 or shape.about["vectors"] <= 64)


def is_wide(shape: Shape) -> bool:
    """A product of 4096 features or more on either side, at ratio .5."""
    return shape.about["width"] >= 4096 and shape.about["ratio"] == 0.5


def is_large(shape: Shape) -> bool:
    """4096 rows or more of 2048 features or more on either side."""
    return shape.about["vectors"] >= 4096 and shape.about["width"] >= 2048


def is_decoding(shape: Shape) -> bool:
    """One linear layer, or those of one input, of a Llama at ratio .5, for at most 8 rows."""
    about = shape.about
    is_llama = "linear" in about["op"] and about["model"].startswith("Llama")
    return is_llama and about["vectors"] <= 8 and about["ratio"] == 0.5


TARGETS = (
    Target(
        "what dispatch picks is at least 0.97 x as fast as the best alternative",
        *(0.97, "picked", PRODUCTS, is_operation),
    ),
    Target(
        "the kernel is 1.15 x as fast as the best two products, at rank <= 256 or rows <= 64",
        *(1.15, "triton", PRODUCTS, is_small),
    ),
    Target(
        "what dispatch picks is 1.7 x as fast as dense, at ratio .5 of 4096 and more features",
        *(1.7, "picked", ("dense",), is_wide),
    ),
    Target(
        "what dispatch picks reaches 80 % of the roofline, at 4096 rows and 2048 features or more",
        *(0.8, "picked", ("roofline",), is_large),
    ),
    Target(
        "a whole model at ratio .5, as dispatch has it, is 1.3 x as fast as dense",
        *(1.3, "picked", ("dense",), lambda shape: not is_operation(shape)),
    ),
    Target(
        "the decode kernels are 1.7 x as fast as dense, for 8 rows and fewer of Llama's layers at ratio .5",
        *(1.7, "triton", ("dense",), is_decoding),
    ),
)


def shapes_of(records: Sequence[Record]) -> list[Shape]:
    """The shapes of records without an error, each with the times there are."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        if "error" not in record:
            groups[tuple(str(record[name]) for name in COLUMNS[:-1])].append(record)
    shapes = []
    for group in groups.values():
        single: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        picks = {}
        for record in group:
            single[record["pass"]][record["contender"]] = record["microseconds"]
            single[record["pass"]]["roofline"] = record["roofline"]
            picks["training" if record["pass"] == "backward" else "forward"] = record["picks"]
        forward, backward = single.values()
        training = {name: forward[name] + backward[name] for name in forward if name in backward}
        found = {"forward": forward, "training": training}
        for direction, name in picks.items():
            if name in found[direction]:
                found[direction]["picked"] = found[direction][name]
        shapes.append(Shape(group[0], found, picks))
    return shapes


def of_one_machine(records: Sequence[Record]) -> list[Record]:
    """The records of the device and torch of the last one: times of others do not compare."""
    return [one for one in records if all(one[name] == records[-1][name] for name in ("device", "torch"))]


def gains(target: Target, subject: str, shapes: Sequence[Shape]) -> Iterator[tuple[float, str, Shape, str]]:
    """The gain of each shape and pass that a target applies to, over which, of what shape, in which pass."""
    for shape in shapes:
        for direction in PASSES if target.applies(shape) else ():
            found = shape.gain(direction, subject, target.others)
            if found:
                yield *found, shape, direction


def summary(records: Sequence[Record], left: int = 0) -> str:
    """The beginning of the report; `left` is the number of cases there was no time for."""
    if not records:
        return "# Kernels\n\nNothing was measured.\n"
    kept = of_one_machine(records)
    shapes = shapes_of(kept)
    sections = (_head(kept, len(records) - len(kept), left), _targets(shapes), _dispatch(shapes))
    more = (_models(shapes), _low_precision(shapes), _differences(kept), _errors(kept))
    lines = [line for section in (*sections, *more) for line in section]
    return "\n".join(lines) + "\n"


def details(records: Sequence[Record]) -> str:
    """The rest of the report: every shape that misses a target, and the table of all times."""
    if not records:
        return ""
    kept = of_one_machine(records)
    return "\n".join(_missed(shapes_of(kept))) + "\n\n" + _table(kept)


def _head(records: Sequence[Record], others: int, left: int) -> Iterator[str]:
    said = {
        name: ", ".join(sorted({str(one[name]) for one in records}))
        for name in ("device", "torch", "triton", "cuda", "commit", "date")
    }
    yield "# Kernels"
    yield ""
    yield "{device}, torch {torch}, Triton {triton}, CUDA {cuda}, commit {commit}, {date}.".format(**said)
    shapes = shapes_of(records)
    compiled = sum("compiled" in shape.times["forward"] for shape in shapes)
    yield f"{len(records)} times of {len(shapes)} shapes, {compiled} of them with torch.compile."
    if left:
        yield f"There was no time for {left} others (a case in a type, with or without torch.compile)."
    if others:
        yield f"{others} times of another device or torch are left out."


def _targets(shapes: Sequence[Shape]) -> Iterator[str]:
    yield ""
    yield "## Targets"
    yield ""
    yield "Shapes and passes (forward; training, forward and backward) that reach it, of those measured."
    yield "The bold number decides."
    yield ""
    yield "| target | what dispatch picks | the Triton kernel |"
    yield "|---|--:|--:|"
    for target in TARGETS:
        cells = []
        for subject in ("picked", "triton"):
            found = [one[0] for one in gains(target, subject, shapes)]
            cell = f"{sum(gain >= target.wanted for gain in found)} of {len(found)}"
            cells.append(f"**{cell}**" if subject == target.subject else cell)
        yield f"| {target.title} | {' | '.join(cells)} |"


def _missed(shapes: Sequence[Shape]) -> Iterator[str]:
    yield "## Missed"
    for target in TARGETS:
        found = [one for one in gains(target, target.subject, shapes) if one[0] < target.wanted]
        yield ""
        yield (
            f"{target.title[0].upper()}{target.title[1:]}; {len(found)} are not:"
            if found
            else (f"Not one misses: {target.title}.")
        )
        yield ""
        for gain, best, shape, direction in sorted(found, key=lambda miss: miss[0]):
            yield f"- {gain:.2f} x {best}: {shape.title}, {direction} (picked: {shape.picks[direction]})"


def _dispatch(shapes: Sequence[Shape]) -> Iterator[str]:
    yield ""
    yield "## Dispatch"
    yield ""
    both = [shape for shape in shapes if {"triton", "two products"} <= shape.times["forward"].keys()]
    if not both:
        yield "No shape has both a kernel and two products, so there is nothing to judge."
        return
    yield from _losses(both)
    yield ""
    yield from _decode(both)


def _losses(shapes: Sequence[Shape]) -> Iterator[str]:
    for direction in PASSES:
        found = [(shape.gain(direction, "picked", ("triton", "two products")), shape) for shape in shapes]
        ratios = {id(shape): 1 / gain[0] for gain, shape in found if gain}
        wrong = [ratio for ratio in ratios.values() if ratio > 1]
        if not ratios:
            continue
        text = f"{direction}: picked the slower one in {len(wrong)} of {len(ratios)}"
        if wrong:
            worst = max((shape for shape in shapes if id(shape) in ratios), key=lambda one: ratios[id(one)])
            text += (
                f", which cost {statistics.geometric_mean(wrong):.2f} x in these, "
                f"{statistics.geometric_mean(ratios.values()):.3f} x over all, at worst "
                f"{max(wrong):.2f} x ({worst.title})"
            )
        yield f"- {text}"


def _decode(shapes: Sequence[Shape]) -> Iterator[str]:
    few = [
        shape
        for shape in shapes
        if "linear" in shape.about["op"] and shape.about["vectors"] <= dispatch.MAX_DECODE_ROWS
    ]
    kinds: dict[str, list[float]] = defaultdict(list)
    for shape in few:
        gain = shape.gain("forward", "triton", ("two products",))
        several = len(shape.about["sizes"]["ranks"]) > 1
        kind = (
            "several layers"
            if several
            else "pivoted"
            if shape.about["form"] == "pivoted"
            else "single layers"
        )
        if gain:
            kinds[kind].append(gain[0])
    yield f"The decode kernels, forward, at most {dispatch.MAX_DECODE_ROWS} rows (time of the device alone):"
    yield ""
    for kind, found in kinds.items():
        mean = statistics.geometric_mean(found)
        faster = sum(one > 1 for one in found)
        verdict = "take them" if mean > 1 else "leave them"
        yield (
            f"- {kind}: {mean:.2f} x two products (geometric mean), faster in {faster} of {len(found)}, "
            f"{min(found):.2f} to {max(found):.2f} x: {verdict}"
        )


def _models(shapes: Sequence[Shape]) -> Iterator[str]:
    """Whole models beside their dense ones, each as it is and through torch.compile."""
    yield ""
    yield "## Whole models"
    yield ""
    found = [shape for shape in shapes if not is_operation(shape)]
    yield "Times as fast as the dense model (compiled: as the dense model compiled)." if found else "None."
    for shape in found:
        names = ("auto", "triton", "two products")
        gained = ((name, shape.gain("forward", name, ("dense",))) for name in names)
        compiled = ("compiled", shape.gain("forward", "compiled", ("compiled dense",)))
        said = ", ".join(f"{name} {gain[0]:.2f}" for name, gain in (*gained, compiled) if gain)
        about = "{dtype} {model} {shape}, batch {rows}".format(**shape.about)
        yield f"- {about}: {said}"


def _low_precision(shapes: Sequence[Shape]) -> Iterator[str]:
    """Factors in int8 and fp8 beside those in the type of the case."""
    yield ""
    yield "## int8 and fp8"
    yield ""
    if not any(kind in shape.times["forward"] for shape in shapes for kind in LOW_PRECISION):
        yield "None."
        return
    yield "Two products in these types, compiled, over the fastest of ours and the plain (geometric mean):"
    for kind in LOW_PRECISION:
        for title, few in (("16 rows and fewer", True), ("more rows", False)):
            found = [
                shape.gain("forward", kind, ("triton", *PRODUCTS))
                for shape in shapes
                if (shape.about["vectors"] <= dispatch.MAX_DECODE_ROWS) == few
            ]
            gained = [one[0] for one in found if one]
            if gained:
                faster = sum(one > 1 for one in gained)
                mean = statistics.geometric_mean(gained)
                yield f"- {kind}, {title}: {mean:.2f} x, faster in {faster} of {len(gained)}"


def _differences(records: Sequence[Record]) -> Iterator[str]:
    compared = [one for one in records if "difference" in one]
    far = [one for one in compared if not one["difference"] <= DIFFERENCES[one["dtype"]]]  # NaN is far
    yield ""
    yield "## Results"
    yield ""
    yield f"{len(compared) - len(far)} of {len(compared)} agree with plain torch within rounding."
    hosts: dict[str, list[float]] = defaultdict(list)
    for one in records:
        if "host" in one and one["pass"] == "forward":
            hosts[one["contender"]].append(one["host"])
    said = ", ".join(f"{name} {statistics.median(found):.0f}" for name, found in hosts.items())
    yield f"Median microseconds of the processor to launch a forward, not in the times: {said}."
    for one in far:
        yield f"- {one['difference']:.2g}: {' '.join(str(one[name]) for name in COLUMNS)}"


def _errors(records: Sequence[Record]) -> Iterator[str]:
    found = [one for one in records if "error" in one]
    yield ""
    yield "## Errors"
    yield ""
    yield f"{len(found)}." if found else "None."
    for one in found:
        yield f"- {' '.join(str(one[name]) for name in ('contender', *COLUMNS))}: {one['error']}"


def _table(records: Sequence[Record]) -> str:
    """A row for each case and pass, a column for each contender: microseconds (share of the roofline)."""
    names = list(dict.fromkeys(one["contender"] for one in records))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for one in records:
        place = rows.setdefault(tuple(str(one[name]) for name in COLUMNS), {})
        place["picks"] = one["picks"]
        share = 0.0 if "error" in one else one["roofline"] / one["microseconds"]
        place[one["contender"]] = "error" if "error" in one else f"{one['microseconds']:.1f} ({share:.0%})"
    order = {name: place for place, name in enumerate(DTYPES)}
    ordered = sorted(rows.items(), key=lambda row: order[row[0][0]])
    lines = [(*COLUMNS, "picks", *names), ("---",) * (len(COLUMNS) + 1 + len(names))]
    lines += [(*key, *(row.get(name, "") for name in ("picks", *names))) for key, row in ordered]
    head = "## Times\n\nMicroseconds (share of the roofline).\n\n"
    return head + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
