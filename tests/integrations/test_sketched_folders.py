"""A Hugging Face folder sketched weight by weight is what sketching the model in memory gives."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import panther_compile as pc
from panther_compile.calibration import calibrate, work_folder
from panther_compile.calibration.resume import CalibrationFolder
from panther_compile.cli import main
from panther_compile.errors import CheckpointError, ConfigError, ModelSourceError, ResumeError, WeightError
from panther_compile.integrations import folder_by_weights

OPTIONS = {"progress": False, "allow_slower": True, "min_params": 0}
SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**options):
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=160, num_key_value_heads=2, max_position_embeddings=64, **options
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(**SMALL, intermediate_size=128, max_position_embeddings=64, num_labels=7)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    )


def vit():
    config = transformers.ViTConfig(
        **{name: size for name, size in SMALL.items() if name != "vocab_size"},
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config)


MODELS = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "bert": bert,
    "gpt2": gpt2,
    "vit": vit,
}


@pytest.fixture
def folder(tmp_path):
    def save(name, **options):
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(tmp_path / "dense", **options)
        return tmp_path / "dense"

    return save


def loaded(path, like):
    return type(like).from_pretrained(path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("llama", "bert") else name for name in MODELS],
)
def test_the_same_as_in_memory(name, folder, tmp_path):
    source = folder(name)
    model = loaded(source, MODELS[name]())
    wanted = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    plan = pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **OPTIONS)
    found = loaded(tmp_path / "small", model)
    assert [line.choice for line in plan.sketched] == [
        line.choice for line in pc.sketch_report(wanted).plan.sketched
    ]
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for key, value in wanted.state_dict().items():
        assert torch.equal(state[key], value), key
    assert [row.error for row in pc.sketch_report(found).rows] == [
        row.error for row in pc.sketch_report(wanted).rows
    ]
    found.save_pretrained(tmp_path / "again")
    assert loaded(tmp_path / "again", model).state_dict().keys() == state.keys()


def texts(count=3):
    draws = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 96, (2, 12), generator=draws)} for _ in range(count)]


def assert_same_sketch(folder, wanted):
    found = loaded(folder, wanted)
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in wanted.state_dict().items())
    found, wanted = pc.sketch_report(found), pc.sketch_report(wanted)
    assert found.plan == wanted.plan
    assert (found.closeness, found.rows) == (wanted.closeness, wanted.rows)


@pytest.mark.parametrize(
    "name", ["llama tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert"))]
)
def test_with_data_the_same_as_in_memory(name, folder, tmp_path):
    source = folder(name, max_shard_size="100KB")
    (source / "tokenizer.json").write_text("{}")
    wanted = pc.sketchify(loaded(source, MODELS[name]()), 0.5, data=texts(), **OPTIONS)
    plan = pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, data=texts(), **OPTIONS)
    assert plan == pc.sketch_report(wanted).plan
    assert_same_sketch(tmp_path / "small", wanted)
    assert (tmp_path / "small" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".saving*"))


@pytest.mark.slow
def test_with_data_resumed_where_it_stopped(folder, tmp_path, monkeypatch):
    source, work = folder("llama"), tmp_path / "work"
    wanted = pc.sketchify(loaded(source, llama()), 0.5, data=texts(), **OPTIONS)
    keep, kept = CalibrationFolder.keep_layer, []

    def stops(self, plan, name, *rest):
        if len(kept) == 5:
            raise KeyboardInterrupt
        kept.append(name)
        keep(self, plan, name, *rest)

    monkeypatch.setattr(CalibrationFolder, "keep_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, data=texts(), resume=work, **OPTIONS)
    assert not (tmp_path / "small").exists()

    def goes_on(self, plan, name, *rest):
        kept.append(name)
        keep(self, plan, name, *rest)

    monkeypatch.setattr(CalibrationFolder, "keep_layer", goes_on)
    monkeypatch.setattr(calibrate, "study_layers", None)  # must not be called again
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, data=texts(), resume=work, **OPTIONS)
    assert len(kept) == len(set(kept)) == len(pc.sketch_report(wanted).plan.sketched)
    assert_same_sketch(tmp_path / "small", wanted)
    with pytest.raises(ResumeError, match="holds the work of another run"):
        pc.sketchify_checkpoint(source, tmp_path / "other", 0.5, data=texts(2), resume=work, **OPTIONS)


def test_embeddings_tied_to_the_head_share_their_factors(folder, tmp_path):
    source = folder("llama tied")
    plan = pc.sketchify_checkpoint(
        source, tmp_path / "small", 0.5, include=["*.mlp.*", "*.self_attn.*", "model.embed_tokens"], **OPTIONS
    )
    reasons = {line.name: line.reason for line in plan.layers if line.choice is None}
    small = loaded(tmp_path / "small", llama())
    if "model.embed_tokens" not in reasons:
        assert small.lm_head.down.weight is small.model.embed_tokens.basis.weight
    assert torch.isfinite(small(torch.arange(8)[None]).logits).all()


def test_shards_in_and_out(folder, tmp_path, monkeypatch):
    source = folder("llama", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    monkeypatch.setattr(folder_by_weights, "SHARD_BYTES", 50_000)
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **OPTIONS)
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model = loaded(source, llama())
    small, wanted = loaded(tmp_path / "small", model), pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    assert all(torch.equal(small.state_dict()[key], value) for key, value in wanted.state_dict().items())


@pytest.mark.parametrize("with_data", [False, True])
def test_of_a_whole_file_beside_shards_the_one_that_transformers_reads(with_data, folder, tmp_path):
    source = folder("llama", max_shard_size="20KB")
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 2
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", source)
    options = {"data": texts() if with_data else None, "synthetic": False, **OPTIONS}
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **options)
    state = loaded(tmp_path / "small", other).state_dict()
    for name, value in pc.sketchify(loaded(source, other), 0.5, **options).state_dict().items():
        assert torch.equal(state[name], value), name


def test_half_types_and_other_files_stay(folder, tmp_path):
    source = folder("llama")
    llama().bfloat16().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **OPTIONS)
    assert (tmp_path / "small" / "tokenizer.json").read_text() == "{}"
    with safe_open(tmp_path / "small" / "model.safetensors", framework="pt") as stream:
        types = {value.dtype for value in map(stream.get_tensor, list(stream.keys())) if value.numel()}
    assert types == {torch.bfloat16}


def test_a_sketch_saved_beside_the_weights_stays_behind(folder, tmp_path):
    """Its plan names weights that are not copied, and was taken for that of the folder."""
    source = folder("gpt2")
    pc.save_sketched(pc.sketchify(MODELS["gpt2"](), 0.5, **OPTIONS), source)
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **OPTIONS)
    assert not (tmp_path / "small" / "sketch.json").exists()
    assert main(["report", str(source), str(tmp_path / "small")]) == 0


def test_a_plan_is_followed(folder, tmp_path):
    source = folder("llama")
    plan = pc.plan_sketch(llama(), 0.4, **OPTIONS)
    done = pc.sketchify_checkpoint(source, tmp_path / "small", plan=plan, **OPTIONS)
    assert [(line.name, line.choice.ranks) for line in done.sketched] == [
        (line.name, line.choice.ranks) for line in plan.sketched
    ]


def test_resumed_where_it_stopped(folder, tmp_path, monkeypatch):
    source, work = folder("llama"), tmp_path / "work"
    pc.sketchify_checkpoint(source, tmp_path / "whole", 0.5, **OPTIONS)
    sketch, seen = folder_by_weights.sketch_site, []

    def stops(site, *rest):
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(site.name)
        return sketch(site, *rest)

    monkeypatch.setattr(folder_by_weights, "sketch_site", stops)
    with pytest.raises(KeyboardInterrupt):
        pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=work, **OPTIONS)
    assert not (tmp_path / "small").exists()
    assert not list(tmp_path.glob(".saving*"))
    monkeypatch.setattr(
        folder_by_weights, "sketch_site", lambda site, *rest: seen.append(site.name) or sketch(site, *rest)
    )
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=work, **OPTIONS)
    assert len(seen) == len(set(seen))
    small, whole = (loaded(tmp_path / name, llama()).state_dict() for name in ("small", "whole"))
    assert all(torch.equal(small[key], value) for key, value in whole.items())
    with pytest.raises(ResumeError, match="holds the work of another run\n  ratio, include and exclude: "):
        pc.sketchify_checkpoint(source, tmp_path / "other", 0.4, resume=work, **OPTIONS)


def test_resumed_with_functions_as_selectors(folder, tmp_path):
    source, work = folder("llama"), tmp_path / "work"

    def options():  # functions of other addresses, as another process has them
        def in_attention(module, name):
            return "self_attn" in name

        def first(module, name):
            return name.startswith("model.layers.0.")

        return {"ratio": {first: 0.5, "*": 0.7}, "include": in_attention, **OPTIONS}

    kept = [options(), options()]
    pc.sketchify_checkpoint(source, tmp_path / "small", resume=work, **kept[0])
    pc.sketchify_checkpoint(source, tmp_path / "again", resume=work, **kept[1])
    other = kept[1] | {"include": lambda module, name: "mlp" in name}
    for options in (other, kept[1] | {"ratio": {"*": 0.7}}):
        with pytest.raises(
            ResumeError, match="holds the work of another run\n  ratio, include and exclude: "
        ):
            pc.sketchify_checkpoint(source, tmp_path / "other", resume=work, **options)


def test_what_is_refused(folder, tmp_path):
    source = folder("bert")
    for options in ({"objective": "latency"}, {"refine": "kl"}, {"inplace": True}):
        with pytest.raises(ConfigError, match="needs the model in memory"):
            pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **options)
    for options in ({"objective": "latency"}, {"refine": "kl"}, {"inplace": True}):
        with pytest.raises(ConfigError, match="needs the model in memory"):
            pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, data=texts(), **options)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists: a new folder is written"):
        pc.sketchify_checkpoint(source, tmp_path / "there", 0.5)
    with pytest.raises(ModelSourceError, match="no Hugging Face model"):
        pc.sketchify_checkpoint(tmp_path / "there", tmp_path / "small", 0.5)
    bert().config.save_pretrained(tmp_path / "there")
    with pytest.raises(ModelSourceError, match="no folder of safetensors"):
        pc.sketchify_checkpoint(tmp_path / "there", tmp_path / "small", 0.5)
    with pytest.raises(ModelSourceError, match="no Hugging Face model"):
        pc.sketchify_checkpoint(tmp_path / "there", tmp_path / "small", 0.5, data=texts())
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, **OPTIONS)
    with pytest.raises(ModelSourceError, match="sketched already"):
        pc.sketchify_checkpoint(tmp_path / "small", tmp_path / "smaller", 0.5, **OPTIONS)
    with pytest.raises(ModelSourceError, match="sketched already"):
        pc.sketchify_checkpoint(tmp_path / "small", tmp_path / "smaller", 0.5, data=texts(), **OPTIONS)
    (source / "adapter_config.json").write_text("{}")
    for data in (None, texts()):
        with pytest.raises(ModelSourceError, match="holds an adapter beside the model"):
            pc.sketchify_checkpoint(source, tmp_path / "smaller", 0.5, data=data, **OPTIONS)
    (source / "adapter_config.json").unlink()
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[3, 4] = torch.nan
    model.save_pretrained(source)
    with pytest.raises(WeightError, match=r"layer\.1\.output\.dense\.weight holds 1 NaN"):
        pc.sketchify_checkpoint(source, tmp_path / "other", 0.5, **OPTIONS)
    assert not (tmp_path / "other").exists()


MEASURED = """
import sys, threading, time
from pathlib import Path
import torch
import panther_compile as pc
import transformers
from panther_compile.integrations import folders, folder_by_weights
folder_by_weights.SHARD_BYTES = 20_000_000
torch.set_num_threads(1)
torch.linalg.svdvals(torch.randn(64, 64))
folders.empty_model(Path(sys.argv[1]), dense=True)  # the classes of the model are loaded
def held():  # memory that is the process's own: pages of files are dropped when others need them
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0])
before, peak, done = held(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, held())
        time.sleep(0.005)
