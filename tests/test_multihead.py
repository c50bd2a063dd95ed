"""Sliced nn.MultiheadAttention: exactly the masked dense attention while it trains, the plain class in eval()."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch import nn

import sliceout
from layercases import randomise
from oracle import exactly, mask, path
from sliceout import Slice
from sliceout.drawing import owner_of
from sliceout.nn import plain_
from sliceout.nn.factory import give_slices_
from sliceout.schemes.subset import Subset

EMBED, HEADS = 24, 4
PATHS = ["eager", "ops", "graph"]
pytestmark = pytest.mark.usefixtures("float64")


def axes(which: str, **options):
    """Slices of dims inside every head, or of whole heads."""
    make = Subset if options.pop("sampling", None) == "subset" else Slice
    inside = {role: make(6, 0.4, seed=i, **options).axis(blocks=HEADS) for i, role in enumerate(("qk", "v"))}
    if which == "heads":
        return {"heads": make(HEADS, 0.5, **options).axis(inner=EMBED // HEADS)}
    return inside if which == "both" else {which: inside[which]}


def dense(m, query, key, value, attn_mask=None, key_padding_mask=None):
    """Full-size attention with masks on the rows of the projections and on the columns of the last one."""
    heads = m.axes.get("heads")
    qk, v = (heads or m.axes.get(role) for role in ("qk", "v"))
    device = query.device
    r, rv = (mask(a, EMBED, device) for a in (qk, v))
    c = mask(v, EMBED, device, scaled=True)
    if m._qkv_same_embed_dim:
        wq, wk, wv = m.in_proj_weight.chunk(3)
    else:
        wq, wk, wv = m.q_proj_weight, m.k_proj_weight, m.v_proj_weight
    biases = [0.0] * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    q, k, v = (
        (F.linear(x, w * rows[:, None]) + b * rows).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, w, b, rows in zip((query, key, value), (wq, wk, wv), biases, (r, r, rv), strict=True)
    )
    kept_dims = EMBED // HEADS if heads is not None or "qk" not in m.axes else m.axes["qk"].slice.width
    scores = q @ k.transpose(-1, -2) / kept_dims**0.5
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, device=device).masked_fill(attn_mask, -torch.inf)
        scores = scores + (attn_mask.view(-1, HEADS, *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    weights = scores.softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2)
    return F.linear(out, m.out_proj.weight * c, m.out_proj.bias), weights


def compare(m, query, key, value, device, what, **masks):
    """Output, attention weights and all gradients; inputs are [batch, sequence, features]."""
    inputs = [t.to(device).requires_grad_() for t in (query, key, value)]
    leaves = [*inputs, *m.parameters()]
    names = ["query", "key", "value", *(n for n, _ in m.named_parameters())]
    expected, expected_weights = dense(m, *inputs, **masks)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, g)
    for need_weights in (False, True):
        given = inputs if m.batch_first else [t.transpose(0, 1) for t in inputs]
        y, weights = m(*given, need_weights=need_weights, average_attn_weights=False, **masks)
        y = y if m.batch_first else y.transpose(0, 1)
        exactly(y, expected, f"{what} output")
        for name, got, want in zip(names, torch.autograd.grad(y, leaves, g), wanted, strict=True):
            exactly(got, want, f"{what} gradient of {name}")
    heads = m.axes.get("heads")
    exactly(weights, expected_weights if heads is None else expected_weights[:, heads.slice.kept], f"{what} weights")


def make_attention(which, device, sampling="circular", **kwargs):
    settings = {} if sampling == "circular" else {"sampling": sampling}
    m = randomise(nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **kwargs}))
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(EMBED**-0.5)  # so that scores and gradients are of order 1
    give_slices_(m, axes(which, **settings)).to(device).train()
    for s in m.slices:
        while s.kept[0] == 0:  # a slice that starts at 0 would hide much
            owner_of(s).draw_()
    return m


@devices
@pytest.mark.parametrize("sampling", ["circular", "window", "subset"])
@pytest.mark.parametrize("which", ["qk", "v", "both", "heads"])
def test_output_and_gradients_equal_the_masked_dense_attention(which, sampling, device):
    for (bias, batch_first), how in itertools.product([(True, True), (False, False)], PATHS):
        m = make_attention(which, device, sampling, bias=bias, batch_first=batch_first)
        for step in range(2):
            for s in m.slices:
                owner_of(s).seek_(step)
            with path(how):
                compare(m, *torch.randn(3, 2, 5, EMBED).unbind(), device, f"{how}, bias={bias}:")


@devices
@pytest.mark.parametrize("which", ["both", "heads"])
def test_keys_and_values_of_other_sizes_and_lengths(which, device):
    m = make_attention(which, device, kdim=7, vdim=9)
    compare(m, torch.randn(2, 5, EMBED), torch.randn(2, 3, 7), torch.randn(2, 3, 9), device, "cross attention")


@devices
@pytest.mark.parametrize("which", ["both", "heads"])
def test_masks_are_those_of_the_plain_attention(which, device):
    m = make_attention(which, device)
    x = torch.randn(2, 5, EMBED)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]], device=device)
    per_head = torch.randn(2 * HEADS, 5, 5, device=device)
    for masks in (
        {"attn_mask": causal},
        {"attn_mask": torch.randn(5, 5, device=device)},
        {"attn_mask": per_head},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "key_padding_mask": padding},
    ):
        compare(m, x, x.clone(), x.clone(), device, f"{list(masks)}", **masks)


@pytest.mark.parametrize("which", ["both", "heads"])
def test_the_causal_hint_changes_nothing_and_needs_its_mask(which):
    m = make_attention(which, "cpu")
    x = torch.randn(2, 5, EMBED)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for need_weights in (False, True):
        expected, _ = m(x, x, x, attn_mask=causal, need_weights=need_weights)
        hinted, _ = m(x, x, x, attn_mask=causal, need_weights=need_weights, is_causal=True)
        exactly(hinted, expected, f"need_weights={need_weights}")
        for layer in (m.train(), m.eval()):  # as in torch
            with pytest.raises(RuntimeError, match="attn_mask"):
                layer(x, x, x, need_weights=need_weights, is_causal=True)
        m.train()


@pytest.mark.parametrize("which", ["both", "heads"])
def test_unbatched_input_is_a_batch_of_one(which):
    m = make_attention(which, "cpu", batch_first=False)
    x = torch.randn(5, EMBED)
    y, weights = m(x, x, x)
    batched, batched_weights = m(*(x[:, None],) * 3)
    exactly(y, batched[:, 0], "output")
    exactly(weights, batched_weights[0], "weights")


@devices
@pytest.mark.parametrize("which", ["qk", "v", "both", "heads"])
def test_eval_is_bit_identical_and_undoing_restores_the_class(which, device):
    plain = randomise(nn.MultiheadAttention(EMBED, HEADS, batch_first=True)).to(device)
    m = give_slices_(copy.deepcopy(plain), axes(which))
    x = torch.randn(2, 5, EMBED, device=device)
    for need_weights in (False, True):
        for ours, theirs in zip(
            m.eval()(x, x, x, need_weights=need_weights), plain.eval()(x, x, x, need_weights=need_weights), strict=True
        ):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    for s in m.slices:
        s.on = False
    assert torch.equal(m.train()(x, x, x)[0], plain.train()(x, x, x)[0])
    assert type(plain_(m)) is nn.MultiheadAttention
    assert m.__dict__.keys() == plain.__dict__.keys()


@devices
def test_autocast_returns_what_the_plain_attention_returns(device):
    for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        m = make_attention("both", device).to(dtype)
        x = torch.randn(2, 5, EMBED, device=device, dtype=dtype)
        with torch.autocast(device, torch.bfloat16):
            y, _ = m(x, x, x, need_weights=False)
        assert y.dtype == expected
        y.sum().backward()
        assert {p.grad.dtype for p in m.parameters()} == {dtype}


def test_what_does_not_fit_is_refused_and_the_layer_untouched():
    m = nn.MultiheadAttention(EMBED, HEADS)
    before = dict(m.__dict__)
    for slices, message in (
        ({"qk": Slice(EMBED).axis()}, r"qk_slice=.* has 1 heads, but this attention has 4"),
        ({"v": Slice(8).axis(blocks=4)}, r"slice of size 8 \(axis of 32\) does not match embed_dim=24"),
        ({**axes("heads"), **axes("v")}, "slice heads as a whole or inside, not both"),
    ):
        with pytest.raises(ValueError, match=message):
            give_slices_(m, slices)
        assert type(m) is nn.MultiheadAttention
        assert m.__dict__.keys() == before.keys()
    for kwargs in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn have no sliced form"):
            sliceout.nn.MultiheadAttention(EMBED, HEADS, **kwargs, qk_slice=Slice(6).axis(blocks=4))
