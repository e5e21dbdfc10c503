"""Every way to give data."""

import threading
from collections import OrderedDict, UserDict, defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import panther_compile
from panther_compile.calibration.first_look import look_at
from panther_compile.errors import ConfigTypeError, DataError
from panther_compile.kinds.registry import kind_of
from panther_compile.models.batches import Call, kept_positions, record_calls, with_tensors
from panther_compile.records import Site


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, attention_mask=None, *, scale=1.0):
        return self.dropout(self.fc(x)) * scale


X = torch.arange(24.0).reshape(6, 4)


def test_tensor_is_one_batch():
    calls = record_calls(nn.Linear(4, 4), X)
    assert len(calls) == 1
    assert calls[0].args[0] is X or torch.equal(calls[0].args[0], X)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(4, 16), nn.Linear(16, 32)

    def forward(self, packed):
        return self.fc(self.rnn(packed)[1][0][-1])


def test_packed_sequences_are_one_argument():
    model, data = Last(), [pack_sequence([X + place, X[:2]]) for place in range(4)]
    assert all(call.args[0].sorted_indices is None for call in record_calls(model, data))
    assert len(record_calls(model, data[0])) == 1
    options = dict(min_params=64, allow_slower=True, progress=False)
    small = panther_compile.sketchify(model, 0.5, data=data, **options)
    wanted = panther_compile.sketchify(model, 0.5, data=lambda one: [one(x) for x in data], **options)
    assert torch.equal(small(data[0]), wanted(data[0]))


def test_labels_that_forward_has_no_place_for_are_left_out():
    loader = DataLoader(TensorDataset(X, torch.arange(6)), batch_size=2)
    calls = record_calls(nn.Linear(4, 4), loader)
    assert [len(call.args) for call in calls] == [1, 1, 1]


def test_mapping_of_tensors_is_one_batch():
    (call,) = record_calls(Masked(), UserDict(x=X, labels=X))  # as tokenizers give them
    assert call.args == ()
    assert torch.equal(call.kwargs["x"], X)


def test_mapping_gives_keywords_that_forward_takes():
    calls = record_calls(Masked(), [{"x": X, "scale": 2.0, "labels": torch.arange(6)}])
    assert set(calls[0].kwargs) == {"x", "scale"}


def test_function_that_calls_the_model():
    model = Masked().train()

    def loop(given):
        assert not given.training
        for row in X:
            given(row, scale=3.0)

    calls = record_calls(model, loop)
    assert len(calls) == 6
    assert calls[0].kwargs == {"scale": 3.0}
    assert model.training
    assert model.dropout.training
    assert not model._forward_pre_hooks


class Cached(Masked):
    def forward(self, x, past_key_values=None, use_cache=None):
        return self.fc(x)


def test_models_are_told_to_make_no_cache():
    model = Cached()
    assert record_calls(model, [X])[0].kwargs == {"use_cache": False}
    given = record_calls(model, [{"x": X, "use_cache": True}, (X, None, True)])
    assert [call.kwargs.get("use_cache") for call in given] == [True, None]


def test_calls_with_a_cache_are_refused():
    class Cache:
        pass

    with pytest.raises(
        DataError, match=r"data calls the model with past_key_values, a Cache, as generate\(\)"
    ):
        record_calls(Cached(), lambda model: model(X, past_key_values=Cache()))
    assert len(record_calls(Cached(), [{"x": X, "past_key_values": ((X, X),)}])) == 1


def test_generation_is_refused_whatever_its_cache_is_called():
    class Renamed(Masked):
        def forward(self, x, cache=None):
            return self.fc(x)

    cache = pytest.importorskip("transformers").DynamicCache()
    with pytest.raises(DataError, match="data calls the model with cache, a DynamicCache, as generate"):
        record_calls(Renamed(), [{"x": X, "cache": cache}])
    assert len(record_calls(Renamed(), [{"x": X, "cache": {}}, {"x": X, "cache": True}])) == 2


def test_calls_are_taken_as_they_are():
    calls = [Call((X,), {})]
    assert record_calls(Masked(), calls)[0].args[0].shape == X.shape


@pytest.mark.parametrize("data", [[], iter(())])
def test_empty_data(data):
    with pytest.raises(DataError, match="no batch"):
        record_calls(Masked(), data)


@pytest.mark.parametrize("data", [3, "texts", {"x": [X]}, ["text"], [3]])
def test_data_of_another_kind(data):
    with pytest.raises(ConfigTypeError, match="wanted a"):
        record_calls(Masked(), data)


def test_a_function_that_does_not_call_the_model():
    def batches(model):
        yield model(torch.ones(2, 4))  # which nothing reads

    with pytest.raises(DataError, match=r"batches.*, given as data, did not call the model"):
        record_calls(nn.Linear(4, 4), batches)


