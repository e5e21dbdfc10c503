"""The largest batch of all ranks: what is asked, what is agreed on, and nobody who waits."""

import json
import os
import subprocess
import sys

import pytest
from parallel import batch_size_jobs

from panther_compile import find_batch_size
from panther_compile.errors import ConfigError
from panther_compile.parallel.batch_size import search


@pytest.mark.parametrize("start", [1, 3, 8, 50])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 32, 49, 50])
def test_search(start, limit):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= limit

    assert search(fits, start, 50) == limit
    assert len(set(asked)) == len(asked) <= 12
    assert asked[0] == start
    assert min(asked) >= 1
    assert max(asked) <= 50


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": 0}, "start=0, wanted a whole number"),
        ({"multiple_of": 2.5}, r"multiple_of=2\.5"),
        ({"maximum": 4, "multiple_of": 8}, "maximum=4 is below multiple_of=8"),
    ],
)
def test_what_is_asked_is_checked(options, text):
    with pytest.raises(ConfigError, match=text):
        find_batch_size(print, **options)


@pytest.mark.slow
def test_all_ranks_agree_and_none_hangs(tmp_path):
    """One rank is out of memory, is killed, or has a mistake in its code, while the other waits for it."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(batch_size_jobs.__file__, str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert (first["out of memory"], first["killed"]) == (40, 8)
    assert first["wrong"].startswith("the trial of 1 rows failed, rank ")  # 0 too, if it sees 1 go first
    assert "rank 1: Traceback" in first["wrong"]
    assert "a mistake of the user's" in first["wrong"]
