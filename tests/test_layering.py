"""Imports point one way: the drawing at the end of docs/design.md, held against the source."""

import ast
import functools
import re
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "panther_compile"
PACKAGE_OF_FOLDER = {
    "panther_compile": "panther_compile",
    "passes": "panther_compile.passes",
    "kernels": "panther_compile.kernels",
}
MAX_LINES = 500
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

# (importing module, imported module) -> why the import has to stand inside a function.
_TRITON = "it imports Triton, which only a GPU needs"
LOCAL_IMPORTS_ALLOWED: dict[tuple[str, str], str] = {
    (f"panther_compile.ops.{op}", f"panther_compile.kernels.{kernel}"): _TRITON
    for op, kernel in (
        ("linear_dispatch", "sketched_linear"),
        ("linear_dispatch", "sketched_linear_backward"),
        ("linear_dispatch", "decode_linear"),
        ("conv2d", "sketched_conv2d"),
        ("attention", "random_feature_attention"),
        ("attention", "random_feature_attention_backward"),
    )
} | {
    ("panther_compile.cli", f"panther_compile.{module}"): "it takes seconds, and few commands need it"
    for module in ("integrations.folders", "integrations.folder_by_weights", "onnx.sketch")
}


def drawing(markdown: str) -> str:
    """The last code block of a text."""
    return re.findall(r"^```\w*\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)[-1]


def read_ranks(markdown: str) -> dict[str, int]:
    """Unit -> rank, 0 at the bottom."""
    lines = reversed(drawing(markdown).strip().splitlines())
    return {unit.strip(): rank for rank, line in enumerate(lines) for unit in line.split("|")}


def find_modules(root: Path) -> dict[str, Path]:
    modules = {}
    for folder, package in PACKAGE_OF_FOLDER.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            modules[".".join((package, *parts))] = path
    return modules


def unit_of(module: str) -> str:
    """The name in the drawing: panther_compile.layers.linear -> layers."""
    return module.split(".")[1] if "." in module else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def find_imports(
    tree: ast.AST, modules: Collection[str], *, local: bool = False, typing: bool = False
) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield (imported module, line, inside a function, for type checkers only)."""
    for node in ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                if submodule == f"{PACKAGE}.__version__":
                    continue
                is_unit = submodule in modules or source == PACKAGE
                names.append(submodule if is_unit else source)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            # importlib.import_module("..."), __import__("...")
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        for name in names:
            if str(name).startswith((PACKAGE, ".")):
                yield name, node.lineno, local, typing
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if is_type_checking(node):
            for part in node.body:
                holder = ast.Module([part], [])
                yield from find_imports(holder, modules, local=local, typing=True)
            for part in node.orelse:
                holder = ast.Module([part], [])
                yield from find_imports(holder, modules, local=local, typing=typing)
        else:
            yield from find_imports(node, modules, local=local or is_function, typing=typing)


@functools.cache
def read_imports(source: str, modules: frozenset[str]) -> list[tuple[str, int, bool, bool]]:
    return list(find_imports(ast.parse(source), modules))


def judge_import(module: str, imported: str, ranks: dict[str, int]) -> str | None:
    """Why the import is wrong, or None."""
    own, other = unit_of(module), unit_of(imported)
    if imported.startswith("."):
        return "is relative"
    if own == "__init__":
        return "is not lazy"
    if other == "__init__":
        return "goes through the index: import from the name's home"
    if other not in ranks:
        return "is not in the drawing"
    if own == other:
        return None
    if own == "kernels":
        return "may not be imported by kernels"
    if ranks[other] >= ranks[own]:
        return "is not on a lower line"
    return None


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def find_violations(root: Path, ranks: dict[str, int]) -> list[str]:
    modules = find_modules(root)
    found = []
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        source = path.read_text(encoding="utf-8")
        where = path.relative_to(root)
        if unit_of(module) not in {*ranks, "__init__"}:
            found.append(f"{where}: {unit_of(module)} is not in the drawing")
            continue
        if NAMELESS & set(module.split(".")):
            found.append(f"{where}: the name says nothing; name what is in it")
        if len(source.splitlines()) > MAX_LINES:
            found.append(f"{where}: over {MAX_LINES} lines")
        for imported, line, local, typing in read_imports(source, frozenset(modules)):
            if module == PACKAGE and typing:
                continue
            if imported != module:
                edges[module].add(imported)
            reason = judge_import(module, imported, ranks)
            if reason:
                found.append(f"{where}:{line}: {imported} {reason}")
            elif local and (module, imported) not in LOCAL_IMPORTS_ALLOWED:
                found.append(f"{where}:{line}: {imported} is imported inside a function")
    cycle = find_cycle(edges)
    if cycle:
        found.append("cycle: " + " -> ".join(cycle))
    return found


DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
RANKS = read_ranks(DESIGN)


def test_no_violations():
    assert find_violations(ROOT, RANKS) == []


def test_drawing_names_what_is_there():
    units = {unit_of(module) for module in find_modules(ROOT)} - {"__init__"}
    assert set(RANKS) == units


def test_drawing_is_the_last_block_read_upwards():
    assert read_ranks("```sh\nmake\n```\nText.\n\n```\nb | c\na\n```\n") == {"a": 0, "b": 1, "c": 1}


def test_contributing_shows_the_same_drawing():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```\n{drawing(DESIGN)}```" in contributing


def test_index_of_a_package_names_each_of_its_files():
    for index in (ROOT / PACKAGE).glob("*/**/__init__.py"):
        words = re.findall(r"\w+", ast.get_docstring(ast.parse(index.read_text(encoding="utf-8"))) or "")
        assert {file.stem for file in index.parent.glob("*.py")} <= {*words, "__init__"}, index


def test_allowed_local_imports_are_used():
    modules = find_modules(ROOT)
    used = {
        (module, imported)
        for module, path in modules.items()
        for imported, _, local, _ in read_imports(path.read_text("utf-8"), frozenset(modules))
        if local
    }
    assert set(LOCAL_IMPORTS_ALLOWED) <= used


# A library without a fault, in which each fault below is planted alone.
SOUND_RANKS = read_ranks("```\napi\nreport | checkpoint\npasses\nlayers\nkernels\nerrors\n```\n")
SOUND = {
    "panther_compile/__init__.py": (
        "import importlib\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from panther_compile.api import sketchify\n"
    ),
    "panther_compile/api.py": "from panther_compile import __version__\n"
    "from panther_compile.passes.sketch_linear import sketch_linear\n",
    "panther_compile/report.py": "from panther_compile.errors import PantherError\n",
    "panther_compile/checkpoint.py": "from panther_compile.layers import Linear\n",
    "panther_compile/errors.py": "import math\n",
    "panther_compile/layers/__init__.py": "from panther_compile.layers.linear import Linear\n",
    "panther_compile/layers/linear.py": "from panther_compile.kernels import reference\n",
    "panther_compile/layers/conv.py": "from panther_compile.layers.linear import Linear\n",
    "passes/__init__.py": "",
    "passes/sketch_linear.py": "from panther_compile.layers import Linear\n",
    "kernels/__init__.py": "",
    "kernels/reference.py": "import torch\n",
}

PLANTED = [
    ("errors.py", "import panther_compile.api", "not on a lower line"),
    ("errors.py", "def f():\n    import panther_compile.api", "not on a lower line"),
    ("report.py", "from panther_compile.checkpoint import save", "not on a lower line"),
    ("report.py", "from panther_compile import checkpoint", "not on a lower line"),
    ("report.py", "from . import errors", "relative"),
    ("report.py", "from .errors import PantherError", "relative"),
    ("report.py", "from panther_compile import sketchify", "not in the drawing"),
    ("report.py", "import panther_compile", "through the index"),
    ("report.py", "def f():\n    from panther_compile import errors", "inside a function"),
    ("report.py", "class A:\n    def f(self):\n        import panther_compile.errors", "inside a"),
    (
        "report.py",
        "import importlib\nimportlib.import_module('panther_compile.api')",
        "not on a lower line",
    ),
    (
        "report.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import panther_compile.api",
        "not on a lower line",
    ),
    ("report.py", "x = 0\n" * (MAX_LINES + 1), "over 500 lines"),
    ("__init__.py", "from panther_compile.errors import PantherError", "not lazy"),
    (
        "__init__.py",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import panther_compile.api",
        "not lazy",
    ),
    ("unlisted.py", "", "unlisted is not in the drawing"),
    ("utils.py", "", "utils is not in the drawing"),
    ("layers/helpers.py", "", "the name says nothing"),
    ("layers/linear.py", "import panther_compile.layers.conv", "cycle"),
    ("layers/linear.py", "import panther_compile.layers", "cycle"),
    ("layers/linear.py", "import panther_compile.passes.sketch_linear", "not on a lower line"),
    ("../kernels/reference.py", "import panther_compile.errors", "imported by kernels"),
    ("../passes/sketch_linear.py", "import panther_compile.api", "not on a lower line"),
    ("../passes/common.py", "", "the name says nothing"),
]


def write_library(root: Path) -> None:
    for name, source in SOUND.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_sound_library_passes(tmp_path):
    write_library(tmp_path)
    assert find_violations(tmp_path, SOUND_RANKS) == []


@pytest.mark.parametrize(("name", "source", "complaint"), PLANTED)
def test_planted_fault_is_caught(tmp_path, name, source, complaint):
    write_library(tmp_path)
    path = (tmp_path / "panther_compile" / name).resolve()
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(before + source + "\n", encoding="utf-8")

    found = find_violations(tmp_path, SOUND_RANKS)

    assert any(complaint in violation for violation in found), found
    assert all(path.name in violation or "cycle" in violation for violation in found), found
