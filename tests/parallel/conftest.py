"""Processes for the tests of this folder, started once."""

from pathlib import Path

import pytest
from parallel import prepared
from parallel import ranks as processes
from parallel.ranks import Ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ranks(request):
    """Ranks by their number."""
    prepared.announce(request.session.items)
    return Ranks


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """End the processes with the last test of this folder.

    Torch's caches keep the meshes of past jobs: sixty groups on a rank, a thread of each of which wakes a
    hundred times a second.
    """
    if nextitem is None or HERE not in nextitem.path.parents:
        processes.stop()
