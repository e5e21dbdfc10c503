"""Layers whose forward no tracer can follow are one node in a graph of torch.fx, as those of torch.nn are."""

import torch
from torch import fx, nn

import panther_compile as pc


class Traced(nn.Module):
    """Layers that torch.fx keeps whole, called by place and by name."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.lstm, self.cells = nn.LSTM(16, 16, batch_first=True), nn.ModuleList([nn.GRUCell(16, 16)])
        self.last = nn.LSTMCell(16, 16)

    def forward(self, x, hidden):
        out, _ = self.attention(x, x, value=x, need_weights=False, key_padding_mask=hidden)
        out, (state, cell) = self.lstm(out)
        return self.last(self.cells[0](out[:, 0], hx=state[0]), (state[0], cell[0]))[0]


def test_a_sketch_is_traced_as_the_model_is():
    torch.manual_seed(0)
    model = Traced().eval()
    small = pc.sketchify(model, 0.5, min_params=0, allow_slower=True, synthetic=False)
    given = torch.randn(2, 3, 16), torch.tensor([[False, False, True]] * 2)
    graph = fx.symbolic_trace(small)
    assert torch.equal(graph(*given), small(*given))
    called = [
        [n.target for n in fx.symbolic_trace(one).graph.nodes if n.op == "call_module"]
        for one in (model, small)
    ]
    assert called[0] == called[1] == ["attention", "lstm", "cells.0", "last"]
