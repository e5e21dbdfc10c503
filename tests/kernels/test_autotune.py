"""Which block sizes a kernel runs with: those of the table, or the fastest where timing is asked for."""

import threading
import time

import pytest
import torch
import triton

from panther_compile.kernels import autotune, sketched_linear
from panther_compile.kernels.factor_set import Factors

KERNEL = sketched_linear._sketched_linear_fwd_kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def line(rows, *serves, **options):
    return autotune.Blocks({"BLOCK_M": rows, "BLOCK_K": 32, "BLOCK_O": 16}, 1, 1, *serves, **options)


def run(rows, inputs=40):
    """One layer by the fused kernel, held to plain torch."""
    x, down, up = (torch.randn(*size, device=DEVICE) for size in ((rows, inputs), (8, inputs), (24, 8)))
    (y,), _ = sketched_linear.sketched_linear_forward(x, [Factors(down, up, None, None)])
    torch.testing.assert_close(y, x @ down.t() @ up.t(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def timed(monkeypatch):
    """Lines of the kernel; the second is the faster; returns the calls that were timed."""
    lines, calls = [line(16), line(32)], []

    def do_bench(call, quantiles):
        call()
        calls.append(threading.get_ident())
        time.sleep(0.01)  # another thread may come in
        return [1.0 / len(calls)] * 3

    monkeypatch.setattr(KERNEL, "configs", lines)
    monkeypatch.setattr(KERNEL, "do_bench", do_bench)
    monkeypatch.setattr(KERNEL, "best", {})
    return calls


def test_nothing_is_timed_unless_asked_for(timed):
    run(40)
    assert timed == []


def test_each_size_is_timed_once(timed, monkeypatch):
    monkeypatch.setenv("PANTHER_COMPILE_TUNE", "1")
    run(40)
    assert len(timed) == 2
    (best,) = KERNEL.best.values()
    assert best["BLOCK_M"] == 32
    run(41)  # as many bits
    assert len(timed) == 2
    run(40, inputs=50)
    assert len(timed) == 4


def test_nothing_is_timed_while_a_graph_is_captured(timed, monkeypatch):
    monkeypatch.setenv("PANTHER_COMPILE_TUNE", "1")
    monkeypatch.setattr(autotune, "is_capturing", lambda: True)
    run(40)
    assert timed == []


@triton.jit
def _named():
    """What Triton names the times by that it keeps on disk."""


class Slow:
    """A kernel that can run in several threads, which Triton's interpreter cannot."""

    arg_names = ("x", "rows", "BLOCK_M", "BLOCK_K", "BLOCK_O")

    def __init__(self):
        self.fn = _named
        self.ran = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.run(*args, **constants)

    def run(self, x, rows, *, BLOCK_M, **rest):
        time.sleep(rows / 5000)  # another thread comes in
        self.ran.append((threading.get_ident(), rows, BLOCK_M))


def test_threads_that_time_at_once(monkeypatch, tmp_path):
    """Triton's tuner keeps the arguments of the call that it times in itself."""
    monkeypatch.setenv("PANTHER_COMPILE_TUNE", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    slow, failed = Slow(), []
    kernel = autotune.Tuned(slow, "sketched_linear", key=["rows"])
    kernel.configs = [line(16), line(32)]

    def do_bench(call, quantiles):
        call()
        (*_, mine) = (block for thread, _, block in slow.ran if thread == threading.get_ident())
        return [1.0 / mine] * 3

    kernel.do_bench = do_bench

    def work(rows):
        try:
            kernel.launch((1,), autotune.Call("ieee"), torch.zeros(1), rows)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (3, 20, 70, 140)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    assert {key[0]: one["BLOCK_M"] for key, one in kernel.best.items()} == dict.fromkeys((3, 20, 70, 140), 32)


def test_the_first_line_that_serves():
    def chosen(kernel, *call, limit=227 * 1024):
        return next(one for one in autotune._TABLE[kernel] if one.serves(autotune.Call(*call), limit))

    assert chosen("sketched_linear", "half", 128, 1 << 20).sizes["BLOCK_M"] == 128
    assert chosen("sketched_linear", "half", 128, 1000).sizes["BLOCK_M"] == 64
    few = chosen("sketched_linear", "half", 256, 1 << 20, limit=99 * 1024)
    assert few.shared(few, 256, 2) <= 99 * 1024
    assert chosen("sketched_linear", "ieee", 128, 1 << 20).kinds == ("ieee",)
    assert (
        chosen("decode_output", "half", 1, 4096).sizes["BLOCK_N"]
        < chosen("decode_output", "half", 1, 1 << 16).sizes["BLOCK_N"]
    )


@pytest.mark.parametrize(("itemsize", "kinds"), [(2, ["half"]), (4, ["tf32", "ieee"])])
def test_every_rank_that_dispatch_takes_has_a_line(itemsize, kinds):
    from panther_compile.kernels import dispatch

    for kind in kinds:
        widest = {
            "sketched_linear": dispatch.MAX_FUSED_RANK[itemsize],
            "sketched_conv2d": dispatch.MAX_CONV2D_RANK,
        }
        for kernel, rank in widest.items():
            call = autotune.Call(kind, rank, 1)
            assert any(one.serves(call, 227 * 1024) for one in autotune._TABLE[kernel])


def test_chunks_fill_the_device(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    many, few = 32 * 2048, 12 * 512
    assert autotune.chunk_length("half", many, backward=False) == 128
    assert autotune.chunk_length("tf32", many, backward=False) == 128
    assert autotune.chunk_length("half", few, backward=False) == 64
    assert autotune.chunk_length("ieee", many, backward=False) == 32
    assert autotune.chunk_length("half", many, backward=True) == 32


@pytest.mark.gpu
def test_a_graph_is_captured_without_a_call_before(monkeypatch):
    """An untuned size under capture: nothing synchronises, and the replay gives the right numbers."""
    monkeypatch.setenv("PANTHER_COMPILE_TUNE", "1")
    x, down, up = (torch.randn(*size, device="cuda").half() for size in ((512, 256), (32, 256), (256, 32)))
    layers = [Factors(down, up, None, None)]
    sketched_linear.sketched_linear_forward(x[:100], layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,), _ = sketched_linear.sketched_linear_forward(x, layers)
    graph.replay()
    torch.testing.assert_close(y, x @ down.t() @ up.t(), rtol=1e-2, atol=1e-2)