def test_a_function_that_calls_another_method_of_the_model_says_what_to_do():
    class Scorer(nn.Module):
        def score(self, x):
            return x

    with pytest.raises(DataError, match=r"only model\(\.\.\.\) is seen.* a module whose forward calls them"):
        record_calls(Scorer(), lambda model: model.score(X))


def test_loader_that_fails_half_way_keeps_what_was_read():
    def loader():
        yield X[:2]
        yield X[2:4]
        raise OSError("disk gone")

    with pytest.raises(DataError, match=r"after 2 batches .*disk gone") as caught:
        record_calls(Masked(), loader())
    assert len(record_calls(Masked(), caught.value.calls)) == 2


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("attention_mask", torch.tensor([[1, 1, 0]])),
        ("src_key_padding_mask", torch.tensor([[False, False, True]])),
        ("src_key_padding_mask", torch.tensor([[0.0, 0.0, -torch.inf]])),
    ],
)
def test_mask_of_padding(name, mask):
    class Model(nn.Module):
        def forward(self, x, attention_mask=None, src_key_padding_mask=None):
            return x

    kept = kept_positions(Model(), Call((X,), {name: mask}))
    assert kept.tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    "hides",
    [{"attention_mask": torch.zeros(1, 3)}, {"src_key_padding_mask": torch.ones(1, 3, dtype=torch.bool)}],
)
def test_a_mask_that_hides_everything(hides):
    class Model(nn.Module):
        def forward(self, x, attention_mask=None, src_key_padding_mask=None):
            return x

    shown = {name: 1 - mask.long() for name, mask in hides.items()}
    with pytest.raises(DataError, match="batch 1 of the data: its mask hides every position"):
        record_calls(Model(), [{"x": X, **shown}, {"x": X, **hides}])


def test_mask_of_padding_among_features():
    class Model(nn.Module):
        def forward(self, features):
            return features["x"]

    call = Call(({"x": X, "attention_mask": torch.tensor([[1, 1, 0]])},), {})
    assert kept_positions(Model(), call).tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("decoder", "kept"),
    [
        ({"decoder_input_ids": torch.ones(1, 3)}, None),
        ({"labels": torch.tensor([[5, -100, -100]])}, [[True, True, False]]),
        ({"labels": torch.tensor([[5, -100]])}, [[False, True, False]]),
        (
            {"decoder_input_ids": torch.ones(1, 3), "decoder_attention_mask": torch.tensor([[1, 0, 0]])},
            [[True, True, False]],
        ),
        ({"decoder_input_ids": torch.ones(1, 4)}, [[False, True, False]]),
    ],
)
def test_a_decoder_of_as_many_positions_is_not_hidden_by_the_mask_of_the_encoder(decoder, kept):
    class Model(nn.Module):
        def forward(
            self, x, attention_mask, decoder_input_ids=None, decoder_attention_mask=None, labels=None
        ):
            return x

    call = Call((X,), {"attention_mask": torch.tensor([[0, 1, 0]])} | decoder)
    found = kept_positions(Model(), call)
    assert (None if found is None else found.tolist()) == kept


def test_a_target_of_as_many_positions_is_not_hidden_by_the_mask_of_the_source():
    src, tgt = torch.ones(2, 3, 8), torch.ones(2, 3, 8)
    hidden = torch.tensor([[False, True, True], [False, False, True]])
    masks = {"src_key_padding_mask": hidden, "tgt_key_padding_mask": hidden.flip(1)}
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    both = kept_positions(model, Call((src, tgt), masks))
    assert both.tolist() == [[True, False, True], [True, True, True]]
    assert kept_positions(model, Call((src, tgt), {"src_key_padding_mask": hidden})) is None
    assert kept_positions(model, Call((src, tgt[:, :2]), masks)).tolist() == (~hidden).tolist()


def test_no_mask():
    assert kept_positions(Masked(), Call((X,), {})) is None


def test_what_was_made_up_beside_data_is_not_run_to_be_checked():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    sites, ran = [(Site("0", model[0], "Linear"), kind_of(model[0]))], []
    model.register_forward_pre_hook(lambda _, args: ran.append(float(args[0][0, 0])))
    given, made_up = Call((torch.ones(2, 4),), {}, 0), Call((torch.zeros(2, 4),), {})
    for calls in ([given, made_up], [made_up, made_up]):
        look_at(model, sites, calls)
    assert ran == [1.0, 0.0, 0.0]


