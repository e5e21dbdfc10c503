"""Time of a token and bytes of the cache: dense, sketched, and sketched with a LatentCache, by context.

    python benchmarks/latent_cache.py [--contexts 4096 16384]

Some layers of SmolLM2-135M's shape, random, their attention sketched with objective="cache". One sequence,
one thread of a CPU, processor time, the least of some steps. A prompt of 64 tokens is read, and what the
cache then holds is repeated up to the context: the numbers in it do not change what a step costs.
"""

import argparse
import time
import warnings

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import panther_compile as pc

PROMPT = 64


def main() -> None:
    """Fill caches, decode, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=options.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
        )
    ).eval()
    data = [torch.randint(3, 512, (1, 128)) for _ in range(20)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.SketchQualityWarning)
        small = pc.sketchify(dense, 0.5, data=data, objective="cache", include="*self_attn*", narrow=False)
    print("| ms a token, MB of the cache | " + " | ".join(f"{x:,} tokens" for x in options.contexts) + " |")
    print("|---|" + "--:|" * len(options.contexts))
    for name, model, latent in (
        ("dense", dense, False),
        ("sketch", small, False),
        ("sketch, `LatentCache`", small, True),
    ):
        cells = [measure(model, latent, context, options.steps) for context in options.contexts]
        print(
            f"| {name} | " + " | ".join(f"{1e3 * s:.1f}, {b / 1e6:.1f}" for s, b in cells) + " |", flush=True
        )


@torch.inference_mode()
def measure(model: LlamaForCausalLM, latent: bool, context: int, steps: int) -> tuple[float, int]:
    """Seconds of a step, and bytes of the cache."""
    cache = pc.LatentCache(model) if latent else DynamicCache(config=model.config)
    prompt = torch.randint(3, 512, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    holders = [getattr(layer, "inner", layer) for layer in cache.layers]
    holders += [group.kept for group in getattr(cache, "groups", ())]
    for one in holders:
        one.keys, one.values = (_repeated(part, context // PROMPT) for part in (one.keys, one.values))
    times = []
    for _ in range(steps):
        start = time.process_time()
        model(input_ids=prompt[:, -1:], past_key_values=cache, use_cache=True)
        times.append(time.process_time() - start)
    return min(times), sum(one.keys.nbytes + one.values.nbytes for one in holders)


def _repeated(part: Tensor, times: int) -> Tensor:
    """(B, H, S, D), S so many times as long."""
    return part.repeat(1, 1, times, 1)


if __name__ == "__main__":
    main()
