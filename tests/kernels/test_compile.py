"""Every configuration that may serve a call compiles for a GPU that is not there, and fits it."""

import pytest
from compiling import compile_all

# The kernels of a module that multiply matrices, on tensor cores in half types and TF32.
PRODUCTS = {
    "_sketched_linear_fwd_kernel",
    "_epilogue_grad_kernel",
    "_latent_grad_kernel",
    "_input_grad_kernel",
    "_weight_grad_kernel",
    "_sketched_conv2d_fwd_kernel",
    "_favor_state_kernel",
    "_favor_output_kernel",
    "_favor_query_grad_kernel",
    "_favor_key_grad_kernel",
}
SCANS = {"_favor_scan_kernel", "_favor_reverse_scan_kernel"}
MOST_SPILLED = 64  # bytes of a thread


def judge(records):
    """Hold records of the script to what is wanted; returns the kernels."""
    assert [one for one in records if "error" in one] == []
    for one in records:
        assert one["stack"] <= MOST_SPILLED, one
        # The scans update in place, and are checked for races one by one: test_emitted_code.py.
        assert bool(one["in_place"]) == (one["kernel"] in SCANS), one
        if one["kernel"] in PRODUCTS:
            assert (one["tensor_core"] > 0) == (one["dtype"] != "fp32"), one
    return {one["kernel"] for one in records}


@pytest.mark.slow
def test_the_usual_configurations():
    """The fused kernel at its largest rank, and one row: no spills, asynchronous copies, tensor cores.

    One of each is compiled, whatever the number of rows.
    """
    modules = ("sketched_linear", "decode_linear")
    records = compile_all("--arch", "90", "--dtypes", "bf16", "--first", "--quick", "--modules", *modules)
    assert len(judge(records)) == len(records) == 4
    assert all(one["copies"] > 0 for one in records if one["kernel"] != "_decode_sum_kernel")  # has no loop


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
def test_every_configuration(dtype):
    assert len(judge(compile_all("--arch", "90", "--dtypes", dtype))) == 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_older_device():
    """Compute capability 8.0 has less shared memory; its registers were not looked at."""
    records = compile_all("--arch", "80", "--dtypes", "bf16", "--first")
    assert [one for one in records if "error" in one] == []
