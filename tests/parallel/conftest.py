"""Processes for the tests of this folder, started once."""

import pytest
from parallel import prepared
from parallel import ranks as processes
from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(request):
    """Ranks by their number."""
    prepared.announce(request.session.items)
    yield Ranks
    processes.stop()
