"""convert_ with parts: what the trace proves of the batch; models against their masked selves, part by part."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import sliceout
from models import build, call
from networks import Attention
from sliceout.conversion.reasons import Skip
from sliceout_lab.models import TransformerLM
from sliceout_lab.oracle import masked_dense_
from test_convert_oracle import LOOSE, close, pair
from test_parts import only_part

WITHOUT_BATCH_NORM = (
    "mlp", "two branches", "chunked", "convnext", "vit", "swin", "gpt2", "bert", "llama", "transformer encoder",
)  # fmt: skip
BY_PARTS = {"mlp": 2, "two branches": 2, "chunked": 1, "convnext": 9, "vit": 6, "swin": 9, "gpt2": 6, "bert": 6,
            "llama": 4, "transformer encoder": 6}  # fmt: skip
"""How many groups have parts."""


def chunk(x, parts: int, part: int):
    return tree_map(lambda t: t.chunk(parts)[part] if isinstance(t, Tensor) else t, x)


def by_parts(name: str, full: nn.Module, report, x, parts: int) -> tuple[Tensor, list[nn.Module]]:
    """What the masked networks of all parts compute, and these networks."""
    slices, outputs, networks = list(report.slices), [], []
    for part in range(parts):
        with only_part(slices, part):
            networks.append(masked_dense_(copy.deepcopy(full), report))
        outputs.append(call(networks[-1], chunk(x, parts, part)))
    return torch.cat(outputs), networks


@pytest.mark.parametrize("settings", [
    {}, {"attention": "heads"}, {"attention": "values"}, {"sampling": "window", "norm": "flow"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
def test_training_forward_is_that_of_the_masked_network_of_each_part(name, settings):
    full, sliced, report, x = pair(name, parts=2, **settings)
    if "attention" not in settings:
        assert sum(s.parts == 2 for s in report.slices) >= BY_PARTS[name], str(report)
    assert any(len(set(s.starts_on_host)) == 2 for s in report.slices)
    expected, _ = by_parts(name, full, report, x, 2)
    close(call(sliced, x), expected, LOOSE.get(name, 1e-12))
    with only_part(list(report.slices), 0):
        other = call(masked_dense_(copy.deepcopy(full), report), x)
    assert not torch.allclose(expected, other, rtol=1e-3), "the parts are all alike: the test would be vacuous"


@pytest.mark.parametrize("name", ["mlp", "two branches", "chunked", "vit", "gpt2", "bert"])
def test_gradients_are_those_of_the_masked_network_of_each_part(name):
    full, sliced, report, x = pair(name, parts=2)
    expected, networks = by_parts(name, full, report, x, 2)
    expected.square().sum().backward()
    call(sliced, x).square().sum().backward()
    inside = {m.module for r in report.rows if r.slice is not None for m in r.group.members if m.role == "unit"}
    own, compared = dict(full.named_parameters()), 0
    for key, p in sliced.named_parameters():
        if key.rpartition(".")[0] in inside:
            continue  # the oracle's norms hold copies of their parameters
        of_parts = [dict(network.named_parameters())[key] for network in networks]
        want = sum(q.grad * (q / own[key]).detach() for q in of_parts)
        close(p.grad, want, 1e-10)
        compared += 1
    assert compared > 3


@pytest.mark.parametrize("batch", [1, 3, 5, 6, 8])
def test_any_batch_trains(batch):
    """The trace saw two samples; what comes later has the largest number of parts that divides it."""
    model, x = build("gpt2")
    model.train()
    report = sliceout.convert_(model, 0.5, parts=4)
    call(model, {"input_ids": x["input_ids"][:1].repeat(batch, 1)}).sum().backward()
    assert all(s.parts == 4 for s in report.slices)


# -- where dimension 0 is not the batch, or does not stay it -----------------------------------------------------------


class Feed(nn.Module):
    """A hidden layer between two functions of the activations."""

    def __init__(self, before=lambda x: x, between=lambda x: x, after=lambda x: x) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)
        self.before, self.between, self.after = before, between, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.between(F.gelu(self.up(self.before(x))))))


def centred(x: Tensor) -> Tensor:
    """Without the mean over the tokens of a sample."""
    return x - x.mean(1, keepdim=True)


def one_part(model: nn.Module, x) -> list[str]:
    """The reasons of all groups that are sliced; empty where they have parts."""
    report = sliceout.convert_(model, 0.5, parts=4, example_inputs=x)
    rows = [r for r in report.rows if r.slice is not None]
    for row in rows:
        assert (row.slice.parts == 1) == (row.one_part is not None)
        assert row.one_part is None or row.one_part.code is Skip.ONE_PART
        assert row.one_part is None or str(row.one_part)[:40] in str(report)
    return [str(row.one_part or "") for row in rows]


def test_a_batch_that_is_flattened_with_time_has_parts():
    model = Feed(lambda x: x.flatten(0, 1), after=lambda x: x.unflatten(0, (2, 5)))
    assert one_part(model, torch.zeros(2, 5, 6)) == [""]


@pytest.mark.parametrize(("model", "why"), [
    (Feed(lambda x: x.transpose(0, 1), after=lambda x: x.transpose(0, 1)), "batch in dimension 0"),
    (Feed(lambda x: x.transpose(0, 1).flatten(0, 1)), "batch in dimension 0"),
    (Feed(between=lambda x: x.flatten(0, 1), after=lambda x: x.view(2, 5, 6)), "flattened in different ways"),
    (Feed(between=lambda x: x + x.roll(1, 0)), "is mixed while these units are sliced"),
    (Feed(between=lambda x: x - x.mean(0, keepdim=True)), "is mixed while these units are sliced"),
    (Feed(between=lambda x: x[torch.arange(1, -1, -1)]), "batch in dimension 0"),
    (Feed(between=lambda x: torch.cat([x[:1], x[1:]])), "batch in dimension 0"),
    (Feed(lambda x: x.flatten(0, 1), lambda x: centred(x.view(2, 5, -1)).flatten(0, 1), lambda x: x.view(2, 5, 6)),
     "is mixed while these units are sliced"),
])  # fmt: skip
def test_what_the_trace_cannot_prove_has_one_part(model, why):
    (reason,) = one_part(model, torch.zeros(2, 5, 6))
    assert why in reason


def test_mixing_samples_elsewhere_does_not_matter():
    """In-batch statistics of whole activations are somebody else's business."""
    assert one_part(Feed(before=lambda x: x - x.mean(0), after=lambda x: x @ x[0].T), torch.zeros(2, 5, 6)) == [""]


