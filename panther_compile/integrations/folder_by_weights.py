"""A Hugging Face folder sketched weight by weight, for models larger than memory.

With data it is `folder_with_data.py` that does it.

    plan     a skeleton on the meta device; a layer's weights are mapped from the files when it is read
    sketch   one layer at a time: its factors go to a file of their own
    write    shards of what was left alone, as it was, and of the factors; config.json names the sketch

What is written is what `save_pretrained` of the model that `sketchify` makes would write.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from panther_compile.calibration.work_folder import WorkFolder, file_of_layer
from panther_compile.checkpoint import SavedLayer, empty_layers, layers_to_json, record_to_json
from panther_compile.config import Selector, SketchConfig, SketchOptions
from panther_compile.errors import (
    CheckpointError,
    ConfigError,
    NoTargetError,
    PantherError,
    check_sizes,
    check_whole,
)
from panther_compile.integrations.folder_files import copy_beside
from panther_compile.integrations.folder_with_data import sketch_with_data
from panther_compile.integrations.folders import empty_model
from panther_compile.integrations.model_card import write_model_card
from panther_compile.integrations.pretrained import (
    RECORD_KEY,
    SketchedModelConfig,
    base_name,
    empty_weights,
)
from panther_compile.integrations.saved_config import parameter_aliases
from panther_compile.integrations.stored_weights import (
    INDEX,
    SHARD_BYTES,
    WEIGHTS,
    StoredWeights,
)
from panther_compile.kinds.base import Kind
from panther_compile.kinds.parts import sketch_site, work_on
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.memory import freed_given_back
from panther_compile.models.batches import Data
from panther_compile.models.substitute import replace_inside
from panther_compile.models.surroundings import undisturbed
from panther_compile.names import dotted
from panther_compile.planning.own_weights import lift_own_weights, lower_own_weights
from panther_compile.planning.plan import budget_of, make_plan
from panther_compile.planning.recipe import check_recipe, config_for, follow
from panther_compile.planning.sites import Found, check_weights, find_sites
from panther_compile.planning.trace import read_graph
from panther_compile.records import Fitted, LayerPlan, Site, SketchPlan, SketchRecord, keep_record
from panther_compile.reporting.progress import with_progress
from panther_compile.sketching import read_config
from panther_compile.storage import checked_path, flush, scratch_folder
from panther_compile.typed_json import read_record

_NOT_ASKED = ("progress", "device", "ratio", "include", "exclude")  # of a folder to resume from
_MANIFEST, _PLAN = "sketch.json", "plan.json"  # of such a folder
_ELSEWHERE = "its weights are stored under other names in the files"


def sketchify_checkpoint(
    source: str | PathLike[str],
    target: str | PathLike[str],
    ratio: float | Mapping[Selector, float] | None = None,
    *,
    plan: SketchPlan | None = None,
    data: Data | str | None = None,
    resume: str | PathLike[str] | None = None,
    config: SketchConfig | None = None,
    **options: Unpack[SketchOptions],
) -> SketchPlan:
    """Sketch a Hugging Face model from folder to folder, with the weights of few layers in memory at a time.

    The result is that of `sketchify` on the loaded model, to the bit; without data, of `synthetic=False`.
    With data that holds while what `sketchify` keeps of each kind fits into 2 GB: beyond, it leaves factors
    out that are kept here, and may choose other ranks.

    Args:
        source: a folder with `config.json` and safetensors files, whole or in shards.
        target: a new folder; `from_pretrained` loads it, once panther_compile is imported.
        ratio: see `sketchify`.
        plan: see `sketchify`.
        data: see `sketchify`. The model then runs, each layer's weights mapped from the files, and statistics
            and factors from temporary files beside the target, several times as large as the model. What
            stays in memory of the data is what all its tokens are within one layer, and all that autograd
            keeps of one batch: give batches of few texts. None goes by the weights alone, and runs nothing.
        resume: a folder, made if missing, to keep what was learnt and each sketched layer in; a later call
            with the same arguments goes on from there. It may be removed afterwards.
        config: see `sketchify`.
        **options: the fields of `SketchConfig`; layers are not timed, and not healed.

    Returns:
        The plan that was carried out.

    Raises:
        ConfigError: an option needs the model to run, the target exists, or see `sketchify`.
        ModelSourceError: the source is no folder of safetensors with a config that transformers knows.
        NoTargetError: nothing in it can be sketched.
        ResumeError: the folder is of another source or other options, or cannot be used.
        CheckpointError: a file cannot be written, or the target has come to be meanwhile.
        WeightError: a weight holds NaN or Inf.
    """
    given, place = checked_path(source, "source"), checked_path(target, "target")
    config = read_config(ratio, options, config)
    _check_options(config, with_data=data is not None)
    if plan is not None:
        check_recipe(plan, ratio, None, config)
    with _put_in_place(given, place) as (scratch, made):
        if data is not None:
            return sketch_with_data(given, made, scratch, data, replace(config, inplace=True), plan, resume)
        return _sketch_unseen(given, made, scratch, config, plan, resume)


@contextmanager
def _put_in_place(source: Path, place: Path) -> Iterator[tuple[Path, Path]]:
    """A scratch folder, and a place in it for the new folder, which is moved to its own at the end.

    Raises:
        ConfigError: the target exists.
        CheckpointError: a file cannot be read or written.
    """
    if os.path.lexists(place):
        raise ConfigError(f"target={str(place)!r} exists: a new folder is written")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(place.parent) as scratch:
            made = scratch / "made"
            yield scratch, made
            flush(*(file for file in made.rglob("*") if file.is_file()), made)
            made.rename(place)
        flush(place.parent)
    except PantherError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot sketch {source} into {place}: {error}") from error


def _sketch_unseen(
    given: Path,
    made: Path,
    scratch: Path,
    config: SketchConfig,
    plan: SketchPlan | None,
    resume: str | PathLike[str] | None,
) -> SketchPlan:
    """Sketch by the weights alone, and write the folder of the sketch; see `sketchify_checkpoint`."""
    with undisturbed(), freed_given_back():
        model = empty_model(given, dense=True)
        weights = StoredWeights(given, model)
        check_whole(given, weights.missing(model))
        check_sizes(given, weights.misfits(model))
        lift_own_weights(model)
        weights.read_lifted(model)
        work = scratch / "work" if resume is None else resume
        found, route = _found(model, weights, config if plan is None else config_for(plan, config, model))
        kept = WorkFolder(work, _MANIFEST, _identity(given, config, plan, found))
        chosen = _planned(model, found, config, plan, route, kept)
        done = _sketched(found, chosen, config, kept)
        made.mkdir()
        _write(made, given, model, weights, kept, done, SketchRecord.after(None, chosen, done.fitted))
    return chosen


@dataclass(frozen=True)
class StoredSite:
    """A `Site` whose module is read from the files each time that it is asked for."""

    site: Site
    weights: StoredWeights

    def __getattr__(self, name: str) -> Any:
        """What the site has."""
        return getattr(self.site, name)

    @property
    def module(self) -> nn.Module:
        """The dense layer, with its weights."""
        return self.weights.module(self.site.module, self.site.name)


def _check_options(config: SketchConfig, *, with_data: bool) -> None:
    """Raise ConfigError for what needs the model in memory, or without data, to run."""
    for option, given in (
        ("objective", config.objective == "latency" or (config.objective != "size" and not with_data)),
        ("refine", config.refine != "none"),
        ("inplace", config.inplace),
    ):
        if given:
            raise ConfigError(
                f"{option}={getattr(config, option)!r} needs the model in memory: load it and call sketchify"
            )


def _identity(source: Path, config: SketchConfig, plan: SketchPlan | None, found: Found) -> dict[str, str]:
    """What another source, plan or options would change; what selectors pick stands for them."""
    files = sorted(file for file in source.iterdir() if file.is_file())
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    options = {name: str(value) for name, value in asdict(config).items() if name not in _NOT_ASKED}
    budgets = config.ratios()

    def budget(site: Site) -> int:
        if len(budgets) == 1:  # without reading weights
            return 0
        return budget_of(site, config)

    ratios = [ratio for _, ratio in budgets], [(site.name, budget(site)) for site, _ in found.sites]
    return {
        "files": _digest(stamps),
        "ratio, include and exclude": _digest(ratios),
        "plan": "none" if plan is None else _digest(plan.to_json()),
        **{f"option {name}": value for name, value in options.items()},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _found(model: nn.Module, weights: StoredWeights, config: SketchConfig) -> tuple[Found, str]:
    """The sites, with their weights in the files; and how they were found."""
    reading = read_graph(model)
    found = find_sites(model, config, reading)
    sites: list[tuple[Site, Kind]] = []
    skipped = list(found.skipped)
    for site, kind in found.sites:
        held = [(site.name, site.module), *site.tied]
        names = [f"{name}.{part}" for name, module in held for part, _ in module.named_parameters()]
        if all(map(weights.has, names)):
            sites.append((cast(Site, StoredSite(site, weights)), kind))
        else:
            numbers = sum(parameter.numel() for parameter in site.module.parameters())
            shape = tuple(next(site.module.parameters()).shape)
            skipped.append(LayerPlan(site.name, site.kind, shape, numbers, None, _ELSEWHERE))
    return Found(tuple(sites), tuple(skipped), found.order), reading.route


def _planned(
    model: nn.Module,
    found: Found,
    config: SketchConfig,
    recipe: SketchPlan | None,
    route: str,
    work: WorkFolder,
) -> SketchPlan:
    """The plan for the sites, kept."""
    kept = work.read_json(_PLAN)
    if kept is not None:
        with work.refusing_changes(_PLAN):
            chosen = read_record(SketchPlan, kept, "the plan")
    else:
        check_weights(found, meta_allowed=True)
        if recipe is None:
            chosen = make_plan(found, config, route)
        else:
            chosen = follow(found, recipe, config, route, data=False)
        work.write_json(_PLAN, asdict(chosen))
    if not chosen.sketched:
        lines = "".join(f"\n  {line.name}: {line.reason}" for line in chosen.layers[:10])
        raise NoTargetError(f"nothing to sketch in {type(model).__name__}:{lines}")
    return chosen


@dataclass
class _Done:
    """What came of the layers.

    Attributes:
        layers: see `layers_to_json`.
        aliases: {other name: first name} of factors that tied layers share.
        fitted: by the name of the unit.
        sites: that were sketched, by name.
        dropped: names of the dense tensors.
    """

    layers: list[dict[str, Any]]
    aliases: dict[str, str]
    fitted: dict[str, Fitted]
    sites: list[str]
    dropped: set[str]


def _sketched(found: Found, plan: SketchPlan, config: SketchConfig, work: WorkFolder) -> _Done:
    """Sketch every layer of the plan that is not done yet."""
    choices = plan.choices
    done = _Done([], {}, {}, [], set())

    def left(item: tuple[Site, Kind]) -> float:
        return 0.0 if work.has(file_of_layer(item[0].name)) else work_on(*item)

    for site, kind in with_progress(found.sites, left, desc="sketch", progress=config.progress):
        file = file_of_layer(site.name)
        if not work.has(file):
            made = sketch_site(site, kind, choices, config)
            if made is None:
                continue
            layer, fitted = made
            placed = {site.name: layer}
            for name, other in site.tied:
                assert isinstance(layer, SketchedLayer)
                placed[name] = kind.share(layer, cast(StoredSite, site).weights.module(other, name))
            work.write_tensors(file, *_described(placed, fitted))
        record = work.read_record(file)
        assert record is not None  # it is there by now
        done.layers += record["layers"]
        done.aliases |= record["aliases"]
        done.fitted |= {name: read_record(Fitted, one, file) for name, one in record["fitted"].items()}
        done.sites.append(site.name)
        dense = [(site.name, cast(StoredSite, site).site.module), *site.tied]
        done.dropped |= {f"{name}.{part}" for name, module in dense for part, _ in module.named_parameters()}
    return done


def _described(
    placed: Mapping[str, nn.Module], fitted: Mapping[str, Fitted]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The factors of a layer, and of those tied to it, and what says how to make them again."""
    layers: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for place, module in placed.items():
        for entry in layers_to_json(module, list(outermost(module))):
            layers.append(entry | {"name": dotted(place, entry["name"])})
        for part, value in module.state_dict(keep_vars=True).items():
            full = f"{place}.{part}"
            if first.setdefault(id(value), full) == full:
                tensors[full] = value
            else:
                aliases[full] = first[id(value)]
    record = {
        "layers": layers,
        "aliases": aliases,
        "fitted": {unit: asdict(one) for unit, one in fitted.items()},
    }
    return tensors, record


