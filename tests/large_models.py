"""Models too large to be built: shapes on the meta device, for predictions; also used by benchmarks/."""

import torch
import transformers

TOKENS = 4096  # of a sequence


def llama_70b(layers=80):
    """The shape of Llama-70B in bfloat16, in train mode, and one sequence as its keywords."""
    config = transformers.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    return model, {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long, device="meta")}