class FlatAttention(nn.Module):
    """All linear layers see [batch * time, units], as code for packed sequences has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        m, (n, t, _) = self.inner, x.shape
        flat = x.flatten(0, 1)
        q, k, v = m.qkv(m.norm1(flat)).view(n, t, 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n * t, -1)
        flat = flat + m.proj(y)
        return (flat + m.fc2(F.gelu(m.fc1(m.norm2(flat))))).view(n, t, -1)


def test_tokens_that_attend_to_each_other_stay_in_one_part():
    """A part of [batch * time] may end inside a sample: its queries would meet keys of another slice."""
    model = FlatAttention()
    report = sliceout.convert_(model, 0.5, parts=4, example_inputs=torch.zeros(2, 5, 16))
    parts = {r.name: r.slice.parts for r in report.rows if r.slice is not None}
    assert parts == {"inner.qkv": 1, "inner.fc1": 4}
    assert report.converted == 3  # q with k, v, and the feed-forward layer


@pytest.mark.parametrize("batch_first", [True, False])
def test_time_first_transformers_of_torch_have_one_part(batch_first):
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=batch_first, dropout=0.0)
    reasons = one_part(layer, torch.zeros(3, 5, 16))
    assert len(reasons) == 3
    assert all(("attention runs along dimension 0" in r) is not batch_first for r in reasons)


def test_one_sample_proves_nothing():
    assert "has a single sample" in one_part(Feed(), torch.zeros(1, 6))[0]


def test_convolutions_and_batch_norms_share_a_slice_and_the_report_says_so():
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5),
    )  # fmt: skip
    report = sliceout.convert_(net, 0.5, parts=4, example_inputs=torch.zeros(2, 3, 8, 8))
    parts = {r.name: r.slice.parts for r in report.rows if r.slice is not None}
    assert parts == {"0": 1, "2": 1, "5": 4, "7": 1}
    text = str(report)
    assert "one slice for the whole batch:\n  0, 2: Conv2d: with 8 parts a Wide ResNet learned worse" in text
    assert "7: BatchNorm1d: the whole batch shares the statistics of a batch norm" in text
    assert "; 4 parts)" in text.partition("\n")[0]
    assert [g["parts"] for g in report.as_dict()["groups"]][:2] == [1, 1]
    net(torch.randn(8, 3, 8, 8)).sum().backward()


def test_a_layer_with_its_own_forward_has_one_weight():
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias) * 2

    (reason,) = one_part(nn.Sequential(Own(6, 32), nn.ReLU(), nn.Linear(32, 3)), torch.zeros(2, 6))
    assert reason == "Own: it keeps its own forward, which knows of one weight"


@pytest.mark.parametrize("parts", [0, -1, 1.5, "8"])
def test_bad_parts_leave_the_model_alone(parts):
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    with pytest.raises((ValueError, TypeError), match=f"parts={parts!r}: expected"):
        sliceout.convert_(model, 0.5, parts=parts)
    assert type(model[0]) is nn.Linear


def test_compact_gradients_with_parts_are_refused():
    with pytest.raises(ValueError, match="Choose grads='dense', or parts=1"):
        sliceout.convert_(nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3)), 0.5, parts=2, grads="compact")


# -- values alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "x", "values"), [
    (lambda: TransformerLM(32, layers=2, heads=4, vocabulary=50, context=16), torch.zeros(2, 7, dtype=torch.int64), 2),
    (lambda: build("bert")[0], None, 2),
    (lambda: build("llama")[0], None, 2),
    (lambda: build("transformer encoder")[0], torch.zeros(2, 7, 32), 2),
])  # fmt: skip
def test_values_alone_leave_queries_and_keys_whole(make, x, values):
    model = make().train()
    report = sliceout.convert_(model, 0.5, attention="values", example_inputs=x)
    attention = [r for r in report.rows if r.slice is not None and r.group.kind == "attention"]
    assert len(attention) == values
    assert not any(r.group.contracted for r in attention)
    whole = [n for n, m in model.named_modules() if n.endswith((".q", ".k", "query", "key", "q_proj", "k_proj"))]
    assert not any(isinstance(model.get_submodule(n), sliceout.nn.Sliced) for n in whole)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_values_of_a_fused_projection_say_why_they_are_whole(name):
    model, x = build(name)
    report = sliceout.convert_(model, 0.5, attention="values", example_inputs=None if name == "gpt2" else x)
    assert {r.group.kind for r in report.rows if r.slice is not None} == {"mlp"}
    assert "queries, keys and values come out of one projection" in str(report)
