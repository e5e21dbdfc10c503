"""Texts that ship with Python: its documentation, docstrings and source."""

import ast
import os
import pydoc_data.topics
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

MIN_LENGTH, MAX_LENGTH = 80, 600
Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "encodings"}


def english_paragraphs() -> list[str]:
    """Paragraphs of Python's language reference, in an order shuffled once and for all."""
    return _paragraphs(text for _, text in sorted(pydoc_data.topics.topics.items()))


def code_paragraphs() -> list[str]:
    """Paragraphs of the standard library's source, without docstrings and comments, likewise shuffled."""
    return _paragraphs(code())


def prose() -> list[str]:
    """The language reference by topic and the docstrings of the standard library by module, shuffled."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    texts.extend("\n\n".join(_docstrings(tree)) for tree in _modules())
    return _shuffled([text for text in texts if len(text) > 200])


def code() -> list[str]:
    """The standard library's modules without docstrings and comments, blank lines before each definition."""
    return _shuffled([_bare(tree) for tree in _modules()])


def license_text() -> str:
    """The GNU General Public License, as Debian and its like keep it on every machine."""
    file = Path("/usr/share/common-licenses/GPL-3")
    if not file.exists():
        raise SystemExit(f"{file} is missing: put the text of the GPL there")
    return file.read_text(encoding="utf-8")


def _paragraphs(texts: Iterator[str] | list[str]) -> list[str]:
    pieces = (" ".join(piece.split()) for text in texts for piece in text.split("\n\n"))
    return _shuffled([piece for piece in pieces if MIN_LENGTH < len(piece) < MAX_LENGTH])


def _shuffled(texts: list[str]) -> list[str]:
    random.Random(0).shuffle(texts)
    return texts


def _modules() -> Iterator[ast.Module]:
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(path.relative_to(root).parts):
            yield ast.parse(path.read_text(encoding="utf-8"))


def _documented(tree: ast.Module) -> Iterator[Documented]:
    return (node for node in ast.walk(tree) if isinstance(node, Documented))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in _documented(tree):
        text = ast.get_docstring(node)
        if text and len(text) > MIN_LENGTH:
            yield text


def _bare(tree: ast.Module) -> str:
    for node in _documented(tree):
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
