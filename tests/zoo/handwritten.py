"""Models written here: what those of transformers do not do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.entry import VOCAB, Inputs, image_inputs, register, text_inputs, token_ids, vector_inputs


class UNetBlock(nn.Module):
    """Two convolutions, each with a group norm."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Three levels with skip connections and transposed convolutions."""

    def __init__(self, channels: int = 16, classes: int = 4) -> None:
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.encoders = nn.ModuleList(
            UNetBlock(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(width, width // 2, 2, stride=2) for width in reversed(widths[1:])
        )
        self.decoders = nn.ModuleList(UNetBlock(width, width // 2) for width in reversed(widths[1:]))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, encoder in enumerate(self.encoders):
            x = encoder(x if level == 0 else self.pool(x))
            skips.append(x)
        x = skips.pop()
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


@register("unet", image_inputs(32), notes="skip connections, group norm, transposed convolutions")
def _unet() -> nn.Module:
    return UNet()


@register(
    "nn_transformer",
    lambda generator: (
        torch.randn(2, 9, 64, generator=generator),
        torch.randn(2, 7, 64, generator=generator),
    ),
    notes="nn.Transformer: fused in_proj attention, cross attention",
)
def _nn_transformer() -> nn.Module:
    return nn.Transformer(
        d_model=64,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=128,
        dropout=0.0,
        batch_first=True,
    )


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder` over token ids, with a padding mask and a mean-pooled head."""

    def __init__(self, width: int = 64, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, 32, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, dim_feedforward=2 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position[:, : ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=mask == 0)
        keep = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * keep).sum(1) / keep.sum(1))


def _masked_ids(generator: torch.Generator) -> Inputs:
    inputs = text_inputs(generator)
    assert isinstance(inputs, dict)
    return inputs["input_ids"], inputs["attention_mask"]


@register(
    "encoder_classifier",
    _masked_ids,
    notes="nn.TransformerEncoder: in eval without gradients a fused kernel reads the weights",
    warns=("The PyTorch API of nested tensors is in prototype",),
)
def _encoder_classifier() -> nn.Module:
    return EncoderClassifier()


class LSTMClassifier(nn.Module):
    """Embedding, a bidirectional LSTM, a hidden linear layer and a head."""

    def __init__(self, width: int = 48, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(2 * width, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        return self.head(torch.tanh(self.hidden(states.mean(dim=1))))


@register("lstm", lambda generator: (token_ids(generator),), notes="the recurrence itself is no linear layer")
def _lstm() -> nn.Module:
    model = LSTMClassifier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


class MixerBlock(nn.Module):
    """One MLP over the patches, one over the channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.tokens = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.norm2 = nn.LayerNorm(channels)
        self.channels = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x_BPC: Tensor) -> Tensor:
        # The token mixer sees a transposed, non-contiguous input.
        x_BPC = x_BPC + self.tokens(self.norm1(x_BPC).transpose(1, 2)).transpose(1, 2)
        return x_BPC + self.channels(self.norm2(x_BPC))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, size: int = 32, patch: int = 4, channels: int = 48, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock((size // patch) ** 2, channels) for _ in range(2)))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2))).mean(dim=1))


@register("mixer", image_inputs(32), notes="linear layers on transposed inputs")
def _mixer() -> nn.Module:
    return Mixer()


class EarlyExit(nn.Module):
    """Residual blocks, left as soon as the rows are sure of their class.

    How many blocks run depends on the values: the inputs of the entry run them all, a hundred times
    larger ones leave after the first. The second output is the number of blocks that ran.
    """

    def __init__(self, width: int = 64, depth: int = 3, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(32, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        ran = 0
        logits = self.head(h)
        for block in self.blocks:
            h = h + F.gelu(block(h))
            logits = self.head(h)
            ran += 1
            if logits.softmax(dim=-1).amax(dim=-1).mean() > 0.8:
                break
        return logits, torch.tensor(ran)


@register("early_exit", vector_inputs(4, 32), notes="control flow depends on values: no graph of it")
def _early_exit() -> nn.Module:
    return EarlyExit()


class TiedAutoencoder(nn.Module):
    """One module under two names and called three times, and two modules with one weight."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.encode = nn.Linear(64, width)
        self.mix = nn.Linear(width, width)
        self.unmix = self.mix
        self.gate_in = nn.Linear(width, width)
        self.gate_out = nn.Linear(width, width)
        self.gate_out.weight = self.gate_in.weight
        self.decode = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.encode(x))
        code = torch.tanh(self.mix(torch.tanh(self.mix(h)))) * torch.sigmoid(self.gate_in(h))
        h = torch.tanh(self.unmix(code)) * torch.sigmoid(self.gate_out(code))
        return self.decode(h), code


@register(
    "tied_autoencoder",
    vector_inputs(6, 64),
    notes="mix is unmix (one module, two names, three calls); gate_in and gate_out share a weight",
)
def _tied_autoencoder() -> nn.Module:
    return TiedAutoencoder()


class OddConvNet(nn.Module):
    """Convolutions with every option: groups, dilation, 'same', uneven kernels, padding modes."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding="same")
        self.even = nn.Conv2d(32, 32, 4, padding="same")  # pads more on one side
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.dilated = nn.Conv2d(64, 64, 3, padding=2, dilation=2, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.wide = nn.Conv2d(64, 48, (1, 5), padding="same", dilation=(1, 2), padding_mode="circular")
        self.depthwise = nn.Conv2d(48, 48, 5, padding=2, groups=48, padding_mode="reflect")
        self.point = nn.Conv2d(48, 32, 1, padding="valid")
        self.tall = nn.Conv2d(32, 32, (5, 1), stride=(2, 1), padding=(2, 0), groups=2)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.even(F.silu(self.stem(x))))
        x = F.silu(self.norm(self.dilated(F.silu(self.grouped(x)))))
        x = F.silu(self.depthwise(F.silu(self.wide(x))))
        x = F.silu(self.tall(F.silu(self.point(x))))
        return self.head(x.mean(dim=(2, 3)))


@register(
    "odd_convnet",
    image_inputs(24),
    notes="groups, dilation, 'same', even kernel, padding modes",
    warns=("Using padding='same' with even kernel lengths",),
)
def _odd_convnet() -> nn.Module:
    return OddConvNet()
