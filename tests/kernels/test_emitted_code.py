"""What no interpreter shows, read from the code that Triton emits for compute capability 9.0."""

import re
from pathlib import Path

import emitted
import pytest
from compiling import compile_all

FEATURES, CHUNKS = 64, 5


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """The text of both scans: causal with 64 and 16 columns, and not causal."""
    folder = tmp_path_factory.mktemp("ptx")
    records = compile_all("--arch", "90", "--dtypes", "fp32", "--modules", "scans", "--ptx", str(folder))
    assert [one for one in records if "error" in one] == []
    return [(one["kernel"], Path(one["ptx"]).read_text()) for one in records]


def scan_params(text, columns):
    """A value for each parameter of a scan, in the order of its signature."""
    kinds = re.findall(r"\.param \.(u64 \.ptr|u32|u64)", text)
    numbers = iter((CHUNKS, columns, FEATURES))
    return [1 << 20 + 4 * place if "ptr" in kind else next(numbers) for place, kind in enumerate(kinds)]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_favor_scan_kernel", "_favor_reverse_scan_kernel"])
def test_a_scan_in_place_has_no_race(scans, kernel):
    texts = [text for name, text in scans if name == kernel]
    assert len(texts) == 3
    for columns, text in zip((64, 16, 64), texts, strict=True):
        params = scan_params(text, columns)
        assert emitted.races(text, params, block=(0, 1, 0)) == set()
        # Without its barrier it has one, and this test sees it.
        assert emitted.races(re.sub(r"\n\s*bar\.sync[^;]*;", "", text), params, block=(0, 1, 0))
