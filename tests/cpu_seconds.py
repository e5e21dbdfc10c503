"""A plugin that says which tests take most processor time, their processes' counted in.

    python -m pytest -p cpu_seconds --cpu-seconds=/tmp/seconds.tsv -n 0 tests/...

Wall time on a machine that others use says little.
"""

import os
from pathlib import Path

import pytest

_TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--cpu-seconds", help="a file to write seconds and name of each test phase into")


def spent():
    """Processor seconds of this process and of all below it, ended ones too."""
    parents, seconds = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICK
    below, found = {os.getpid()}, 0
    while len(below) > found:
        found = len(below)
        below |= {one for one, parent in parents.items() if parent in below}
    return sum(seconds.get(one, 0.0) for one in below)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = spent()
    result = yield
    place = item.config.getoption("cpu_seconds")
    if place:
        with open(place, "a") as file:
            file.write(f"{spent() - before:.2f}\t{item.nodeid}\n")
    return result
