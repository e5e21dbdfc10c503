"""The command line: options are the fields of SketchConfig; data from files; folders larger than memory."""

import argparse
import json
import os
import runpy
import shutil
import sys
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import panther_compile as pc
from panther_compile import cli
from panther_compile.arguments import NAMES, add_options, given_options
from panther_compile.cli import main
from panther_compile.data_files import read_tensors, read_text
from panther_compile.errors import ConfigError, DataError

SMALL = ["--min-params", "0", "--allow-slower", "--no-progress", "--json"]


def build():
    """A model for `module:function`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))


MADE = nn.Linear(3, 3)


def batches(model):
    """Data as a function that calls the model."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        model(torch.randn(64, 48, generator=generator))


def score(model):
    """A score that only the dense model and near ones have."""
    return -sum(parameter.numel() for parameter in model.parameters()) * 0.0


@pytest.fixture
def source(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__.rpartition("/")[0]))
    return "test_cli:build"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model with a tokenizer of words."""
    place = tmp_path_factory.mktemp("model")
    widths = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**widths, num_hidden_layers=1, num_key_value_heads=2)
    ).save_pretrained(place)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(place)
    return place


def write_text(place, count):
    numbers = np.random.default_rng(0).integers(1, 99, count)
    place.write_text(" ".join(f"w{number}" for number in numbers))
    return place


def test_every_field_is_an_option_and_has_a_line_of_help():
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert set(NAMES) == {field.name for field in fields(pc.SketchConfig)} - {"ratio", "inplace"}
    assert given_options(parser.parse_args([])) == {}
    given = ["--include", "a", "--include", "b", "--no-narrow", "--seed", "3", "--refine", "kl", "--progress"]
    wanted = {"include": ["a", "b"], "narrow": False, "seed": 3, "refine": "kl", "progress": True}
    assert given_options(parser.parse_args(given)) == wanted
    assert all(action.help for action in parser._actions)
    assert "of every random number drawn" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--objective", "speed"])


def test_every_option_of_sketch_onnx_is_one_of_the_command():
    options = pytest.importorskip("panther_compile.onnx.sketch").OnnxSketchOptions
    assert set(cli.ONNX_OPTIONS) == options.__optional_keys__


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"panther-compile {pc.__version__}\n"


def test_as_a_module_of_python(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["panther_compile", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("panther_compile", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"panther-compile {pc.__version__}\n"


@contextmanager
def printing_to(handle, monkeypatch, encoding="utf-8"):
    with open(handle, "w", encoding=encoding) as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", file)
        yield


def test_letters_that_an_encoding_lacks(source, tmp_path, monkeypatch):
    with printing_to(tmp_path / "plan.txt", monkeypatch, encoding="latin-1"):
        assert main(["plan", source, "--min-params", "0", "--allow-slower"]) == 0
    assert "?????" in (tmp_path / "plan.txt").read_text(encoding="latin-1")


def test_a_pipe_that_is_closed_early_is_no_error(source, monkeypatch, capsys):
    reads, writes = os.pipe()
    os.close(reads)
    with printing_to(writes, monkeypatch):
        assert main(["plan", source, *SMALL]) == 0
    assert not capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_result_that_cannot_be_printed(source, monkeypatch, capsys):
    with printing_to("/dev/full", monkeypatch):
        assert main(["plan", source, *SMALL]) == 2
    assert "panther-compile: the result cannot be printed: " in capsys.readouterr().err


def test_an_interrupt_has_one_line(source, monkeypatch, capsys):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "plan_sketch", interrupted)
    assert main(["plan", source]) == 130
    assert capsys.readouterr().err == "panther-compile: interrupted\n"


def test_data_of_a_function_and_of_arrays(source, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", input=np.random.default_rng(0).standard_normal((96, 48)).astype("f4"))
    np.savez(tmp_path / "unnamed.npz", np.random.default_rng(0).standard_normal((96, 48)).astype("f4"))
    for data in ("test_cli:batches", str(tmp_path / "data.npz"), str(tmp_path / "unnamed.npz")):
        out = tmp_path / data[-6:].replace(":", "").replace(".", "")
        assert main(["sketch", source, str(out), "--data", data, "--output", "features", *SMALL]) == 0
        assert json.loads(capsys.readouterr().out)["allocation"]  # which only data chooses
        assert main(["report", source, str(out)]) == 0
        capsys.readouterr()


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_the_smallest_ratio_within_a_drop(source, tmp_path, capsys):
    search = ["--data", "test_cli:batches", "--max-drop", "1", "--evaluate", "test_cli:score"]
    assert main(["sketch", source, str(tmp_path / "out"), *search, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["curve"]["ratio"] < 0.5


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_text_for_a_decoder_and_its_cache(folder, tmp_path, capsys):
    text = write_text(tmp_path / "text.txt", 400)
    options = ["--data", str(text), "--length", "16", "--objective", "cache", *SMALL]
    assert main(["sketch", str(folder), str(tmp_path / "out"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["latent_cache_bytes"] > 0


def test_a_folder_is_streamed_into_a_folder(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["sketch", str(folder), str(out), "--stream", "--ratio", "0.6", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["achieved_ratio"] <= 0.6
    assert pc.sketch_report(transformers.AutoModelForCausalLM.from_pretrained(out)).ratio_asked == "0.6"
    assert main(["report", str(folder), str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ratio_asked"] == "0.6"
    assert told["replaced_stored_numbers"] < told["replaced_dense_numbers"]
    assert main(["report", "torch.nn:Flatten", str(out)]) == 2
    assert "is of a LlamaForCausalLM, torch.nn:Flatten of a Flatten" in capsys.readouterr().err
    assert main(["report", str(folder), str(folder)]) == 2
    assert "LlamaForCausalLM holds no sketched layer" in capsys.readouterr().err
    score = ["--max-drop", "1", "--evaluate", "test_cli:score"]
    assert main(["sketch", str(folder), str(tmp_path / "b"), "--stream", *score]) == 2
    assert "--max-drop runs the sketch, which --stream never holds whole" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_a_folder_is_streamed_with_data(folder, tmp_path, capsys):
    text = write_text(tmp_path / "text.txt", 200)
    options = ["--data", str(text), "--length", "16", "--batch-size", "2", *SMALL]
    assert main(["sketch", str(folder), str(tmp_path / "out"), "--stream", *options]) == 0
    assert json.loads(capsys.readouterr().out)["allocation"]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--length", "0"], "--length 0 is of a file of --data, and there is none"),
        (["--batch-size", "4", "--data", "model"], "--batch-size 4 does not apply to --data model"),
        (["--length", "4", "--data", "test_cli:batches"], "--length 4 does not apply to --data test_cli:bat"),
        (["--length", "4", "--data", "some.npz"], "--length 4 does not apply to --data some.npz"),
    ],
)
def test_sizes_that_no_data_has_are_told_of(given, says, tmp_path, capsys):
    assert main(["sketch", "torch.nn:Flatten", str(tmp_path / "out"), *given]) == 2
    assert says in capsys.readouterr().err


def test_arrays_without_names_are_arguments_in_their_order(tmp_path):
    arrays = [np.full((3, 2), place, "f4") for place in range(11)]
    np.savez(tmp_path / "data.npz", *arrays)
    first, second = read_tensors(tmp_path / "data.npz", 2)
    assert [float(one[0, 0]) for one in first] == list(range(11))
    assert [len(one) for one in second] == [1] * 11
    np.savez(tmp_path / "some.npz", arrays[0], x=arrays[1])
    assert read_tensors(tmp_path / "some.npz", 3)[0].keys() == {"arr_0", "x"}


def test_files_that_are_no_data(folder, tmp_path):
    text = write_text(tmp_path / "text.txt", 40)
    assert [tuple(b["input_ids"].shape) for b in read_text(text, folder, 16, 8)] == [(2, 16)]
    with pytest.raises(DataError, match="holds 40 tokens, wanted at least 64"):
        read_text(text, folder, 64, 8)
    with pytest.raises(ConfigError, match="text needs the tokenizer of a Hugging Face model"):
        read_text(text, tmp_path, 16, 8)
    with pytest.raises(DataError, match="wanted UTF-8 text"):
        read_text(tmp_path / "none.txt", folder, 16, 8)
    with pytest.raises(DataError, match=r"wanted a \.npz file"):
        read_tensors(text, 8)
    for kind in ("U1", ">f4", "datetime64[D]"):
        np.savez(tmp_path / "odd.npz", x=np.zeros((4, 3), kind))
        with pytest.raises(DataError, match=r"odd\.npz: x is .*, of which torch makes no tensor"):
            read_tensors(tmp_path / "odd.npz", 8)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="text needs the tokenizer of a Hugging Face model"):
        read_text(text, tmp_path, 16, 8)


def test_models_that_cannot_be_made_are_told_of(folder, tmp_path, capsys):
    for name, config in (("unknown", {"model_type": "of nobody"}), ("no weights", None)):
        place = tmp_path / name
        place.mkdir()
        text = (folder / "config.json").read_text() if config is None else json.dumps(config)
        (place / "config.json").write_text(text)
        assert main(["sketch", str(place), str(tmp_path / "out"), "--ratio", "0.5"]) == 2
        assert "is no Hugging Face model that can be made" in capsys.readouterr().err
    assert main(["plan", ".models:build"]) == 2
    assert "wanted the whole name of a module" in capsys.readouterr().err
    assert main(["plan", "os:sep", "--ratio", "0.5"]) == 2
    assert "is a str, wanted a function" in capsys.readouterr().err
    assert main(["plan", f"{__name__}:MADE", "--ratio", "0.5"]) == 2
    assert "MADE is a Linear, wanted a function that makes a model" in capsys.readouterr().err
    assert main(["sketch", str(tmp_path / "none"), str(tmp_path / "out"), "--stream"]) == 2
    assert "none is no Hugging Face model: it has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_class_that_transformers_does_not_have_is_told_of(folder, tmp_path, capsys, stream):
    """Its backbone was sketched in its place, without the head."""
    place = tmp_path / "other"
    shutil.copytree(folder, place)
    config = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaOfNobody"]}))
    assert main(["sketch", str(place), str(tmp_path / "out"), "--ratio", "0.5", *stream]) == 2
    assert "holds a LlamaOfNobody, as its config.json says" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_size_than_its_weights_is_told_of(folder, tmp_path, capsys):
    """`--stream` wrote a folder that no model fits."""
    place = tmp_path / "other"
    shutil.copytree(folder, place)
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "vocab_size": (
            "has weights of other sizes than its config.json: lm_head.weight ((99, 64) in place",
            50,
        ),
        "num_attention_heads": ("is no Hugging Face model that can be made", 5),
    }
    for name, (says, size) in sizes.items():
        (place / "config.json").write_text(json.dumps(config | {name: size}))
        for options in ([], ["--stream"]):
            assert main(["sketch", str(place), str(tmp_path / "out"), *options, *SMALL]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_plan_of_another_model_is_told_of(source, folder, tmp_path, capsys):
    for one, other in ((source, str(folder)), (str(folder), source)):
        assert main(["plan", one, *SMALL]) == 0
        (tmp_path / "plan.json").write_text(capsys.readouterr().out)
        assert main(["sketch", other, str(tmp_path / "out"), "--plan", str(tmp_path / "plan.json")]) == 2
        assert "has no module of any name in it: it is the plan of another model" in capsys.readouterr().err


def test_a_function_that_asks_for_arguments_is_told_of(capsys):
    assert main(["plan", "torch.nn:Linear"]) == 2
    said = capsys.readouterr().err
    assert "torch.nn:Linear: missing a required argument: 'in_features'; wanted a function of no" in said


@pytest.mark.parametrize(
    "given",
    [("--objective", "latency"), ("--objective", "cache"), ("--refine", "kl"), ("--cache-ratio", "0.3")],
)
def test_plan_offers_nothing_that_needs_data(given, capsys):
    with pytest.raises(SystemExit):
        main(["plan", f"{__name__}:MADE", *given])
    assert given[0] in capsys.readouterr().err


def test_a_folder_that_lacks_a_weight_is_not_sketched(folder, tmp_path, capsys):
    place = tmp_path / "partial"
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    assert main(["sketch", str(place), str(tmp_path / "out"), "--ratio", "0.5", *SMALL]) == 2
    assert "has no model.layers.0.mlp.up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["=0.5"], "--ratio =0.5: wanted a number, or GLOB=NUMBER"),
        (["0=0.5", "0=0.6"], "--ratio 0=0.6: 0 has the ratio 0.5 already"),
        (["0.5", "0.6"], "--ratio 0.6: a number has the ratio 0.5 already"),
        (["0=0.5", "0.4"], "wanted one number, or GLOB=NUMBER throughout"),
    ],
)
def test_ratios_that_say_two_things(source, given, says, capsys):
    assert main(["plan", source, *(one for text in given for one in ("--ratio", text))]) == 2
    assert says in capsys.readouterr().err


def test_a_latency_is_measured_on_data(source, tmp_path, capsys):
    assert main(["sketch", source, str(tmp_path / "out"), "--objective", "latency"]) == 2
    assert "sketchify takes one of data= else, as the command sketch of --data" in capsys.readouterr().err


def test_places_that_cannot_be_written_are_told_of_before_the_work(source, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli, "sketchify", lambda *_, **__: pytest.fail("the work was begun"))
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["sketch", source, str(place)]) == 2
        assert "cannot write the checkpoint" in capsys.readouterr().err
    assert main(["sketch", source, ""]) == 2
    assert "directory='', wanted a path" in capsys.readouterr().err
    for place in (tmp_path / "none" / "m.onnx", tmp_path / "file" / "m.onnx", tmp_path):
        assert main(["sketch-onnx", str(tmp_path / "file"), str(place)]) == 2
        assert f"cannot write {place}" in capsys.readouterr().err
