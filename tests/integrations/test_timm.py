"""Models of timm: sketched, checkpoints loaded by timm's own function, another classifier put on.

timm imports torchvision, and a torchvision that was built for CUDA cannot load its operators beside a torch
for the CPU. No test calls them: what describes them to torch is left out there.
"""

import copy
import sys
import types

import pytest
import torch

import panther_compile as pc

if torch.version.cuda is None:
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("left out"))
timm = pytest.importorskip("timm", reason="pip install timm torchvision", exc_type=ImportError)
pytestmark = pytest.mark.integrations

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True, "synthetic": False}
SMALL = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "resnet18": {},
    "convnext_atto": {"depths": (1, 1, 2, 1)},
}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(name, seed=0):
    torch.manual_seed(seed)
    return timm.create_model(name, num_classes=10, **SMALL[name]).eval()


@pytest.mark.parametrize("name", SMALL)
def test_a_checkpoint_of_a_sketch_is_loaded(name, tmp_path):
    small = pc.sketchify(build(name), 0.6, **OPTIONS)
    assert pc.sketch_report(small).achieved_ratio <= 0.6
    pc.save_sketched(small, tmp_path)
    for parameter in small.parameters():  # trained further, and kept as timm's training script does
        parameter.data.mul_(1.01)
    torch.save({"state_dict": small.state_dict()}, tmp_path / "last.pth")
    other = pc.load_sketched(build(name, seed=1), tmp_path)
    assert not torch.equal(other(IMAGES), small(IMAGES))
    timm.models.load_checkpoint(other, str(tmp_path / "last.pth"))
    assert torch.equal(other(IMAGES), small(IMAGES))
    assert torch.equal(other.forward_features(IMAGES), small.forward_features(IMAGES))


def test_a_dense_checkpoint_is_refused_by_name(tmp_path):
    model = build("vit_tiny_patch16_224")
    torch.save(model.state_dict(), tmp_path / "dense.pth")
    small = pc.sketchify(model, 0.6, **OPTIONS)
    with pytest.raises(pc.PantherError, match=r"project_state_dict"):
        timm.models.load_checkpoint(small, str(tmp_path / "dense.pth"))


@pytest.mark.parametrize("name", SMALL)
def test_another_classifier_is_trained(name):
    small = pc.sketchify(build(name), 0.6, **OPTIONS)
    before = copy.deepcopy(small)
    small.reset_classifier(3)
    assert small(IMAGES).shape == (2, 3)
    assert torch.equal(small.forward_features(IMAGES), before.forward_features(IMAGES))
    small(IMAGES).square().sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    small.reset_classifier(0)  # features alone
    assert small(IMAGES).shape == (2, small.num_features)