thread = threading.Thread(target=watch); thread.start()
pc.sketchify_checkpoint(sys.argv[1], sys.argv[2], 0.5, progress=False, method="randomized")
done = True; thread.join()
print("grown", (peak - before) // 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_few_layers(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=24, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM(config)
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    model.save_pretrained(tmp_path / "dense")
    del model
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path / "dense", tmp_path / "small"],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(re.search(r"grown (\d+)", run.stdout)[1])
    assert grown < size / 2, f"{grown} MiB for a model of {size:.0f} MiB"
    assert Path(tmp_path / "small" / "config.json").exists()


@pytest.mark.parametrize("data", [None, texts()], ids=["weights", "data"])
def test_a_folder_that_lacks_a_weight_is_refused(data, folder, tmp_path):
    source = folder("llama")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight in its files"):
        pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, data=data, **OPTIONS)
    assert not (tmp_path / "small").exists()


def test_weights_are_of_the_dtype_that_the_folder_names_and_ties_are_found(folder, tmp_path):
    source = folder("llama tied")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    model = loaded(source, MODELS["llama tied"]())
    assert model.dtype is torch.bfloat16
    wanted = pc.sketchify(model, 0.5, include="*", synthetic=False, **OPTIONS)
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, include="*", **OPTIONS)
    found = loaded(tmp_path / "small", model).state_dict()
    assert found.keys() == wanted.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.state_dict().items())


