"""Train a small CNN on scikit-learn's handwritten digits, sketch it, and fine-tune the sketch.

python examples/digits_cnn.py [--quick]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import panther_compile as pc


def make_cnn() -> nn.Module:
    """Four convolutions with BatchNorm on 8 x 8 images."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32, 1),
        *block(32, 64, 1),
        *block(64, 64, 2),
        *block(64, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Plain training with Adam."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images classified right."""
    return float((model(images).argmax(-1) == labels).double().mean())


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    epochs = 3 if parser.parse_args().quick else 15
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.3, random_state=0)

    dense, data = make_cnn(), train_x[:512].split(64)
    train(dense, train_x, train_y, epochs, 2e-3)
    print(f"dense: accuracy {accuracy(dense, test_x, test_y):.4f}")
    for ratio in (0.75, 0.5, 0.25):
        # Layers of this size gain no speed from a sketch; here they are sketched for the numbers alone.
        small = pc.sketchify(dense, ratio, data=data, allow_slower=True)
        before = accuracy(small, test_x, test_y)
        train(small, train_x, train_y, max(1, epochs // 5), 5e-4)
        after = accuracy(small, test_x, test_y)
        achieved = pc.sketch_report(small).achieved_ratio
        print(f"ratio {achieved:.3f}: accuracy {before:.4f} as sketched, {after:.4f} after fine-tuning")
    print(f"The last of them, as it was sketched:\n{pc.sketch_report(small)}")


if __name__ == "__main__":
    main()
