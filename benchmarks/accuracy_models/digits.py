"""A residual CNN with BatchNorm and a vision transformer, trained on scikit-learn's digits.

The 8 x 8 images are scaled to 16 x 16; a third is held out; training images are rotated, scaled and shifted.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from accuracy_models.photos import grey_patches
from accuracy_models.subject import Subject, classify

SIZE, CLASSES, BATCH = 16, 10, 64
CALIBRATION_IMAGES, HEAL_STEPS = 256, 200


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, added to their input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        inner = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """0.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(
            Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 128, 1)
        )
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of (B, 1, 16, 16) images."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ViT(nn.Module):
    """Four pre-norm `nn.TransformerEncoderLayer` on 4 x 4 patches; 0.45 M parameters."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of (B, 1, 16, 16) images."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(1))


def load_images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 16, 16) in [0, 1] and labels to train on, then those held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, SIZE, mode="bilinear", antialias=True)
    found = train_test_split(images, torch.tensor(digits.target), test_size=1 / 3, random_state=0)
    return found[0], found[2], found[1], found[3]


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate by up to 15 degrees, scale by up to 15 %, shift by up to 1.5 pixels."""
    angle, scale, right, down = (2 * torch.rand(4, len(images), generator=generator) - 1).unbind()
    angle, scale = angle * math.radians(15), 1 + 0.15 * scale
    cos, sin = angle.cos() * scale, angle.sin() * scale
    shift = 3 / SIZE
    grid_rows = [torch.stack([cos, -sin, shift * right], -1), torch.stack([sin, cos, shift * down], -1)]
    grid = F.affine_grid(torch.stack(grid_rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(make: Callable[[], nn.Module], epochs: int, rate: float) -> nn.Module:
    """Train from scratch with AdamW and a one-cycle rate."""
    torch.manual_seed(0)
    images, labels, _, _ = load_images()
    model = make().train()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * math.ceil(len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in tqdm(range(epochs), desc=f"train {model.__class__.__name__}"):
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            loss = F.cross_entropy(
                model(augment(images[batch], generator)), labels[batch], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def load(path: Path, make: Callable[[], nn.Module], epochs: int, rate: float) -> nn.Module:
    """The trained model from the cache; trained on the first call."""
    if not path.exists():
        state = train(make, epochs, rate).state_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    model = make()
    model.load_state_dict(torch.load(path))
    return model.eval()


def _subject(title: str, model: nn.Module, blocks: tuple[str, ...], quick: bool) -> Subject:
    images, _, held_out, labels = load_images()
    reference = classify(model, held_out)
    count = CALIBRATION_IMAGES // 4 if quick else CALIBRATION_IMAGES

    def calibration(domain: str, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + seed)
        pool = images if domain == "in" else grey_patches(SIZE, 2000)
        return list(pool[torch.randperm(len(pool), generator=generator)[:count]].split(BATCH))

    def evaluate(small: nn.Module) -> dict[str, float]:
        found = classify(small, held_out)
        return {
            "accuracy": float((found.argmax(-1) == labels).double().mean()),
            "KL": float(F.kl_div(found, reference, log_target=True, reduction="batchmean")),
        }

    return Subject(
        title=title,
        model=model,
        blocks=blocks,
        calibration=calibration,
        in_domain=f"{count} training images",
        off_domain=f"{count} grey patches of two photographs",
        healing=calibration,
        healed_on="the same",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=evaluate,
        metrics={"accuracy": True, "KL": False},
        outputs="classes",
        options={"allow_slower": True},
        remark=(
            f"One of the {len(labels)} held-out images is {1 / len(labels):.4f}: a model that differs from "
            "the dense one can be right where that is wrong, by chance; the KL tells which is closer to it."
        ),
    )


def resnet(cache: Path, quick: bool) -> Subject:
    """The CNN."""
    model = load(cache / "resnet.pt", ResNet, 15, 3e-3)
    title = "Residual CNN with BatchNorm on digits, share of held-out images classified right"
    return _subject(title, model, tuple(f"blocks.{i}" for i in range(4)), quick)


def vit(cache: Path, quick: bool) -> Subject:
    """The vision transformer."""
    model = load(cache / "vit.pt", ViT, 60, 2e-3)
    title = (
        "Vision transformer (`nn.TransformerEncoder`) on digits, share of held-out images classified right"
    )
    return _subject(title, model, tuple(f"encoder.layers.{i}" for i in range(4)), quick)
