"""Several nodes: one that dies, and the script for SLURM under a scheduler of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel import elastic_jobs
from parallel.training import build, chunks, loss_fn
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "examples" / "train_3d.sbatch"
STEPS, DIES_AFTER = 5, 2

pytestmark = pytest.mark.slow


def environment(**more):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **more,
    }


def in_one_process():
    """The losses of the same steps."""
    model, inputs = build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, target = elastic_jobs.batch_of(inputs, step)
        parts = zip(chunks((x,), elastic_jobs.COUNT), target.chunk(elastic_jobs.COUNT), strict=True)
        loss = sum(loss_fn(model(*part), goal) for part, goal in parts) / elastic_jobs.COUNT
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_training_goes_on_without_a_node(tmp_path):
    """Two nodes of a rank each; one is killed, agent and all: the other plans anew, with the same losses."""
    port = get_free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=test"),
        *(f"--rdzv-endpoint=localhost:{port}",),
    ]
    settings = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    script = [elastic_jobs.__file__, str(tmp_path), str(STEPS), str(DIES_AFTER)]
    nodes = [
        subprocess.Popen(
            [*command, f"--rdzv-conf={settings},is_host={is_host}", *script],
            env=environment(**more),
            stderr=subprocess.PIPE,
            text=True,
        )
        for is_host, more in ((1, {}), (0, {"THIS_NODE_DIES": "yes"}))
    ]
    try:
        _, said = nodes[0].communicate(timeout=280)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert nodes[0].returncode == 0, said[-4000:]
    assert nodes[1].returncode == -9
    found = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [one["step"] for one in found] == list(range(STEPS))
    assert [one["ranks"] for one in found] == [2] * DIES_AFTER + [1] * (STEPS - DIES_AFTER)
    torch.testing.assert_close([one["loss"] for one in found], in_one_process(), rtol=1e-5, atol=1e-6)


FAKE_SRUN = """#!/usr/bin/env bash
# As srun does: the command once on each node.
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
[ "$1 $2 $3" = "show hostnames nodes[1-2]" ] || exit 1
echo localhost; echo elsewhere
"""


def test_script_for_slurm(tmp_path):
    """`srun` starts an agent on each of two nodes, which meet on the first one, train and save."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "bin" / "torchrun").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    done = subprocess.run(
        ["bash", str(SBATCH), "--quick"],
        cwd=ROOT,
        env=environment(
            PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            SLURM_NNODES="2",
            SLURM_JOB_ID="7",
            SLURM_JOB_NODELIST="nodes[1-2]",
            RANKS_PER_NODE="1",
            PORT=str(get_free_port()),
            CHECKPOINTS=str(tmp_path / "run"),
        ),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "6/6" in done.stdout
    assert "pp=2" in done.stdout or "pp 2" in done.stdout, done.stdout
    assert list((tmp_path / "run").glob("step-*"))
