"""Every route of the library, for a model with layers of one kind; each says what was expected of it."""

import copy
import re
from unittest import mock

import onnx
import onnxruntime
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.kinds.registry import kind_of
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.planning import timing
from panther_compile.planning.plan import PAYS
from panther_compile.planning.trace import SketchTracer

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False}


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def sketched_layers(model, layer_types):
    found = [layer for layer in outermost(model) if isinstance(layer, layer_types)]
    assert found, "no layer of the kind was sketched"
    return found


def opened(layer):
    """The replacement with dense parts: torch's arithmetic, weight by weight."""
    kind = kind_of(layer)
    return kind.assemble(layer, kind.parts(layer))


def by_weights(model, x, layer_types):
    """Sketched, densified, saved and loaded, reported on; full rank in all but name gives the model back."""
    before = copy.deepcopy(model.state_dict())
    small = pc.sketchify(model, 0.6, **OPTIONS)
    sketched_layers(small, layer_types)
    assert small(x).shape == model(x).shape
    assert small.training == model.training
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-4)
    report = pc.sketch_report(small)
    assert report.replaced_stored_numbers <= 0.6 * report.replaced_dense_numbers
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    small(x).square().mean().backward()
    for layer in sketched_layers(small, layer_types):
        assert all(parameter.grad is not None for parameter in layer.parameters())
    return small


def saved_and_loaded(small, skeleton, x, directory):
    pc.save_sketched(small, directory)
    again = pc.load_sketched(skeleton, directory)
    assert torch.equal(again(x), small(x))


def by_data(model, batches, x, layer_types):
    """Fitted to data: closer to the dense model than by the weights alone."""
    small = pc.sketchify(model, 0.4, data=batches, **OPTIONS)
    layers = sketched_layers(small, layer_types)
    fitted = vars(small)["_panther_sketch"].fitted
    assert any(one.method == "calibrated" for one in fitted.values())
    plain = pc.sketchify(model, 0.4, **OPTIONS)
    with torch.no_grad():
        assert relative(small(x), model(x)) < 1.02 * relative(plain(x), model(x))
    return layers


def by_latency(model, x):
    """Timed, whether it pays or not."""
    options = {"min_params": 0, "progress": False, "objective": "latency", "example_inputs": x}
    with mock.patch.multiple(timing, _PAIR_SECONDS=2e-3, _MODEL_SECONDS=0.05):  # noise decides, as it may
        try:
            small = pc.sketchify(model, 0.3, **options)
        except NoTargetError as error:
            refusal = str(error)
        else:
            refusal = None
    if refusal is not None:
        assert re.search(r"of the dense speed|no layer has a sketch", refusal)
        return
    seconds = pc.sketch_report(small).seconds  # of the whole: what gains nothing alone may gain together
    assert seconds["dense"] >= PAYS * seconds["sketched"]
    assert small(x).shape == model(x).shape


def healed(model, batches, x):
    small = pc.sketchify(model, 0.4, **OPTIONS)
    better = pc.heal(small, teacher=model, data=batches, steps=3, progress=False)
    assert better(x).shape == model(x).shape


def as_skeleton(build, small):
    """Without weights: the same ranks as the planner gives a model on the meta device."""
    with torch.device("meta"):
        made = pc.sketch_skeleton(build(), 0.6, **OPTIONS)
    names = {name for name, module in small.named_modules() if isinstance(module, SketchedLayer)}
    assert names == {name for name, module in made.named_modules() if isinstance(module, SketchedLayer)}
    assert all(parameter.is_meta for parameter in made.parameters())


def compiled(model, x, layer_types):
    """By the backend, dense and sketched."""
    torch._dynamo.reset()
    model = copy.deepcopy(model).eval()
    small = pc.sketchify(model, 0.6, **OPTIONS)
    sketched_layers(small, layer_types)
    options = {"inner": "eager", **OPTIONS}
    with torch.no_grad():
        wanted = small(x)
        found = torch.compile(small, backend="panther", options=options)(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        dense = torch.compile(model, backend="panther", options={**options, "ratio": 0.6})(x)
        assert dense.shape == wanted.shape
        return relative(dense, model(x))


def exported(small, x, path):
    pc.export_onnx(small.eval(), (x,), path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small(x).detach(), rtol=1e-3, atol=1e-4)


def onnx_sketched(model, x, folder, op_type):
    """The dense model's file, sketched with and without data; the report names the nodes of the kind."""
    dense, plain, fitted = (folder / name for name in ("dense.onnx", "plain.onnx", "fitted.onnx"))
    pc.export_onnx(model.eval(), (x,), dense)
    report = pc.sketch_onnx(dense, plain, ratio=0.5, min_params=0, allow_slower=True, progress=False)
    assert any(line.kind == op_type and line.choice for line in report.plan.layers), str(report)
    feeds = [{onnx.load(dense).graph.input[0].name: x.numpy()} for _ in range(2)]
    options = {"data": feeds, "min_params": 0, "allow_slower": True, "progress": False}
    pc.sketch_onnx(dense, fitted, ratio=0.5, **options)
    with torch.no_grad():
        wanted = model(x)
    errors = []
    for path in (plain, fitted):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert found.shape == tuple(wanted.shape)
        errors.append(relative(torch.from_numpy(found), wanted))
    assert errors[1] < 1.02 * errors[0]


def partitioned(small, x):
    part = pc.partition_model(small, (x,), mesh={"pp": 2}, microbatches=2)
    assert len(part.stages) == 2


def traced(model, x, layer_types):
    """A graph keeps whole what could be sketched."""
    graph = torch.fx.GraphModule(model.eval(), SketchTracer().trace(model))
    small = pc.sketchify(graph, 0.6, **OPTIONS)
    sketched_layers(small, layer_types)
    assert small(x).shape == model(x).shape


class Made(nn.Module):
    """Layers of one kind between linear ones would hide the kind: these are all of the kind but the last."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)
