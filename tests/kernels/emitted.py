"""What Triton emitted for a GPU, read without one: races in global memory, tensor-core instructions.

`races` runs the integer part of a kernel's PTX for every thread of one block, branch by branch, and notes
which thread reads and writes which bytes between two barriers. Sums and exponentials are left unknown: no
address or branch of our scans depends on them; one that did would stop the run with an error.
"""

import itertools
import re
from collections import Counter

import numpy as np

WARP = 32
_LINE = re.compile(r"^\s*(?:@(?P<not>!?)(?P<guard>%p\d+)\s+)?(?P<op>[a-z][a-z0-9_.:]*)\s*(?P<rest>[^;]*);")
_ACCESS = re.compile(r"\[\s*(?P<base>%rd\d+)\s*(?:\+\s*(?P<offset>-?\d+))?\s*\]")
_TENSOR_CORE = ("mma.sync", "wgmma.mma_async")
_MOST_STEPS = 200_000


def opcodes(ptx):
    """How often each instruction occurs, by its name up to the first type."""
    found = (_LINE.match(line) for line in ptx.splitlines())
    return Counter(".".join(one["op"].split(".")[:2]) for one in found if one)


def tensor_core_instructions(ptx):
    """How many instructions multiply on tensor cores."""
    found = opcodes(ptx)
    return sum(found[name] for name in _TENSOR_CORE)


def updated_in_place(ptx):
    """The numbers of the pointers among the parameters that a kernel both reads and writes through."""
    lines = [one for one in map(_LINE.match, ptx.splitlines()) if one]
    sources = {}  # register -> pointers that it is made of
    for _ in range(3):  # once more than loops that carry a pointer on are deep
        for line in lines:
            names = re.findall(r"%rd\d+", line["rest"])
            if line["op"].startswith("ld.param.b64") and names:
                sources.setdefault(names[0], set()).add(int(re.search(r"_param_(\d+)", line["rest"])[1]))
            elif names and line["op"].split(".")[0] in ("add", "sub", "mad", "mov", "selp", "cvta"):
                found = (sources.get(name, set()) for name in names[1:])
                sources.setdefault(names[0], set()).update(*found)
    pointers = {int(place) for place in re.findall(r"\.ptr[^,)]*_param_(\d+)", ptx)}
    touched = {"ld": set(), "st": set()}
    for line in lines:
        kind = line["op"].split(".")[0]
        if line["op"].startswith(("ld.global", "st.global", "cp.async.ca", "cp.async.cg")):
            base = _ACCESS.findall(line["rest"])[-1][0]
            touched["st" if kind == "st" else "ld"] |= sources.get(base, set()) & pointers
    return sorted(touched["ld"] & touched["st"])


def races(ptx, params, block=(0, 0, 0)):
    """Pairs of lines that touch the same bytes in two warps with no barrier between, one of them writing.

    Args:
        ptx: the text of one kernel.
        params: the value of each of its parameters, in order; pointers far enough apart.
        block: which block of the grid runs.
    """
    return _Block(ptx, params, block).run()


