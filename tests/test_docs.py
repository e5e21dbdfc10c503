"""What the texts say holds: their code runs, the paths they name exist, the examples work."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^```\s*$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: \S.*? -->\s*\Z", re.S)

SUFFIX = r"\.(?:py|ipynb|pyi|md|toml|typed|ya?ml|json|txt|cfg|sh|png|svg|csv)"
PATH = re.compile(rf"[\w.*-]+(?:/[\w.*-]+)*(?:/|{SUFFIX})|[\w.*-]+(?:/[\w.*-]+)+")
# In backticks and with a slash, yet not a path of the repository: what it is instead.
NOT_PATHS = {
    "sentence-transformers/all-MiniLM-L6-v2": "the name of a model",
}
# What a run leaves behind, or a set-up makes.
MADE = (".venv", "out", "build", "dist")
SKIPPED_FOLDERS = {".git", "__pycache__", *MADE}


def find_blocks(markdown, language):
    """Yield (first line number, code, is run) of each block in a language."""
    for match in FENCE.finditer(markdown):
        if match["language"] == language:
            line = markdown.count("\n", 0, match.start("body"))
            is_run = not NOT_RUN.search(markdown[: match.start()])
            yield line, match["body"], is_run


def run_blocks(markdown, name):
    """Run a text's Python blocks top to bottom in one namespace; how many there were."""
    namespace = {"__name__": "__main__"}
    blocks = [(line, code) for line, code, is_run in find_blocks(markdown, "python") if is_run]
    for line, code in blocks:
        # Blank lines in front give tracebacks the text's own line numbers.
        exec(compile("\n" * line + code, name, "exec"), namespace)
    return len(blocks)


def list_files(root):
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.endswith("-info")
        ]
        relative = Path(folder).relative_to(root)
        files += [(relative / name).as_posix() for name in [*names, *subfolders]]
    return files


def exists(path, files):
    """Whether a path names something: in full, or by its end when that is how the text puts it."""
    if path in NOT_PATHS or path.split("/")[0] in MADE:
        return True
    pattern = re.escape(path.removeprefix("./").rstrip("/")).replace(r"\*", "[^/]*")
    return any(re.fullmatch(f"(?:.*/)?{pattern}", file) for file in files)


def find_inline_paths(markdown):
    prose = FENCE.sub("", markdown)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if PATH.fullmatch(code):
            yield code


def find_links(markdown):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", markdown)):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target.split("#")[0]


def find_tree_paths(block):
    """Paths of a drawn or indented tree of files; nothing if the block is something else."""
    stack, paths = [], []
    for line in block.splitlines():
        text = re.sub(r"[│├└─┬|]", " ", line)
        indent = len(text) - len(text.lstrip())
        cell = re.split(r"\s{2,}|\s#", text.strip())[0]
        names = re.split(r"[,\s]+", cell)
        if not text.strip() or not all(PATH.fullmatch(name) for name in names):
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        above = "".join(name for _, name in stack)
        paths += [above + name for name in names]
        if names[-1].endswith("/"):
            stack.append((indent, names[-1]))
    folders = sum(path.endswith("/") for path in paths)
    return paths if len(paths) >= 3 and folders else []


def missing_tree_paths(block, root):
    """Paths of the tree that are not there, seen from the root or from the folder around it."""
    paths = find_tree_paths(block)
    below_first = [path.removeprefix(paths[0]) for path in paths[1:]]

    def missing(candidates):
        return [
            path
            for path in candidates
            if path.split("/")[0] not in MADE and not list(root.glob(path.rstrip("/")))
        ]

    return min(missing(paths), missing(below_first), key=len)


