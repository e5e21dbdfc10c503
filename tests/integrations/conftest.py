"""Processes for the tests that train on many ranks with another library's loop."""

import pytest
from parallel import ranks as processes
from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Ranks by their number."""
    yield Ranks
    processes.stop()
