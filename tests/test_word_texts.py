"""Texts of words at random, for encoders whose tokenizer is at hand."""

import string
from collections import Counter

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import panther_compile as pc
from panther_compile.errors import DataError
from panther_compile.models.synthetic import make_inputs
from panther_compile.models.word_texts import find_vocabulary, read_vocabulary

WORDS = [a + b for a in string.ascii_lowercase for b in "aeiou"]
VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[unused0]", *".,a1", *WORDS, "##ing", "\u00e9"]
CLS, SEP = 1, 2


def tokenizer(words=VOCABULARY):
    one = Tokenizer(models.WordPiece({name: place for place, name in enumerate(words)}, unk_token="[UNK]"))
    one.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    one.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=one, **names)


def bert(layers=1):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
    )
    return transformers.BertModel(config).eval()


@pytest.fixture
def folder(tmp_path):
    bert().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_texts_are_of_words_between_the_tokens_that_texts_have():
    known = read_vocabulary(tokenizer(), torch.zeros(len(VOCABULARY), 4))
    assert (known.before, known.after) == ((CLS,), (SEP,))
    assert {VOCABULARY[place] for place in known.words} == {*WORDS, *".,a1", "##ing"}
    assert abs(float(known.chances.sum()) - 1) < 1e-6
    texts = known.texts(200, 50, torch.Generator().manual_seed(0))
    assert texts.shape == (200, 50)
    assert set(texts[:, 0].tolist()) == {CLS}
    assert set(texts[:, -1].tolist()) == {SEP}
    seen = Counter(texts[:, 1:-1].flatten().tolist())
    assert set(seen) == set(known.words.tolist())
    first, last = VOCABULARY.index(WORDS[0]), VOCABULARY.index(WORDS[-1])
    assert seen[first] > 3 * seen[last]  # the words seen most often come first
    signs = sum(seen[VOCABULARY.index(one)] for one in ".,a1")
    assert abs(signs / (200 * 48) - 0.15) < 0.02


def test_words_of_a_text_are_near_its_topic():
    kinds = torch.tensor([WORDS.index(one) % 5 if one in WORDS else 5 for one in VOCABULARY])
    vectors = torch.eye(6)[kinds] + 0.1 * torch.randn(len(VOCABULARY), 6)
    known = read_vocabulary(tokenizer(), vectors)
    texts = known.texts(100, 50, torch.Generator().manual_seed(0))[:, 1:-1]
    counts = [Counter(kinds[text].tolist()).most_common(1)[0] for text in texts]
    assert len({kind for kind, _ in counts}) == 6  # one text is about this, another about that
    assert min(count for _, count in counts) > 24


def test_a_model_that_was_loaded_beside_its_tokenizer(folder):
    model = transformers.AutoModel.from_pretrained(folder)
    made = make_inputs(model, 3, seed=0, sample=True, progress=False)
    assert made.telling
    assert made.what == "made-up inputs (96 texts of words at random)"
    ids = [call.kwargs["input_ids"] for call in made.calls]
    assert len({batch.shape[1] for batch in ids}) > 1  # of several lengths
    assert all((batch[:, 0] == CLS).all() and (batch[:, -1] == SEP).all() for batch in ids)
    again = make_inputs(model, 3, seed=0, sample=True, progress=False)
    assert all(torch.equal(a, b.kwargs["input_ids"]) for a, b in zip(ids, again.calls, strict=True))


def test_layers_are_fitted_to_them(folder):
    model = transformers.AutoModel.from_pretrained(folder)
    small = pc.sketchify(model, 0.5, data="model", min_params=256, allow_slower=True, progress=False)
    assert "texts of words at random" in str(pc.sketch_report(small))


def test_an_encoder_fitted_to_data_keeps_what_data_does_not_show(folder, monkeypatch):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    model = transformers.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.mul_(10 if one.dim() > 1 and "position" not in name else 1)  # as drawn, nothing but residuals
    first = VOCABULARY.index(WORDS[0])
    shown, others = torch.arange(first, first + 6), torch.arange(first + 6, first + len(WORDS))
    data = [{"input_ids": shown[torch.randint(0, 6, (8, 24))]} for _ in range(8)]
    batch = {"input_ids": others[torch.randint(0, len(others), (64, 24))]}
    options = {"data": data, "min_params": 256, "allow_slower": True, "progress": False}

    @torch.no_grad()
    def distance(candidate):
        wanted = model(**batch).last_hidden_state
        return float((candidate(**batch).last_hidden_state - wanted).norm() / wanted.norm())

    beside, alone = (pc.sketchify(model, 0.3, synthetic=one, **options) for one in (True, False))
    said = [str(pc.sketch_report(one)).splitlines()[0] for one in (beside, alone)]
    assert "beside 128 texts spliced of parts of them and 8 texts of words at random" in said[0]
    assert "words" not in said[1]
    assert distance(beside) < 0.9 * distance(alone)
    monkeypatch.setattr("panther_compile.models.synthetic.MOST_WORDS_BESIDE", 100)  # as if of many languages
    plain = pc.sketchify(model, 0.3, **options)
    said = str(pc.sketch_report(plain)).splitlines()[0]
    assert "beside 128 texts spliced of parts of them" in said
    assert "words" not in said


@pytest.mark.parametrize("place", [1, 6])
def test_a_bad_batch_is_named_by_its_place_among_texts_beside(folder, monkeypatch, place):
    monkeypatch.setattr("panther_compile.calibration.inputs.SMALLEST", 1)
    model = transformers.AutoModel.from_pretrained(folder)
    data = [{"input_ids": torch.full((8, 24), 10 + batch)} for batch in range(8)]
    data[place]["token_type_ids"] = torch.full((8, 24), 7)  # the model knows two
    with pytest.raises(DataError, match=f"batch {place} of the data: the model was given"):
        pc.sketchify(model, 0.5, data=data, min_params=256, allow_slower=True, progress=False)


def test_without_a_tokenizer_tokens_are_random_as_before(folder, tmp_path):
    model = bert()
    assert find_vocabulary(model, model.embeddings.word_embeddings.weight) is None
    model.config.name_or_path = str(tmp_path / "nowhere")
    assert find_vocabulary(model, model.embeddings.word_embeddings.weight) is None
    assert not make_inputs(model, 1, seed=0, sample=True, progress=False).telling


def test_a_model_that_holds_its_tokenizer():
    model = bert()
    model.tokenizer = tokenizer()
    assert find_vocabulary(model, model.embeddings.word_embeddings.weight).before == (CLS,)


def test_few_words_tell_nothing():
    few = VOCABULARY[:60]
    assert read_vocabulary(tokenizer(few), torch.zeros(len(few), 4)) is None


def test_words_beyond_the_embedding_are_left_out():
    known = read_vocabulary(tokenizer(), torch.zeros(120, 4))
    assert int(known.words.max()) < 120