class _Block:
    """All threads of a block in step: every register an int64 for each thread, or None where unknown."""

    def __init__(self, ptx, params, block):
        self.params, self.block = params, block
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        self.lines, self.labels = [], {}
        for text in itertools.takewhile(lambda line: not line.startswith("}"), ptx.splitlines()):
            if label := re.match(r"^(\$L\w+):", text):
                self.labels[label[1]] = len(self.lines)
            elif found := _LINE.match(text):
                self.lines.append(found)
        self.registers = {}
        self.races = set()
        self.readers, self.writers = {}, {}

    def run(self):
        place = 0
        for _ in range(_MOST_STEPS):
            if place == len(self.lines) or self.lines[place]["op"] == "ret":
                return self.races
            place = self.step(place)
        raise AssertionError("the kernel does not end")

    def step(self, place):
        line = self.lines[place]
        op, rest = line["op"], line["rest"].strip()
        guard = None
        if line["guard"]:
            guard = self.registers.get(line["guard"])
            if guard is not None:
                guard = (guard == 0) if line["not"] else (guard != 0)
        if op.startswith("bra"):
            assert line["guard"] is None or guard is not None, f"a branch depends on data: {line[0]}"
            taken = True if guard is None else bool(guard[0])
            assert guard is None or (guard == guard[0]).all(), f"threads part: {line[0]}"
            return self.labels[rest] if taken else place + 1
        if op.startswith(("bar.sync", "barrier.")):
            self.readers.clear(), self.writers.clear()
        elif op.startswith(
            ("ld.global", "st.global", "atom.global", "red.global", "cp.async.ca", "cp.async.cg")
        ):
            self.touch(line, guard, place)
        if op.startswith("st.") or not rest.startswith(("%", "{")):
            return place + 1
        self.assign(op, rest, guard)
        return place + 1

    def touch(self, line, guard, place):
        """Note the bytes that each thread reads or writes, and what races with them."""
        access = _ACCESS.findall(line["rest"])[-1 if line["op"].startswith("cp.") else 0]
        base = self.registers.get(access[0])
        assert base is not None, f"an address depends on data: {line[0]}"
        writes = not line["op"].startswith(("ld.", "cp."))
        width = int(re.search(r"b(\d+)$|\w(\d+)$", line["op"].split(".")[-1])[0].lstrip("bfsu")) // 8
        width *= int((re.search(r"\.v(\d)\.", line["op"]) or [0, 1])[1])
        active = np.ones(self.threads, bool) if guard is None else guard
        for thread in np.flatnonzero(active):
            start = int(base[thread]) + int(access[1] or 0)
            for word in range(start, start + width, 4):
                me = (int(thread) // WARP, place)
                against = [*self.writers.get(word, ()), *(self.readers.get(word, ()) if writes else ())]
                self.races.update((other[1], place) for other in against if other[0] != me[0])
                (self.writers if writes else self.readers).setdefault(word, set()).add(me)

    def value(self, name):
        name = name.strip()
        if name.startswith("%tid"):
            return np.arange(self.threads) if name == "%tid.x" else np.zeros(self.threads, np.int64)
        if name.startswith("%ctaid"):
            return np.full(self.threads, self.block["xyz".index(name[-1])])
        if name.startswith("%"):
            return self.registers.get(name)
        if re.fullmatch(r"-?\d+", name):
            return np.full(self.threads, int(name))
        return None

    def assign(self, op, rest, guard):
        target, *sources = (part.strip() for part in re.split(r",(?![^{\[]*[}\]])", rest))
        if target.startswith("{"):
            for name in target.strip("{} ").split(","):
                self.registers[name.strip()] = None
            return
        if op.startswith("ld.param"):
            found = np.full(self.threads, self.params[int(re.search(r"_param_(\d+)", sources[0])[1])])
        else:
            values = [self.value(one) for one in sources]
            found = None if any(one is None for one in values) else _compute(op, values)
        if guard is not None and self.registers.get(target) is not None and found is not None:
            found = np.where(guard, found, self.registers[target])
        elif guard is not None:
            found = None
        self.registers[target] = found


_COMPARE = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_PLAIN = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.floor_divide,
    "rem": np.remainder,
}


def _compute(op, values):
    """The integer result of an instruction, or None for one of floating numbers or that is not known here."""
    name, *parts = op.split(".")
    if parts and re.fullmatch(r"f\d+|bf16\w*|f16\w*|tf32", parts[-1]) and name != "setp":
        return None
    if name == "setp":
        return None if parts[-1].startswith("f") else _COMPARE[parts[0].rstrip("u")](*values).astype(np.int64)
    if name in ("mov", "cvt", "cvta"):
        found = values[0]
    elif name == "selp":
        found = np.where(values[2] != 0, values[0], values[1])
    elif name == "mad":
        found = values[0] * values[1] + values[2]
    elif name == "bfe":
        found = values[0] >> values[1] & (1 << values[2]) - 1
    elif name == "not":
        found = (values[0] == 0).astype(np.int64) if parts[-1] == "pred" else ~values[0]
    elif name == "neg":
        found = -values[0]
    elif name in _PLAIN and "hi" not in parts:
        found = _PLAIN[name](*values)
    else:
        return None
    if parts[-1] in ("b32", "s32", "u32") and "wide" not in parts:
        found = (found & 0xFFFFFFFF ^ 0x80000000) - 0x80000000  # as signed
    return found
