"""What trials on held-out batches decide, and what they leave as it is."""

import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration.trials import pick


def test_what_is_closer_on_every_batch_is_taken():
    assert pick({"plain": [1.0, 2.0, 3.0], "other": [0.9, 1.9, 2.9]}, "plain") == ("other", "")


def test_the_plain_choice_needs_no_reason():
    assert pick({"plain": [1.0, 2.0], "other": [1.1, 2.1]}, "plain") == ("plain", "")


def test_within_noise_the_plain_choice_is_kept_and_said():
    name, why = pick({"plain": [1.0, 1.0, 1.0, 1.0], "other": [0.5, 1.4, 0.6, 1.4]}, "plain")
    assert name == "plain"
    assert why == "other is 0.025 closer, within noise (0.25): plain is kept"


def test_what_is_closer_by_chance_does_not_hide_what_is_closer_indeed():
    plain, lucky, closer = [1.0, 1.0, 1.0, 1.0], [0.1, 1.4, 0.5, 1.4], [0.9, 0.85, 0.9, 0.9]
    name, why = pick({"plain": plain, "lucky": lucky, "closer": closer}, "plain")
    assert name == "closer"
    assert why == "lucky is 0.15 closer, within noise (0.33): closer is taken"


def test_of_one_batch_two_per_cent_tell_nothing():
    assert pick({"plain": [1.0], "other": [0.99]}, "plain")[0] == "plain"
    assert pick({"plain": [1.0], "other": [0.9]}, "plain") == ("other", "")


def test_the_report_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("panther_compile.calibration.trials.NOISE", 1e9)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10))
    data = [torch.randn(64, 64) * torch.linspace(0.1, 3, 64) for _ in range(12)]
    small = pc.sketchify(model, 0.4, data=data, allow_slower=True, min_params=256, narrow=False)
    report = pc.sketch_report(small)
    assert report.allocation == "uniform"
    assert min(report.tried, key=report.tried.get) == "uniform" or "uniform is kept" in str(report)
    pc.save_sketched(small, tmp_path)
    assert pc.sketch_report(pc.load_sketched(model, tmp_path)) == report
