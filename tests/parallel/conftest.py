"""Processes for the tests of this folder, started once."""

import pytest
from parallel import ranks as processes
from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Ranks by their number."""
    yield Ranks
    processes.stop()
