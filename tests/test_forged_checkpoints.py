"""Whatever a signed `sketch.json` says: it is loaded, or refused by an error of our own."""

import copy
import json
import resource

import pytest
import torch
from processes import started
from safetensors.torch import load_file, save_file
from torch import nn

import panther_compile as pc
from panther_compile.errors import CheckpointError, ConfigError, ConfigTypeError, WeightError
from panther_compile.storage import document_sha256, file_sha256

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True, "include": lambda module, name: True}


class Model(nn.Module):
    """A layer of each kind, and a tied table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.conv = nn.Conv2d(4, 12, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A document and the tensors beside it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("forged")
    pc.save_sketched(pc.sketchify(Model(), 0.6, attention="favor", **OPTIONS), path)
    (weights,) = path.glob("weights-*")
    return json.loads((path / "sketch.json").read_text()), load_file(weights)


def forge(path, document, tensors=None):
    """Write both, with the right checksums."""
    if tensors is not None:
        save_file(tensors, path / "unnamed")
        checksum = file_sha256(path / "unnamed")
        document["weights"] = {"file": f"weights-{checksum[:16]}.safetensors", "sha256": checksum}
        (path / "unnamed").rename(path / document["weights"]["file"])
    document["sha256"] = document_sha256(document)
    (path / "sketch.json").write_text(json.dumps(document))


def layer(document, name):
    return next(entry for entry in document["layers"] if entry["name"] == name)


def put(*keys, value):
    """An edit that sets an entry of the document."""

    def edit(document, _):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return edit


def drop(*keys):
    def edit(document, _):
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return edit


def spec(name, **changes):
    return lambda document, _: layer(document, name)["spec"].update(changes)


def tensor(name, change):
    def edit(_, tensors):
        tensors[name] = change(tensors[name])

    return edit


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = [None, 3, 1.5, True, "text", [], {}, [3], {"a": 3}]
TOP = ("model", "weights", "aliases", "frozen", "layers", "record")
REFUSED = {
    **{f"no {key}": drop(key) for key in TOP},
    **{f"{key} = {value}": put(key, value=value) for key in TOP for value in WRONG},
    "weights without a file": drop("weights", "file"),
    "weights without a checksum": drop("weights", "sha256"),
    "file is 3": put("weights", "file", value=3),
    "file with a NUL": put("weights", "file", value="weights-\0.safetensors"),
    "file of another folder": put("weights", "file", value="../weights-0123456789abcdef.safetensors"),
    "file is the folder": put("weights", "file", value="."),
    "file is empty": put("weights", "file", value=""),
    "checksum is 3": put("weights", "sha256", value=3),
    "a field more": put("surprise", value=1),
    "an alias of nothing": put("aliases", "head.up.weight", value="nothing"),
    "an alias of itself": put("aliases", "head.up.weight", value="head.up.weight"),
    "an alias that is stored": put("aliases", "linear.up.weight", value="linear.down.weight"),
    "a layer more": lambda d, _: d["layers"].append({"name": "other", "type": "SketchedLinear", "spec": {}}),
    "a layer with a NUL": put("layers", 0, "name", value="a\0b"),
    "a layer without a name": drop("layers", 0, "name"),
    "a layer of no type": put("layers", 0, "type", value="Linear"),
    "a layer of type []": put("layers", 0, "type", value=[]),
    "a layer of another type": put("layers", 0, "type", value="SketchedConv2d"),
    "a spec that is a list": put("layers", 0, "spec", value=[1, 2]),
    "an empty spec": put("layers", 0, "spec", value={}),
    "a device": spec("linear", device="cuda"),
    "an option more": spec("linear", surprise=3),
    "rank 0": spec("linear", rank=0),
    "rank -1": spec("linear", rank=-1),
    "rank 1.5": spec("linear", rank=1.5),
    "rank True": spec("linear", rank=True),
    "rank of text": spec("linear", rank="3"),
    "rank 10**6": spec("linear", rank=10**6),
    "another rank": spec("linear", rank=2),
    "features 10**9": spec("linear", in_features=10**9),
    "features 10**30": spec("linear", in_features=10**30, out_features=10**30),
    "form of a list": spec("linear", form=["pair"]),
    "bias of text": spec("linear", bias="no"),
    "start 10**12": spec("linear", start=10**12),
    "kernel of one": spec("conv", kernel_size=[3]),
    "kernel of text": spec("conv", kernel_size="3x3"),
    "groups 0": spec("conv", groups=0),
    "stride 0": spec("conv", stride=[0, 0]),
    "stride -1": spec("conv", stride=-1),
    "padding_mode of nothing": spec("conv", padding_mode="none"),
    "channels 10**18": spec("conv", in_channels=10**18),
    "random features 10**7": spec("attention", features=10**7),
    "random features 10**13": spec("attention", features=10**13),
    "no random features": spec("attention", features=0),
    "heads 0": spec("attention", num_heads=0),
    "heads -2": spec("attention", num_heads=-2),
    "heads of text": spec("attention", num_heads="2"),
    "a projection that is a list": spec("attention", q_proj=[1]),
    "a projection of nothing": spec("attention", q_proj={}),
    "a projection of text": spec("attention", q_proj={"in_features": "a", "out_features": "b", "rank": "c"}),
    "a narrow projection": spec("attention", q_proj={"side": "in"}),
    "kdim 10**15": spec("attention", kdim=10**15),
    "a plan that is a list": put("record", "plan", value=[]),
    "a plan without layers": drop("record", "plan", "layers"),
    "a line of text": put("record", "plan", "layers", 0, value="line"),
    "a shape of text": put("record", "plan", "layers", 0, "shape", value="16x16"),
    "a shape of texts": put("record", "plan", "layers", 0, "shape", value=["16"]),
    "a choice without a rank": drop("record", "plan", "layers", 0, "choice", "rank"),
    "a choice of 3": put("record", "plan", "layers", 0, "choice", value=3),
    "ranks of 3": put("record", "plan", "layers", 0, "choice", "ranks", value=3),
    "a count of text": put("record", "plan", "layers", 0, "dense_numbers", value="16"),
    "an error of text": put("record", "fitted", "linear", "error", value="small"),
    "fitted is a list": put("record", "fitted", value=[]),
    "tried is a list": put("record", "plan", "tried", value=[]),
    "int64 weights": tensor("linear.up.weight", lambda t: t.to(torch.int64)),
    "a weight of booleans": tensor("linear.up.bias", lambda t: t > 0),
    "a buffer of fractions": tensor("count", lambda t: t.float()),
    "a smaller weight": tensor("linear.up.weight", lambda t: t[:-1].clone()),
    "an empty weight": tensor("linear.up.weight", lambda t: t[:0].clone()),
    "a flat weight": tensor("linear.up.weight", lambda t: t.flatten()),
    "a weight less": lambda _, tensors: tensors.pop("linear.up.weight"),
    "a weight more": lambda _, tensors: tensors.update({"forward": torch.ones(2)}),
}
ACCEPTED = {"model = text", "frozen = []", "record = None"}


@pytest.mark.parametrize("name", list(REFUSED))
def test_forged(saved, tmp_path, name):
    document, tensors = copy.deepcopy(saved)
    REFUSED[name](document, tensors)
    forge(tmp_path, document, None if name.startswith(("file", "checksum", "weights", "no w")) else tensors)
    if name in ACCEPTED or (name.startswith("weights =") and document["weights"] == saved[0]["weights"]):
        pc.load_sketched(Model(), tmp_path)
        return
    with pytest.raises(CheckpointError) as caught:
        pc.load_sketched(Model(), tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("keys", [("layers",), ("frozen",), ("model",), ("record",), ("other",)])
@pytest.mark.parametrize("depth", [400, 100_000])
def test_deep_nesting(saved, tmp_path, keys, depth):
    document, tensors = copy.deepcopy(saved)
    forge(tmp_path, document, tensors)
    file = tmp_path / "sketch.json"
    put(*keys, value="HERE")(document, None)
    for place in ("", "sha256"):
        if place:
            try:
                document[keys[0]] = nested(depth)
                document["sha256"] = document_sha256(document)
            except RecursionError:
                pass
            document[keys[0]] = "HERE"
        file.write_text(json.dumps(document).replace('"HERE"', "[" * depth + "]" * depth))
        with pytest.raises(CheckpointError):
            pc.load_sketched(Model(), tmp_path)


def test_nothing_is_allocated_beyond_the_file(saved, tmp_path):
    document, tensors = copy.deepcopy(saved)
    spec("attention", features=10**7)(document, None)
    forge(tmp_path, document, tensors)

    def load():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CheckpointError, match=r"attention.favor.directions has shape \(256, 8\)"):
            pc.load_sketched(Model(), tmp_path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes

    with started(load) as process:
        assert process.wait() == 0


def test_a_skeleton_of_meta_draws_nothing():
    attention = pc.SketchedMultiheadAttention(16, 2, attention="favor", features=10**9, device="meta")
    assert attention.favor.directions.shape == (10**9, 8)


@pytest.mark.parametrize("given", [3, None, b"folder", ["folder"]])
def test_directories_that_are_none(saved, given):
    small = pc.sketchify(Model(), 0.6, **OPTIONS)
    for call in (lambda: pc.load_sketched(Model(), given), lambda: pc.save_sketched(small, given)):
        with pytest.raises(ConfigTypeError, match=f"a {type(given).__name__}, wanted a path"):
            call()


def test_arguments_that_are_none(saved, tmp_path):
    forge(tmp_path, *copy.deepcopy(saved))
    for call in (lambda: pc.load_sketched(3, tmp_path), lambda: pc.save_sketched(3, tmp_path)):
        with pytest.raises(ConfigTypeError, match=r"is a int, wanted an nn\.Module"):
            call()
    with pytest.raises(ConfigError, match="holds a NUL"):
        pc.load_sketched(Model(), "a\0b")
    for device in ("nope", "cuda:77", "meta", 3.5):
        with pytest.raises(ConfigError, match="device="):
            pc.load_sketched(Model(), tmp_path, device=device)
    assert pc.load_sketched(Model(), tmp_path, device="cpu").count == 3


# ------------------------------------------------------------------------------- tensors that hold none


class Wrapped(torch.Tensor):
    """Numbers kept in another tensor, as quantizers and FSDP2 do."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def test_wrapped_tensors_are_refused_by_name(tmp_path):
    small = pc.sketchify(Model(), 0.6, **OPTIONS)
    up = small.linear.up
    up.weight = nn.Parameter(Wrapped(up.weight.detach()), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"linear\.up\.weight is a Wrapped, .*before it is quantized"):
        pc.save_sketched(small, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightError, match=r"linear\.up\.weight is a Wrapped"):
        pc.densify(small)


def test_torchao_is_refused_by_name(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    small = pc.sketchify(Model(), 0.6, **OPTIONS)
    quantization.quantize_(small.linear, quantization.Int8WeightOnlyConfig())
    with pytest.raises(CheckpointError, match=r"linear\.(down|up)\.weight is a \w+Tensor, .*quantized"):
        pc.save_sketched(small, tmp_path)
    with pytest.raises(WeightError, match=r"linear\.(down|up)\.weight is a \w+Tensor: densify"):
        pc.densify(small)
