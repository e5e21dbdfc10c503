"""Trainings of earlier versions, gone on with; each function runs on every rank."""

import torch
from fixtures.saved_models import make_engine, take_step

from panther_compile import TrainingCheckpoints


def go_on(rank, *, folder, mesh, **options):
    """The model as loaded, and a step later."""
    engine = make_engine(mesh, **options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    resumed = TrainingCheckpoints(folder, keep=1).load(engine, optimizer)
    assert (resumed.step, resumed.extra) == (2, {"note": [2, "ä"]})
    state = {f"saved.{name}": one.clone() for name, one in engine.state_dict(full=True).items()}
    take_step(engine, optimizer, seed=99)
    return state | {f"next.{name}": one.clone() for name, one in engine.state_dict(full=True).items()}
