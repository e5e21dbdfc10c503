"""A U-Net that takes noise off patches of photographs; judged on a part of them it has not seen."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from accuracy_models.digits import load_images
from accuracy_models.photos import patches
from accuracy_models.subject import Subject

SIZE, NOISE, BATCH, STEPS, RATE = 32, 0.15, 16, 500, 2e-3
CALIBRATION_PATCHES, EVALUATION_PATCHES, HEAL_STEPS = 64, 128, 200


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Two levels down and up with skips; predicts the noise; 0.37 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _double(3, 24), _double(24, 48), _double(48, 96)
        self.up2, self.up1 = _double(96 + 48, 48), _double(48 + 24, 24)
        self.head = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        """(B, 3, H, W) -> the same without noise."""
        first = self.down1(noisy)
        second = self.down2(F.avg_pool2d(first, 2))
        lowest = self.middle(F.avg_pool2d(second, 2))
        second = self.up2(torch.cat([F.interpolate(lowest, scale_factor=2.0), second], 1))
        first = self.up1(torch.cat([F.interpolate(second, scale_factor=2.0), first], 1))
        return noisy - self.head(first)


def add_noise(clean: Tensor, seed: int) -> Tensor:
    """Gaussian noise."""
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))


def train() -> UNet:
    """Train from scratch with AdamW and a one-cycle rate."""
    torch.manual_seed(0)
    model = UNet().train()
    clean = patches(SIZE, 4000, held_out=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in tqdm(range(STEPS), desc="train U-Net"):
        wanted = clean[torch.randint(0, len(clean), (BATCH,))]
        loss = F.mse_loss(model(add_noise(wanted, step)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.inference_mode()
def psnr(model: nn.Module, noisy: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    errors = [F.mse_loss(model(a), b) for a, b in zip(noisy.split(32), clean.split(32), strict=True)]
    return float(-10 * torch.stack(errors).mean().log10())


def unet(cache: Path, quick: bool) -> Subject:
    """The denoiser."""
    path = cache / "unet.pt"
    if not path.exists():
        state = train().state_dict()
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    model = UNet()
    model.load_state_dict(torch.load(path))
    clean = patches(SIZE, EVALUATION_PATCHES, held_out=True, seed=1)
    noisy = add_noise(clean, 1)
    count = CALIBRATION_PATCHES // 4 if quick else CALIBRATION_PATCHES

    def calibration(domain: str, seed: int) -> list[Tensor]:
        if domain == "in":
            found = patches(SIZE, count, held_out=False, seed=100 + seed)
        else:
            digits = load_images()[0][seed * count : (seed + 1) * count]
            found = F.interpolate(digits, SIZE, mode="bilinear").expand(-1, 3, -1, -1)
        return list(add_noise(found, 100 + seed).split(16))

    return Subject(
        title="U-Net denoiser on patches of photographs, PSNR in dB on held-out parts of them",
        model=model.eval(),
        blocks=(),
        calibration=calibration,
        in_domain=f"{count} noisy patches of the training part",
        off_domain=f"{count} noisy digits",
        healing=calibration,
        healed_on="the same",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=lambda small: {"PSNR": psnr(small, noisy, clean)},
        metrics={"PSNR": True},
        outputs="values",
        options={"allow_slower": True},
    )
