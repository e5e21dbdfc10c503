"""A zoo of small models with random weights, one for each way a model can be built.

Nothing is downloaded: every model comes from a configuration. An entry is deterministic by its
name, and its initialisation is livelier than usual: no bias is zero, no norm is trivial, no signal
dies on its way. A layer that loses its bias shows.

Every dropout, stochastic depth and masking rate is zero, so train mode is deterministic too (batch
norms still update their statistics there).
"""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

Inputs = dict[str, Tensor] | tuple[Tensor, ...]

VOCAB = 128
NEW_TOKENS = 4


# ------------------------------------------------------------------------------------------ helpers


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Run the model on the inputs of its entry."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensors(output: Any) -> list[Tensor]:
    """Every floating tensor of an output, depth first, in the output's own order.

    Mappings (a `ModelOutput` is one), sequences and dataclasses are walked; caches and other
    objects are not.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        children = list(output.values())
    elif isinstance(output, (list, tuple)):
        children = list(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        children = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        children = []
    return [tensor for child in children for tensor in tensors(child)]


def scalar(output: Any) -> Tensor:
    """A loss for any output: mean squared distances of its tensors to a fixed wave, summed.

    Not the plain mean square: that is constant for the output of a layer norm, so nothing would
    learn.
    """
    found = tensors(output)
    if not found:
        raise ValueError(f"no floating tensor in an output of type {type(output).__name__}")
    terms = []
    for tensor in found:
        flat = tensor.reshape(-1)
        wave = torch.cos(1.7 * torch.arange(flat.numel(), device=flat.device, dtype=torch.float32))
        terms.append((flat - wave.to(flat.dtype)).square().mean())
    return torch.stack([term.to(terms[0].device, terms[0].dtype) for term in terms]).sum()


def generate(model: nn.Module, entry: ZooModel) -> Tensor:
    """Greedy tokens from a model of an entry that has `generate`."""
    if entry.generate is None:
        raise ValueError(f"{entry.name} does not generate")
    inputs = entry.inputs()
    assert isinstance(inputs, dict)
    prompt = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    return model.generate(**prompt, **entry.generate)  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One model: how to build it (in eval mode), what to feed it, how to train and to sample it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = scalar
    generate: dict[str, Any] | None = None
    notes: str = ""
    # Parameters that the plain forward cannot reach (by prefix), so that have no gradient.
    no_grad: tuple[str, ...] = ()
    # What the plain forward is known to warn of (regular expressions).
    warns: tuple[str, ...] = ()


ZOO: dict[str, ZooModel] = {}


def names() -> list[str]:
    """The names of all models, in the order of registration."""
    return list(ZOO)


def generating() -> list[str]:
    """The names of the models that have `generate`."""
    return [name for name, entry in ZOO.items() if entry.generate is not None]


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())


def _enliven(model: nn.Module, inputs: Inputs) -> None:
    """Make every layer matter: no zero bias, no unit norm, no signal that dies on its way.

    Convolutions keep the variance of their input, and batch norms get the statistics of `inputs`.
    With the usual small weights the output of a deep convnet is its biases, and no error in a layer
    would show.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d)) and not is_parametrized(module):
                fan_in = module.weight[0].numel()
                module.weight.normal_(std=(2 / fan_in) ** 0.5)
        for norm in norms:
            norm.weight.fill_(1.0)
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if norms:
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = 1.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(model.train(), inputs)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def _register(
    name: str,
    inputs: Callable[[torch.Generator], Inputs],
    *,
    generate: bool = False,
    notes: str = "",
    no_grad: tuple[str, ...] = (),
    warns: tuple[str, ...] = (),
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def decorate(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def draw() -> Inputs:
            return inputs(torch.Generator().manual_seed(_seed(name + "/inputs")))

        def build() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(name))
                model = make()
                _enliven(model, draw())
            return model.eval()

        ZOO[name] = ZooModel(
            name=name,
            build=build,
            inputs=draw,
            generate=dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
            if generate
            else None,
            notes=notes,
            no_grad=no_grad,
            warns=warns,
        )
        return make

    return decorate


def _ids(generator: torch.Generator, batch: int = 2, length: int = 10) -> Tensor:
    return torch.randint(4, VOCAB, (batch, length), generator=generator)


def _text(generator: torch.Generator) -> Inputs:
    """Token ids and a mask; the second row is padded on the right by three."""
    ids = _ids(generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _prompt(generator: torch.Generator) -> Inputs:
    """Token ids and a full mask, for the decoders."""
    ids = _ids(generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_pair(generator: torch.Generator) -> Inputs:
    inputs = _text(generator)
    assert isinstance(inputs, dict)
    return {**inputs, "decoder_input_ids": _ids(generator, length=6)}


def _pixels(size: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def _images(size: int, channels: int = 3) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randn(2, channels, size, size, generator=generator),)


def _vectors(*shape: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randn(*shape, generator=generator),)


# ------------------------------------------------------------------------------- text, transformers

_ENCODER = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.15,
)

_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_dropout=0.0,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@_register("bert", _text, notes="masked LM, decoder weight tied to the word embedding")
def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_ENCODER, max_position_embeddings=64))


@_register("roberta", _text, notes="sequence classifier")
def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(**_ENCODER, max_position_embeddings=66, num_labels=5)
    return RobertaForSequenceClassification(config)


