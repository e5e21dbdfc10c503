"""Graphs as the docstrings of the graph passes show them."""

import importlib
import re


def drawn(module_name, title):
    """The nodes under "Before:" or "After:" of a docstring, each on one line."""
    text = importlib.import_module(f"panther_compile.passes.{module_name}").__doc__
    block = re.search(rf"^{title}:\n((?:    .*\n)+)", text, re.M)[1]
    block = re.sub(r"\n {8,}", "", block)
    return [_bare(line) for line in block.splitlines()]


def shown(graph_module):
    """The nodes of a graph as the docstrings show them: no counts of users, no empty kwargs."""
    lines = [line.strip() for line in str(graph_module.graph).splitlines() if line.strip().startswith("%")]
    return [_bare(line) for line in lines]


def _bare(line):
    line = re.sub(r" : .*?(?=placeholder|call_|get_attr)", " : ", line.strip())
    line = line.replace(", kwargs = {}", "").replace("panther_compile.ops.linear.", "")
    return re.sub(r"\)\s{2,}\S.*$", ")", line).replace(" ", "")
