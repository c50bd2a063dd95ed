"""Compiled graphs without CUDA graphs: Inductor writes take and put itself, by their definition."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD

from networks import NETWORKS, build, data, train_step
from opcases import listed
from sliceout import Slice
from sliceout import nn as snn
from sliceout.drawing import owner_of
from sliceout.ops import inductor, library, reference, take
from sliceout.ops.placement import is_channels_last
from sliceout.takes import Take
from test_compile import assert_same_training, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def on_cpu(monkeypatch) -> Iterator[None]:
    """As on a GPU; what is compiled is not kept, since others on this machine expect something else of it."""
    monkeypatch.setattr(inductor, "DEVICES", ("cpu", "cuda"))
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.slow
def test_every_kind_of_take_and_put_equals_its_definition(on_cpu):
    found = [c for c in listed() if c.layout != "transposed" and max(c.shape) < 1000]
    assert len(found) > 10
    fulls = [c.full() for c in found]

    def both(fulls: list[Tensor], smalls: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        ops = torch.ops.sliceout
        return [
            (
                ops.take(full, *c.args, c.target),
                ops.put(small, *c.args, full.shape, is_channels_last(full), c.dtype),
            )
            for c, full, small in zip(found, fulls, smalls, strict=True)
        ]

    smalls = [torch.randn_like(library._take(f, *c.args, c.target)) for c, f in zip(found, fulls, strict=True)]
    taken, (code, *_) = run_and_get_code(torch.compile(both, fullgraph=True), fulls, smalls)
    assert "sliceout" not in code.replace("sliceout::", "")
    for c, full, small, (ours, put) in zip(found, fulls, smalls, taken, strict=True):
        want = reference.take(full, *c.args, c.target), reference.put(small, *c.args, c.dtype)
        tolerance = {"rtol": 1e-2 if torch.bfloat16 in (c.dtype, c.target) else 1e-6, "atol": 0.0}
        torch.testing.assert_close(ours, want[0], msg=lambda m, c=c: f"{c}: {m}", **tolerance)
        torch.testing.assert_close(put, want[1], msg=lambda m, c=c: f"{c}: {m}", **tolerance)
        assert put.stride() == full.stride(), c


@pytest.mark.slow
def test_parts_are_stacked_and_added_up_by_their_definition(on_cpu):
    """Rows and columns, with one start for all parts or one for each; scales of single units; float32 to bfloat16."""
    many, one = Slice(16, 0.5, align=1, parts=3), Slice(24, 0.5, sampling="window")
    for s in (many, one):
        owner_of(s).seek_(5)
    axes = [
        (many.axis(), None),
        (None, many.axis(inner=2)),
        (one.axis(), many.axis(blocks=2)),
        (many.axis(), one.axis()),
    ]
    takes = [Take(rows, cols, True, True) for rows, cols in axes]
    fulls = [torch.randn(*(4 if a is None else a.size for a in t[:2]), dtype=torch.float64) for t in takes]
    fulls += [fulls[-1].float(), torch.randn(16)]
    takes += [takes[-1], Take(many.axis())]
    dtypes = [None] * 4 + [torch.bfloat16, None]

    def both(fulls):
        smalls = [take(f, t, d, parts=3) for f, t, d in zip(fulls, takes, dtypes, strict=True)]
        return smalls, torch.autograd.grad([s.float().pow(2).sum() for s in smalls], fulls)

    for f in fulls:
        f.requires_grad_()
    smalls, grads = both(fulls)
    (fast, fast_grads), code = run_and_get_code(torch.compile(both), fulls)
    assert "sliceout" not in "".join(code).replace("sliceout::", "")
    for ours, want in zip((*fast, *fast_grads), (*smalls, *grads), strict=True):
        tolerance = 1e-2 if torch.bfloat16 in (want.dtype, ours.dtype) or want is grads[4] else 1e-6
        torch.testing.assert_close(ours, want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_training_by_parts_equals_eager_training(name, on_cpu, float64):
    model, twin, x = build(name, parts=4), build(name, parts=4), data(name)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_training(compiled(model, "inductor"), twin, x)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "grads"), [*((name, "dense") for name in NETWORKS), ("convnet", "compact")])
def test_training_equals_eager_training(name, grads, on_cpu, float64):
    settings = {"sampling": "window", "grads": grads}
    model, twin, x = build(name, **settings), build(name, **settings), data(name)
    if name == "convnet":
        model, twin, x = (t.to(memory_format=torch.channels_last) for t in (model, twin, x))
    with torch._dynamo.config.patch(error_on_recompile=True), sdpa_kernel(SDPBackend.MATH):
        assert_same_training(compiled(model, "inductor"), twin, x)


@pytest.mark.slow
def test_parts_copy_no_activation(tmp_path):
    """Code for a GPU: parts need no kernel more than one slice. Torch 2.11 copies what is reshaped in one step."""
    pytest.importorskip("triton", reason="triton is not installed")
    program = Path(__file__).with_name("cuda_code.py")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, program], check=True, capture_output=True, env=environment)
    found = json.loads(done.stdout)
    for one, by_parts in zip(found["1"], found["8"], strict=True):
        over_activations = [k for k in by_parts if k["activations"]]
        assert over_activations, "the sizes are too small to tell activations"
        assert not [k["name"] for k in over_activations if k["copies"] or k["stores twice"]]
        assert len(over_activations) <= sum(k["activations"] for k in one)
        assert len(by_parts) <= len(one)


def calls(x: Tensor, **options) -> int:
    """How many of our operations the code for a small network calls."""
    torch._dynamo.reset()
    s = Slice(8)
    layers = snn.Conv2d(3, 8, 1, out_slice=s, bias=False), snn.BatchNorm2d(8, slice=s), snn.Conv2d(8, 4, 1, in_slice=s)
    model = torch.nn.Sequential(*layers).to(x.device)
    fast = torch.compile(model, fullgraph=True, options=options)
    _, code = run_and_get_code(lambda: train_step(fast, x, SGD(model.parameters(), lr=0.1)))
    return sum(text.count("torch.ops.sliceout.") for text in code)


def test_operations_are_inlined_whether_or_not_a_graph_replays_them(on_cpu):
    x = torch.randn(2, 3, 4, 4)
    assert calls(x) == 0
    assert calls(x, **{"triton.cudagraphs": True}) == 0


def test_on_the_cpu_they_are_called():
    assert calls(torch.randn(2, 3, 4, 4)) >= 6


def test_code_on_disk_is_found_by_the_version_that_made_it_alone():
    calls(torch.randn(2, 3, 4, 4))
    made_by = hashlib.sha256(Path(inductor.__file__).with_name("lowerings.py").read_bytes()).hexdigest()
    assert made_by[:16] in torch.compiler.config.cache_key_tag


def test_importing_the_library_leaves_the_compiler_alone():
    """Neither torch's configuration nor Inductor is touched before an op of ours is traced."""
    code = """
import sys, torch
before, modules = torch.compiler.config.cache_key_tag, set(sys.modules)
import sliceout
assert torch.compiler.config.cache_key_tag == before
assert "torch._inductor.lowering" not in set(sys.modules) - modules
sliceout.nn.Linear(2, 4, out_slice=sliceout.Slice(4))
assert torch.compiler.config.cache_key_tag == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_inductor_that_has_moved_is_survived(monkeypatch, caplog):
    """The ops are called then; what was registered before must not be registered again."""
    monkeypatch.delattr("torch._inductor.lowering.make_fallback")
    inductor._register.__wrapped__()
    assert "is not as expected" in caplog.text
    assert "called, not inlined" in caplog.text