def test_a_folder_with_other_files_is_not_resumed_into(folder, tmp_path):
    source = folder("llama")
    with pytest.raises(ResumeError, match=r"holds files but no sketch\.json"):
        pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=source, **OPTIONS)
    assert not (source / "sketch.json").exists()


def test_places_that_cannot_be_written(folder, tmp_path):
    source, file = folder("vit"), tmp_path / "file"
    file.touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"cannot sketch .* into .*small"):
        pc.sketchify_checkpoint(source, file / "small", 0.5, **OPTIONS)
    with pytest.raises(ConfigError, match="exists: a new folder is written"):
        pc.sketchify_checkpoint(source, tmp_path / "link", 0.5, **OPTIONS)
    with pytest.raises(ResumeError, match="is no folder that can be written"):
        pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=file, **OPTIONS)
    assert not (tmp_path / "small").exists()


def test_another_call_makes_the_same_folder_first(folder, tmp_path, monkeypatch):
    """Both work in one folder to resume from; the first has its target and the second an error."""
    source, target, work = folder("vit"), tmp_path / "small", tmp_path / "work"
    sketch, first = folder_by_weights.sketch_site, []

    def starts_another(*given):
        if not first:
            first.append(True)
            pc.sketchify_checkpoint(source, target, 0.5, resume=work, **OPTIONS)
        return sketch(*given)

    monkeypatch.setattr(folder_by_weights, "sketch_site", starts_another)
    with pytest.raises(CheckpointError, match=r"cannot sketch .* into .*small"):
        pc.sketchify_checkpoint(source, target, 0.5, resume=work, **OPTIONS)
    assert pc.sketch_report(loaded(target, vit())).sketched
    assert not list(tmp_path.rglob(".saving*"))


def test_a_call_that_is_killed_at_once_is_resumed(folder, tmp_path, monkeypatch):
    """What it leaves of the first file is no other folder's."""
    source, work = folder("vit"), tmp_path / "work"

    def killed(place, write):
        scratch = place.parent / ".saving-1"
        scratch.mkdir()
        write(scratch / "file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "replace_file", killed)
        with pytest.raises(KeyboardInterrupt):
            pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=work, **OPTIONS)
    pc.sketchify_checkpoint(source, tmp_path / "small", 0.5, resume=work, **OPTIONS)
    assert pc.sketch_report(loaded(tmp_path / "small", vit())).sketched
