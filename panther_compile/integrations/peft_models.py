"""What PEFT's models of prompts, and of several kinds of adapters at once, do with sketched layers."""

from typing import Any

from peft.peft_model import PeftModel
from peft.tuners.mixed.model import MixedModel
from torch import nn

from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear_replacement import LinearReplacement


def _setup_prompt_encoder(self: Any, adapter_name: str) -> None:
    """PEFT's, given a sketched table of words: it looks for a parameter of as many rows, a factor."""
    base = self.base_model
    table = getattr(base, "get_input_embeddings", lambda: None)()
    if not isinstance(table, SketchedEmbedding):
        _setup_theirs(self, adapter_name)
        return
    usual = base.get_submodule
    base.get_submodule = lambda name: table if name == "embeddings.word_embeddings" else usual(name)
    try:
        _setup_theirs(self, adapter_name)
    finally:
        del base.get_submodule


def _replace_module(self: Any, parent: nn.Module, name: str, new: nn.Module, child: nn.Module) -> None:
    """PEFT's, which hands a layer that is put back its own weight; a sketched one has factors."""
    if isinstance(new, LinearReplacement):
        setattr(parent, name, new)
    else:
        _replace_theirs(self, parent, name, new, child)


_prompts: Any = PeftModel
_mixed: Any = MixedModel
_setup_theirs = _prompts._setup_prompt_encoder
_prompts._setup_prompt_encoder = _setup_prompt_encoder
_replace_theirs = _mixed._replace_module
_mixed._replace_module = _replace_module
