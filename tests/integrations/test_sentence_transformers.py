"""sentence-transformers on a sketched encoder: saved, loaded, and a dense head beside it."""

import importlib

import pytest
import torch
import transformers

import panther_compile as pc

pytestmark = pytest.mark.integrations

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}
TEXTS = ["w5 w6 w7", "w11 w3 w90 w20 w8", "w1"]


@pytest.fixture(scope="module")
def sentence_transformers():
    """Its import takes a second, which those who only collect its tests are spared."""
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def encoder(sentence_transformers, tmp_path):
    """A small sentence encoder: BERT, mean of the tokens, one linear layer."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{n}": n + 2 for n in range(97)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    for part in (transformers.BertModel(config), tokenizer):
        part.save_pretrained(tmp_path / "bert")
    models = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    body = models.Transformer(str(tmp_path / "bert"))
    pooling = models.Pooling(64)
    return sentence_transformers.SentenceTransformer(
        modules=[body, pooling, models.Dense(64, 48)], device="cpu"
    )


def embed(model):
    return torch.as_tensor(model.encode(TEXTS, show_progress_bar=False))


def test_a_sketched_encoder_comes_back(sentence_transformers, encoder, tmp_path):
    small = pc.sketchify(encoder, 0.5, exclude="2.*", **OPTIONS)
    sketched = [name for name, m in small.named_modules() if isinstance(m, pc.SketchedLinear)]
    assert len(sketched) > 8
    small.save(str(tmp_path / "small"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert [name for name, m in again.named_modules() if isinstance(m, pc.SketchedLinear)] == sketched
    torch.testing.assert_close(embed(again), embed(small), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(embed(small), embed(encoder), atol=1e-3)


def test_a_sketched_head_is_refused_by_name(sentence_transformers, encoder, tmp_path):
    small = pc.sketchify(encoder, 0.5, include="*", exclude="0.*", **OPTIONS)
    assert isinstance(small[2].linear, pc.SketchedLinear)
    small.save(str(tmp_path / "small"))
    with pytest.raises(RuntimeError, match=r"linear\.(down|up)\.weight"):
        sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")


@pytest.mark.parametrize("with_data", [False, True])
def test_a_folder_sketched_to_another_comes_back(sentence_transformers, encoder, tmp_path, with_data):
    encoder.save(str(tmp_path / "dense"))
    beside = {"onnx/model.onnx": b"dense", ".git/HEAD": b"", "tf_model.h5": b"dense", "notes/a.txt": b"kept"}
    for name, content in beside.items():
        (tmp_path / "dense" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "dense" / name).write_bytes(content)
    ids = torch.randint(2, 99, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": one} for one in ids] if with_data else None
    pc.sketchify_checkpoint(tmp_path / "dense", tmp_path / "small", 0.5, data=data, **OPTIONS)
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert [type(one).__name__ for one in again] == ["Transformer", "Pooling", "Dense"]
    assert torch.equal(again[2].linear.weight, encoder[2].linear.weight)
    assert any(isinstance(m, pc.SketchedLinear) for m in again.modules())
    copied = [name for name in beside if (tmp_path / "small" / name).exists()]
    assert copied == ["notes/a.txt"]
