"""What a compiler fuses: bytes moved, and bytes kept beside those that AOTAutograd keeps."""

import pytest
import torch
import zoo
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from panther_compile.errors import ConfigError
from panther_compile.partition import partition_model
from panther_compile.partition.graph.capture import capture, example_arguments
from panther_compile.partition.graph.fused import fuse
from panther_compile.partition.graph.observe import fold_shapes, observe

ROWS, WIDTH = 8, 16
WHOLE = ROWS * WIDTH * 4  # bytes of a tensor


class Gated(nn.Module):
    """Two products, what lies between them, and a residual sum."""

    def __init__(self):
        super().__init__()
        self.gate, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.gate(x)
        h = h * torch.sigmoid(h) + 1
        return x + self.down(h)


def fused(model, inputs):
    captured = capture(model, *example_arguments(inputs))
    notes = observe(captured)
    fold_shapes(captured, notes)
    made = fuse(captured, notes)
    return {node: (notes[node], made[node]) for node in captured.graph_module.graph.nodes}


def test_a_kernel_reads_its_inputs_and_writes_what_is_used_outside():
    notes = {node.name: after for node, (_, after) in fused(Gated(), torch.randn(ROWS, WIDTH)).items()}

    def moved(name):
        return sum(one.activations for one in notes[name].products)

    # The sigmoid is the first to read, the sum the last to write; the product between is never in memory.
    assert [moved(name) for name in ("sigmoid", "mul", "add")] == [WHOLE, 0, WHOLE]
    assert moved("add_1") == 3 * WHOLE
    # Two products keep what they read. The kernel between is computed again from what it read.
    assert sum(note.saved_bytes for note in notes.values()) == 3 * WHOLE


def test_what_is_kept_has_the_fewest_bytes():
    class Wide(nn.Module):
        def forward(self, x):
            return x.float().exp().sin().sum()

    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    found = fused(Wide(), x)
    eager, kept = (sum(pair[place].saved_bytes for pair in found.values()) for place in (0, 1))
    assert eager == WHOLE  # the exponential, in float32
    assert kept == WHOLE // 2  # x


def test_what_is_written_in_place_is_left_alone():
    class Writes(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, 0] = 0
            return y.exp() + x

    for node, (before, after) in fused(Writes(), torch.randn(ROWS, WIDTH)).items():
        if node.name in ("mul", "fill_", "copy_", "exp"):
            assert after.products == before.products


MODELS = ("llama", "bert", "vit", "whisper")


@pytest.mark.parametrize("name", ["gated", *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS)])
def test_compilers_keep_as_much(name):
    model, inputs = Gated(), (torch.randn(ROWS, WIDTH),)
    if name != "gated":
        model, inputs = zoo.ZOO[name].build().train(), zoo.ZOO[name].inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a mask is kept, or a seed, as the compiler's options say
    predicted = sum(after.saved_bytes for _, after in fused(model, inputs).values())
    held = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        zoo.call(torch.compile(model, backend="aot_eager_decomp_partition"), inputs)
    sizes = (one.untyped_storage().nbytes() for key, one in kept.items() if key not in held)
    assert predicted == pytest.approx(sum(sizes), rel=0.1)


def test_a_compiled_model_is_predicted_to_be_faster_and_smaller():
    model, x = Gated(), torch.randn(ROWS, WIDTH)
    for mesh in ({}, {"tp": 2}):
        eager, compiled = (
            partition_model(model, x, mesh=mesh, hardware="cpu", microbatches=1, compiled=one)
            for one in (False, True)
        )
        assert compiled.step_seconds < eager.step_seconds
        assert compiled.device_memory_bytes < eager.device_memory_bytes
    with pytest.raises(ConfigError, match=r"compiled=True asks for others"):
        partition_model(model, x, mesh={}, compiled=True, profile=True)