def _write(
    folder: Path,
    source: Path,
    model: Any,
    weights: StoredWeights,
    work: WorkFolder,
    done: _Done,
    record: SketchRecord,
) -> None:
    """Write the folder that `from_pretrained` reads."""
    name = type(model).__name__
    saved = [read_record(SavedLayer, entry, str(source)) for entry in done.layers]
    replace_inside(model, empty_layers(model, saved, name, source))
    lower_own_weights(model)
    refused = empty_weights(model)
    aliases = parameter_aliases(model) | done.aliases
    model.config.quantization_config = SketchedModelConfig(
        done.layers, aliases, name, ignored=list(refused), base=base_name(model.config)
    )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from refused.items()
        yield from weights.others(model, done.dropped)
        for site in done.sites:
            yield from work.read_tensors(file_of_layer(site))

    metadata = {"format": "pt", RECORD_KEY: json.dumps(record_to_json(record))}
    _write_shards(folder, tensors(), metadata)
    model.config.save_pretrained(folder)
    copy_beside(source, folder)
    keep_record(model, record)
    write_model_card(model, folder)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Write tensors to files of at most SHARD_BYTES, and their index if there are several."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def put() -> None:
        save_file(held, folder / f"{len(shards)}.draft", metadata)
        shards.append(list(held))
        held.clear()

    for name, value in tensors:
        if held and size + value.nbytes > SHARD_BYTES:
            put()
            size = 0
        held[name] = value
        size += value.nbytes
        total += value.nbytes
    put()
    if len(shards) == 1:
        (folder / "0.draft").rename(folder / WEIGHTS)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.draft").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