@_register("distilbert", _text, notes="sequence classifier; the feed-forward is run in chunks")
def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=VOCAB,
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return DistilBertForSequenceClassification(config)


@_register("gpt2", _prompt, generate=True, notes="Conv1D (weight is in by out), tied LM head")
def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


@_register("llama", _prompt, generate=True, notes="grouped queries, untied LM head, no biases")
def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER))


@_register("mistral", _prompt, generate=True, notes="grouped queries, sliding window, tied LM head")
def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_DECODER, sliding_window=8, tie_word_embeddings=True))


@_register("mixtral", _prompt, generate=True, notes="mixture of experts, all experts in one 3-D parameter")
def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


@_register("t5", _text_pair, generate=True, notes="gated feed-forward, its wo.weight.dtype is read; tied")
def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


@_register("bart", _text_pair, generate=True, notes="encoder-decoder, tied embeddings and LM head")
def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        classifier_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        init_std=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config)


# ------------------------------------------------------------------------------ audio, transformers


def _speech(generator: torch.Generator) -> Inputs:
    return {
        "input_features": torch.randn(2, 16, 60, generator=generator),
        "decoder_input_ids": _ids(generator, length=6),
    }


@_register(
    "whisper",
    _speech,
    generate=True,
    notes="Conv1d stem, k_proj without bias, tied proj_out",
    no_grad=("model.encoder.embed_positions",),
)
def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=30,
        max_target_positions=32,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        init_std=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


def _waveform(generator: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(2, 400, generator=generator)}


@_register(
    "wav2vec2",
    _waveform,
    notes="CTC; Conv1d features, weight-normed positional convolution",
    no_grad=("wav2vec2.masked_spec_embed",),
)
def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(32, 32),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        feat_extract_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
        initializer_range=0.15,
    )
    return Wav2Vec2ForCTC(config)


# ----------------------------------------------------------------------------- vision, transformers


def _image_and_text(generator: torch.Generator) -> Inputs:
    text, pixels = _text(generator), _pixels(32)(generator)
    assert isinstance(text, dict)
    assert isinstance(pixels, dict)
    return {**text, **pixels}


@_register("clip", _image_and_text, notes="two towers, projections without bias, scalar parameter")
def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.0,
        initializer_range=0.5,
        initializer_factor=2.0,
    )
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = CLIPConfig(
        text_config=dict(**tower, **special, vocab_size=VOCAB, max_position_embeddings=32),
        vision_config=dict(**tower, image_size=32, patch_size=8),
        projection_dim=48,
    )
    return CLIPModel(config)


@_register("vit", _pixels(32), notes="image classifier, patch embedding is a convolution")
def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = {key: value for key, value in _ENCODER.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**config, image_size=32, patch_size=8, num_labels=5))


@_register("swin", _pixels(32), notes="shifted windows, patch merging")
def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        mlp_ratio=2.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return SwinForImageClassification(config)


@_register("convnext", _pixels(32), notes="depthwise 7x7, pointwise nn.Linear on channels-last")
def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        num_stages=2,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        patch_size=2,
        layer_scale_init_value=1.0,
        drop_path_rate=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return ConvNextForImageClassification(config)


@_register("resnet", _pixels(32), notes="bottlenecks, batch norm")
def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128],
        depths=[2, 2],
        layer_type="bottleneck",
        num_labels=5,
    )
    return ResNetForImageClassification(config)


@_register("mobilenet_v2", _pixels(64), notes="depthwise and pointwise, padded as in TensorFlow")
def _mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        image_size=64,
        depth_multiplier=0.35,
        classifier_dropout_prob=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return MobileNetV2ForImageClassification(config)


@_register("efficientnet", _pixels(32), notes="squeeze and excite, ZeroPad2d before the strided")
def _efficientnet() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=0.5,
        depth_coefficient=1.0,
        kernel_sizes=[3, 5],
        in_channels=[32, 64],
        out_channels=[64, 96],
        depthwise_padding=[],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 4],
        hidden_dim=640,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return EfficientNetForImageClassification(config)


@_register("segformer", _pixels(64), notes="semantic segmentation, strided reduction convolutions")
def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[32, 64],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        initializer_range=0.15,
        num_labels=5,
    )
    return SegformerForSemanticSegmentation(config)


# ------------------------------------------------------------------------------------- hand-written


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


@_register("unet", _images(32), notes="skip connections, group norm, transposed convolutions")
def _unet() -> nn.Module:
    return UNet()


@_register(
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
    inputs = _text(generator)
    assert isinstance(inputs, dict)
    return inputs["input_ids"], inputs["attention_mask"]


@_register(
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


@_register("lstm", lambda generator: (_ids(generator),), notes="the recurrence itself is no linear layer")
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


@_register("mixer", _images(32), notes="linear layers on transposed inputs")
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


@_register("early_exit", _vectors(4, 32), notes="control flow depends on values: no graph of it")
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


@_register(
    "tied_autoencoder",
    _vectors(6, 64),
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


@_register(
    "odd_convnet",
    _images(24),
    notes="groups, dilation, 'same', even kernel, padding modes",
    warns=("Using padding='same' with even kernel lengths",),
)
def _odd_convnet() -> nn.Module:
    return OddConvNet()