AS_IT_STANDS = pytest.param(False, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("narrow", [True, AS_IT_STANDS])
def test_readme_code_runs(narrow, tmp_path, monkeypatch):
    """A twelfth of each width takes little time; the lines are the same."""
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    assert "768" in text
    assert "3072" in text
    if narrow:
        text = text.replace("768", "64").replace("3072", "256")
    assert run_blocks(text, "README.md") > 0


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_named_paths_exist(text):
    markdown = text.read_text(encoding="utf-8")
    files = list_files(ROOT)
    missing = [path for path in find_inline_paths(markdown) if not exists(path, files)]
    missing += [path for path in find_links(markdown) if not (text.parent / path).exists()]
    for language in ["", "text"]:
        for _, block, _ in find_blocks(markdown, language):
            missing += missing_tree_paths(block, ROOT)
    assert missing == []


def test_there_are_examples():
    assert EXAMPLES


# tests/integrations runs the first with all its steps.
SLOW_EXAMPLES = ("compress_smollm2.py", "compress_minilm.py", "digits_cnn.py", "train_3d.py")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.slow if path.name in SLOW_EXAMPLES else (), id=path.name)
        for path in EXAMPLES
    ],
)
def test_example_runs(example, tmp_path, monkeypatch):
    """In this process, which has imported what it needs, but for those that take long anyway."""
    if example.name not in SLOW_EXAMPLES:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MPLBACKEND", "Agg")
        monkeypatch.setattr(sys, "argv", [str(example), "--quick"])
        runpy.run_path(str(example), run_name="__main__")
        return
    done = subprocess.run(
        [sys.executable, example, "--quick"],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mesh", "2,2"], "argument --mesh: '2,2', wanted the sizes of dp, pp and tp"),
        (["--mesh", "0,1,1"], "argument --mesh: '0', wanted a whole number, 1 or more"),
        (["--quick", "--steps", "0"], "argument --steps: '0', wanted a whole number, 1 or more"),
        (["--every", "0"], "argument --every: '0', wanted a whole number, 1 or more"),
    ],
)
def test_options_of_an_example_that_are_none(options, said, monkeypatch, capsys):
    """Processes would start, and end in tracebacks."""
    example = ROOT / "examples" / "train_3d.py"
    monkeypatch.setattr(sys, "argv", [str(example), *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(example), run_name="__main__")
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(notebook):
    """Its code cells, top to bottom in one namespace; what a cell ends in is shown."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    namespace, shown = {"__name__": "__main__"}, []
    for cell in code:
        tree = ast.parse("".join(cell["source"]), notebook.name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, notebook.name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), notebook.name, "eval"), namespace)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert sum("<table>" in text for text in shown) == 2


# The checks themselves, on texts that break their promise.

PAGE = """
See `docs/design.md`, `sites.py`, `passes/sketch_*.py`, `x_BI` and `nn.Linear`;
[a](docs/design.md#b), [c](https://d.e).

```python
x = 1
```

<!-- not run: needs a GPU -->
```python
raise RuntimeError
```

```python
y = x + 1
```
"""


def test_blocks_share_a_namespace_and_marked_ones_are_skipped():
    assert run_blocks(PAGE, "page.md") == 2
    with pytest.raises(RuntimeError):
        run_blocks(PAGE.replace("<!-- not run: needs a GPU -->", ""), "page.md")
    with pytest.raises(RuntimeError):
        run_blocks(PAGE.replace("not run: needs a GPU", "not run:"), "page.md")


def test_traceback_has_the_line_of_the_text():
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks("a\n\n```python\nx = 1\n1 / 0\n```\n", "page.md")
    assert caught.traceback[-1].lineno + 1 == 5


def test_paths_are_found_in_prose():
    assert list(find_inline_paths(PAGE)) == ["docs/design.md", "sites.py", "passes/sketch_*.py"]
    assert list(find_links(PAGE)) == ["docs/design.md"]


def test_missing_paths_are_noticed():
    files = ["docs/design.md", "passes", "passes/sketch_linear.py"]
    for path in ["docs/design.md", "design.md", "passes/", "passes/sketch_*.py", "out/a.json"]:
        assert exists(path, files), path
    for path in ["docs/missing.md", "sign.md", "pass/", "passes/lift_*.py"]:
        assert not exists(path, files), path


TREES = [
    "top/\n├── a.py     what a does\n├── deep/\n│   └── b.py, c.py   both\n└── d.md\n",
    "top/          all of it\n  a.py        what a does\n  deep/\n    b.py c.py   both\n  d.md\n",
    "a.py   what a does\ndeep/\n  b.py\n  c.py\nd.md\n",
]


@pytest.mark.parametrize("tree", TREES)
def test_trees_are_read(tmp_path, tree):
    (tmp_path / "deep").mkdir()
    for name in ["a.py", "deep/b.py", "deep/c.py"]:
        (tmp_path / name).touch()
    assert missing_tree_paths(tree, tmp_path) == ["d.md"]
    (tmp_path / "d.md").touch()
    assert missing_tree_paths(tree, tmp_path) == []
    (tmp_path / "deep/c.py").rename(tmp_path / "c.py")
    assert missing_tree_paths(tree, tmp_path) == ["deep/c.py"]


def test_other_blocks_are_no_trees():
    assert find_tree_paths("cli\napi\nreport | checkpoint\n") == []
    assert find_tree_paths("$ make test\n123 passed in 4.5s\n") == []


def test_what_is_said_to_train_names_its_tests():
    """Each row of the table of docs/parallel.md names tests that are there, or says why there are none."""
    text = (ROOT / "docs" / "parallel.md").read_text()
    section = text.split("## What there is, and what tests it")[1].split("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for what, *rest in rows[1:]:
        how, tests = (*rest, "")[:2]
        named = re.findall(r"`([\w/]+(?:\.py|/))`", tests)
        says_why = how.startswith("no:") or what in ("checking a mesh without its ranks", "backends")
        assert named or says_why, f"{what}: neither a test nor a reason"
        for path in named:
            folders = (ROOT, ROOT / "tests", ROOT / "tests/parallel", ROOT / "tests/integrations")
            assert any((folder / path).exists() for folder in folders), f"{what}: there is no {path}"