class Centred(nn.Module):
    """Writes into what it is given, as image models that normalize in place do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x.sub_(0.5).div_(0.25)).relu())


@pytest.mark.parametrize("given", [list, lambda batches: lambda model: [model(x.clone()) for x in batches]])
def test_a_model_that_writes_into_its_input(given):
    torch.manual_seed(0)
    model = Centred().eval()
    batches = list(0.5 + (torch.randn(4, 32, 4) @ torch.randn(4, 16)))
    before = [batch.clone() for batch in batches]
    small = panther_compile.sketchify(
        model, 0.5, data=given(batches), min_params=0, allow_slower=True, synthetic=False
    )
    assert all(map(torch.equal, batches, before))
    with torch.no_grad():
        wanted, found = (one(before[0].clone()) for one in (model, small))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-3 * float(wanted.abs().max()))


class Graph:
    """As PyTorch Geometric's `Data`, which no pytree knows; a lock cannot be copied."""

    def __init__(self, x, lock=None):
        self.x, self.lock = x, lock


class Passing(Centred):
    """Writes into its graph, and puts new tensors into it, as models of graphs do."""

    def forward(self, graph):
        graph.x.add_(1.0)
        graph.x = self.up(graph.x).relu()
        return self.down(graph.x)


def test_a_model_that_writes_into_an_object():
    """The graphs of the user were those of the last layer after it, and it was fitted to them."""
    torch.manual_seed(0)
    batches = list(torch.randn(4, 32, 4) @ torch.randn(4, 16))
    graphs = [(Graph(batch.clone()),) for batch in batches]
    panther_compile.sketchify(
        Passing().eval(), 0.5, data=graphs, min_params=0, allow_slower=True, synthetic=False
    )
    assert all(torch.equal(graph.x, batch) for (graph,), batch in zip(graphs, batches, strict=True))
    seen, locked, part = [], Graph(X, threading.Lock()), nn.Linear(1, 1)
    Call((locked, {"y": part}), {"z": None}).run(Told(seen))
    assert seen == [(locked, part, None)]


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_a_table_that_is_renormalized_as_it_is_read_stays_as_it_is(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(40, 16, max_norm=1.0), nn.Linear(16, 32), nn.Linear(32, 8)).eval()
    before = model[0].weight.detach().clone()
    batches = [torch.randint(0, 40, (16, 5)) for _ in range(4)]
    options = dict(min_params=0, allow_slower=True, progress=False)
    for small in (
        panther_compile.sketchify(model, 0.5, **options),
        panther_compile.sketchify(model, 0.5, data=batches, **options),
    ):
        healed = panther_compile.heal(small, teacher=model, data=batches, steps=2, progress=False)
        for one in (model, small, healed):
            assert torch.equal(one[0].weight, before)


def test_a_tensor_that_is_given_twice_stays_one():
    seen = []
    Call((X, {"y": X}), {"z": X}).run(Told(seen))
    assert seen[0][0] is seen[0][1] is seen[0][2] is not X


class Told(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x, named, z):
        self.seen.append((x, named["y"], z))


def test_a_loop_that_writes_over_its_batches():
    def loop(model):
        place = torch.empty(2, 4)
        for batch in X.split(2):
            model(place.copy_(batch))

    assert torch.equal(torch.cat([call.args[0] for call in record_calls(nn.Linear(4, 4), loop)]), X)


class Encoder(nn.Module):
    """Writes its result into the features that it is given, as sentence-transformers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, features, **options):
        features["embedding"] = self.fc(features["x"])
        return features

    def encode(self, batches):
        with torch.inference_mode():
            for batch in batches:
                self(UserDict(x=batch + 0))


@pytest.mark.parametrize("kind", [dict, UserDict, "loop"])
def test_a_model_that_writes_into_a_mapping(kind):
    torch.manual_seed(0)
    model, batches = Encoder().eval(), torch.randn(6, 32, 16).unbind()
    data = (lambda given: given.encode(batches)) if kind == "loop" else [kind(x=batch) for batch in batches]
    small = panther_compile.sketchify(
        model, 0.5, data=data, min_params=0, allow_slower=True, progress=False, seed=1
    )
    assert panther_compile.sketch_report(small).closeness.distance > 0.05
    assert kind == "loop" or all(list(one) == ["x"] for one in data)
    healed = panther_compile.heal(small, teacher=model, data=data, steps=1)
    assert panther_compile.heal_report(healed).before["output"] > 0.0


def test_mappings_of_every_class_are_copied():
    given = {"order": OrderedDict(x=X), "count": defaultdict(list, x=X), "rows": [(X, None)]}
    made = with_tensors(given, lambda tensor: tensor + 1)
    assert [type(one) for one in made.values()] == [OrderedDict, defaultdict, list]
    assert all(torch.equal(made[name]["x"], X + 1) for name in ("order", "count"))
    assert made["rows"][0][1] is None
    assert given["order"]["x"] is X
