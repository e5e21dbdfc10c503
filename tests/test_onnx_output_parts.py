"""Detectors' outputs, boxes in pixels beside chances: judged and fitted part by part."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import OPTIONS, make, node, random, run

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.onnx.as_torch import as_tensors
from panther_compile.onnx.data import ObservedModel
from panther_compile.onnx.files import read_model
from panther_compile.onnx.fit_in_torch import module_of
from panther_compile.onnx.output_parts import in_parts, parts_of
from panther_compile.onnx.sites import find_onnx_sites
from panther_compile.onnx.verify import compare_files

RNG = np.random.default_rng(0)
BOXES, CHANCES = "y[:, 0:4]", "y[:, 4:7]"


def pictures(count):
    return RNG.standard_normal((count, 3, 8, 8)).astype(np.float32)


def head(level, chance="Sigmoid"):
    """Four numbers of a box and three chances of each place of a map."""
    return [
        node("Conv", ["h", f"box{level}"], [f"b{level}"]),
        node("Conv", ["h", f"class{level}"], [f"c{level}"]),
        node(chance, [f"c{level}"], [f"p{level}"]),
    ]


def weights(*levels):
    found = {"first": random(32, 3, 3, 3), "second": random(32, 32, 3, 3)}
    found |= {f"box{level}": random(4, 32, 1, 1) for level in levels}
    return found | {f"class{level}": random(3, 32, 1, 1) for level in levels}


BODY = [
    node("Conv", ["x", "first"], ["f"], kernel_shape=[3, 3], pads=[1] * 4),
    node("Relu", ["f"], ["g"]),
    node("Conv", ["g", "second"], ["s"], kernel_shape=[3, 3], pads=[1] * 4),
    node("Relu", ["s"], ["h"]),
]


def one_map(path, chance="Sigmoid"):
    """Boxes where their anchors are, in pixels, as YOLOv8 has them: (N, 7, 64)."""
    anchors = np.linspace(0, 640, 4 * 64, dtype=np.float32).reshape(1, 4, 64)
    nodes = [
        *BODY,
        *head("", chance),
        node("Reshape", ["b", "places"], ["boxes"]),
        node("Add", ["boxes", "anchors"], ["pixels"]),
        node("Reshape", ["p", "classes"], ["chances"]),
        node("Concat", ["pixels", "chances"], ["y"], axis=1),
    ]
    shapes = {"places": np.array([-1, 4, 64]), "classes": np.array([-1, 3, 64]), "anchors": anchors}
    return make(path, nodes, weights("") | shapes, x=("n", 3, 8, 8))


def two_maps(path):
    """Heads joined place by place, then map by map, as YOLOX has them: (N, 128, 7)."""
    nodes = [*BODY, *head(0), *head(1)]
    for level in (0, 1):
        nodes.append(node("Concat", [f"b{level}", f"p{level}"], [f"both{level}"], axis=1))
        nodes.append(node("Reshape", [f"both{level}", "flat"], [f"all{level}"]))
    nodes += [
        node("Concat", ["all0", "all1"], ["all"], axis=2),
        node("Transpose", ["all"], ["y"], perm=[0, 2, 1]),
    ]
    return make(path, nodes, weights(0, 1) | {"flat": np.array([1, 7, 64])}, x=(1, 3, 8, 8))


def of_file(path):
    return {name: [one.name(name) for one in parts] for name, parts in parts_of(ir.load(path)).items()}


def test_boxes_and_chances_are_parts(tmp_path):
    assert of_file(one_map(tmp_path / "one.onnx")) == {"y": [BOXES, CHANCES]}
    assert of_file(two_maps(tmp_path / "two.onnx")) == {"y": ["y[:, :, 0:4]", "y[:, :, 4:7]"]}
    assert of_file(one_map(tmp_path / "numbers.onnx", chance="Relu")) == {}


def test_parts_are_those_entries(tmp_path):
    path, x = one_map(tmp_path / "one.onnx"), pictures(2)
    (whole,) = run(path, x)
    found = in_parts({"y": whole, "z": x}, parts_of(ir.load(path)))
    assert list(found) == [BOXES, CHANCES, "z"]
    assert np.array_equal(np.concatenate([found[BOXES], found[CHANCES]], 1), whole)


def test_chances_that_say_nothing_are_not_hidden_by_pixels(tmp_path):
    path = one_map(tmp_path / "one.onnx")
    model = onnx.load(path)
    (kernel,) = (one for one in model.graph.initializer if one.name == "class")
    kernel.CopyFrom(onnx.numpy_helper.from_array(np.zeros((3, 32, 1, 1), np.float32), "class"))
    onnx.save(model, tmp_path / "blind.onnx")
    found = compare_files(path, tmp_path / "blind.onnx", [{"x": pictures(16)}])
    assert found.closeness.grade == "destroyed"
    assert found.errors[BOXES] == 0.0 < 0.1 < found.errors[CHANCES]


def test_a_part_counts_by_how_it_varies(tmp_path):
    path = one_map(tmp_path / "one.onnx")
    model = read_model(path)
    sites, dense = find_onnx_sites(model, SketchConfig(min_params=64)), ObservedModel(model, (), tmp_path)
    feeds = dense.feeds([pictures(8) for _ in range(4)])
    module = module_of(model, sites, dense, feeds)
    results = [module(**as_tensors(feed)) for feed in feeds]
    assert list(results[0]) == [BOXES, CHANCES]
    mean = sum(one[BOXES].mean(0) for one in results)
    assert float(mean.abs().max()) < 1e-3
    assert all(float(one[CHANCES].min()) >= 0.0 for one in results)
    few = module_of(model, sites, dense, feeds[:1])
    assert float(few(**as_tensors(feeds[0]))[BOXES].abs().max()) > 600


@pytest.mark.parametrize("then", ["none", "int8"])
def test_report_tells_of_each_part(tmp_path, then):
    path = one_map(tmp_path / "one.onnx")
    data = [{"x": pictures(8)} for _ in range(6)]
    report = pc.sketch_onnx(path, tmp_path / "small.onnx", 0.9, data=data, then=then, **OPTIONS)
    assert set(report.output_errors) == {BOXES, CHANCES}
    assert f"output {CHANCES}: relative error" in str(report)
    (found,), (wanted,) = (run(one, pictures(2)) for one in (tmp_path / "small.onnx", path))
    assert found.shape == wanted.shape
