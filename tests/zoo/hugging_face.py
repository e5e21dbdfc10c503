"""Models of transformers, from configurations."""

from __future__ import annotations

import torch
from torch import nn

from zoo.entry import (
    VOCAB,
    Inputs,
    pair_inputs,
    pixel_inputs,
    prompt_inputs,
    register,
    text_inputs,
    token_ids,
)

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


@register("bert", text_inputs, notes="masked LM, decoder weight tied to the word embedding")
def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_ENCODER, max_position_embeddings=64))


@register("roberta", text_inputs, notes="sequence classifier")
def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(**_ENCODER, max_position_embeddings=66, num_labels=5)
    return RobertaForSequenceClassification(config)


@register("distilbert", text_inputs, notes="sequence classifier; the feed-forward is run in chunks")
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


@register("gpt2", prompt_inputs, generate=True, notes="Conv1D (weight is in by out), tied LM head")
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


@register("llama", prompt_inputs, generate=True, notes="grouped queries, untied LM head, no biases")
def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER))


@register("mistral", prompt_inputs, generate=True, notes="grouped queries, sliding window, tied LM head")
def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_DECODER, sliding_window=8, tie_word_embeddings=True))


@register(
    "mixtral", prompt_inputs, generate=True, notes="mixture of experts, all experts in one 3-D parameter"
)
def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


@register("t5", pair_inputs, generate=True, notes="gated feed-forward, its wo.weight.dtype is read; tied")
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


@register("bart", pair_inputs, generate=True, notes="encoder-decoder, tied embeddings and LM head")
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
        "decoder_input_ids": token_ids(generator, length=6),
    }


@register(
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


@register(
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
    text, pixels = text_inputs(generator), pixel_inputs(32)(generator)
    assert isinstance(text, dict)
    assert isinstance(pixels, dict)
    return {**text, **pixels}


@register("clip", _image_and_text, notes="two towers, projections without bias, scalar parameter")
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


@register("vit", pixel_inputs(32), notes="image classifier, patch embedding is a convolution")
def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = {key: value for key, value in _ENCODER.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**config, image_size=32, patch_size=8, num_labels=5))


@register("swin", pixel_inputs(32), notes="shifted windows, patch merging")
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


@register("convnext", pixel_inputs(32), notes="depthwise 7x7, pointwise nn.Linear on channels-last")
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


@register("resnet", pixel_inputs(32), notes="bottlenecks, batch norm")
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


@register("mobilenet_v2", pixel_inputs(64), notes="depthwise and pointwise, padded as in TensorFlow")
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


@register("efficientnet", pixel_inputs(32), notes="squeeze and excite, ZeroPad2d before the strided")
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


@register("segformer", pixel_inputs(64), notes="semantic segmentation, strided reduction convolutions")
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
