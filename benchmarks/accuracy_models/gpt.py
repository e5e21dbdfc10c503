"""A small GPT, trained here on prose and code that ship with Python.

Four pre-norm blocks of width 192 with learned positions and a tied head over bytes: 1.9 M parameters, 1.8 M
of them in the 24 linear layers that are compressed. Trained on documentation and docstrings, and on a
third of source code; judged on held-out documentation. Bytes, because a model that sees a few million tokens
has not learnt more of a large vocabulary than how often each entry occurs, which any rank keeps.
"""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from accuracy_models.subject import Subject
from accuracy_models.texts import code, prose

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 257, 128, 192, 6, 4
BATCH, STEPS, WARM_UP, RATE, MUON_RATE = 32, 600, 30, 4e-3, 0.02
CODE_SHARE = 1 / 3
HELD_OUT = 10  # one document in ten
CALIBRATION_SEQUENCES, EVALUATION_SEQUENCES = 256, 256
HEAL_SEQUENCES, HEAL_STEPS = 1024, 600


class Attention(nn.Module):
    """Causal attention with a linear layer for each of its four projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend to what came before."""
        batch, length, _ = x_BTD.shape
        heads = [
            layer(x_BTD).view(batch, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a feed-forward part, each normalised first and added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.5 / math.sqrt(WIDTH * (2 * BLOCKS if last else 1)))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the next token at each place."""
        x_BTD = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` entries, the first of them the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend([*encoding.ids, 0])
    return torch.tensor(ids)


def _rows(stream: Tensor) -> Tensor:
    """(N, CONTEXT + 1) pieces one after the other."""
    count = (len(stream) - 1) // CONTEXT
    return stream[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)


def prepare() -> dict[str, Tensor]:
    """Token streams "prose" and "code" to train on, and (N, CONTEXT + 1) pieces that are "held out"."""
    documents = {"prose": prose(), "code": code()}
    training = {kind: [t for i, t in enumerate(texts) if i % HELD_OUT] for kind, texts in documents.items()}
    tokenizer = make_tokenizer(training["prose"] + training["code"][: len(training["code"]) // 4])
    found = {kind: _stream(tokenizer, texts) for kind, texts in training.items()}
    held_out = _rows(_stream(tokenizer, documents["prose"][::HELD_OUT]))
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
    return found | {"held out": held_out[order[:EVALUATION_SEQUENCES]]}


def _draw(stream: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(stream) - CONTEXT, (count, 1), generator=generator)
    return stream[starts + torch.arange(CONTEXT + 1)]


def train(texts: dict[str, Tensor], steps: int = STEPS) -> GPT:
    """Train from scratch with Muon and, outside the blocks, AdamW, the rates falling linearly."""
    torch.manual_seed(0)
    model = GPT()
    generator = torch.Generator().manual_seed(1)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not one for one in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    with tqdm(range(steps), desc="train gpt") as bar:
        for step in bar:
            for group, rate in groups:
                group["lr"] = rate * min((step + 1) / WARM_UP, 1 - step / steps)
            kind = "code" if torch.rand((), generator=generator) < CODE_SHARE else "prose"
            batch = _draw(texts[kind], BATCH, generator)
            loss = next_token_loss(model(batch[:, :-1]), batch)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            if step % 20 == 0:
                bar.set_postfix(kind=kind, loss=f"{loss.item():.3f}")
    return model.eval()


def next_token_loss(logits_BTV: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats; ids are (B, T + 1)."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten())


@torch.inference_mode()
def perplexity(model: nn.Module, held_out: Tensor) -> float:
    """Perplexity of held-out documentation, per token."""
    losses = [next_token_loss(model(batch[:, :-1]), batch) * len(batch) for batch in held_out.split(32)]
    return math.exp(float(sum(losses)) / len(held_out))


def calibration(texts: dict[str, Tensor], domain: str, seed: int, count: int) -> list[Tensor]:
    """Batches (32, CONTEXT) from the training text: "in" is prose, "off" is code."""
    generator = torch.Generator().manual_seed(100 + seed)
    stream = texts["prose" if domain == "in" else "code"]
    return list(_draw(stream, count, generator)[:, :-1].split(32))


def load_gpt(cache: Path) -> tuple[GPT, dict[str, Tensor]]:
    """The trained model and its token streams; trained on the first call."""
    path = cache / "gpt.pt"
    if not path.exists():
        texts = prepare()
        state = train(texts).state_dict()
        cache.mkdir(parents=True, exist_ok=True)
        torch.save({"state": state, "texts": texts}, path)
    saved = torch.load(path)
    model = GPT()
    model.load_state_dict(saved["state"])
    return model.eval(), saved["texts"]


def gpt(cache: Path, quick: bool) -> Subject:
    """The language model."""
    model, texts = load_gpt(cache)
    held_out = texts["held out"][: EVALUATION_SEQUENCES // 4 if quick else EVALUATION_SEQUENCES]
    count = CALIBRATION_SEQUENCES // 4 if quick else CALIBRATION_SEQUENCES
    dense = perplexity(model, held_out)

    def evaluate(small: nn.Module) -> dict[str, float]:
        found = perplexity(small, held_out)
        return {"over dense": found / dense}

    return Subject(
        title=f"GPT trained on Python's documentation, perplexity over that of the dense model ({dense:.2f})",
        model=model,
        blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)),
        calibration=lambda domain, seed: calibration(texts, domain, seed, count),
        in_domain=f"{count} pieces of {CONTEXT} tokens of the documentation it was trained on",
        off_domain=f"{count} pieces of {CONTEXT} tokens of source code",
        healing=lambda domain, seed: calibration(texts, domain, seed, count if quick else HEAL_SEQUENCES),
        healed_on=f"{HEAL_SEQUENCES} such pieces, 32 at a time",
        heal_steps=20 if quick else HEAL_STEPS,
        evaluate=evaluate,
        metrics={"over dense": False},
        outputs="classes",
        options={"allow_slower": True},
    )
