"""Converted models compile as one graph without breaks, and no draw recompiles it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sliceout
from models import build, call

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["wide resnet", "timm efficientnet", "vit", "gpt2", "llama"])
def test_one_graph_over_all_draws_equal_to_eager(name):
    model, x = build(name)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if hasattr(model, "config"):
        x = {**x, "use_cache": False}
    report = sliceout.convert_(model, 0.5)
    model.train()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    seen = set()
    for _ in range(5):
        sliceout.draw_(model)
        seen.add(tuple(s.start_on_host for s in report.slices))
        got, expected = call(compiled, x), call(model, x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(seen) > 1
    assert len(graphs) == 1
