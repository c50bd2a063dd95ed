"""Slices of the batch: what they take and put back, and residual branches through which fewer samples go."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sliceout
from oracle import exactly
from sliceout.conversion.reasons import Skip
from sliceout.ops import without_views
from sliceout.schemes import samples
from sliceout.schemes.samples import RING, DroppedPath, Samples, put_samples, take_samples

# -- taking samples and putting them back ------------------------------------------------------------------------------


def kept_now(s: Samples, n: int) -> Tensor:
    """Which of ``n`` samples are kept, by the definition."""
    return (s.start_on_host * n // RING + torch.arange(s.kept_of(n))) % n


def moved_to(s: Samples, start: int) -> Samples:
    s.start_on_host = start
    s.start.fill_(start)
    return s


@given(
    n=st.integers(2, 40), rate=st.floats(0.01, 0.95), start=st.integers(0, RING - 1),
    shape=st.sampled_from([(), (3,), (2, 3, 4)]), channels_last=st.booleans(),
)  # fmt: skip
def test_take_and_put_are_adjoint_and_equal_their_definition(n, rate, start, shape, channels_last):
    s = moved_to(Samples(rate), start)
    layout = torch.channels_last if channels_last and len(shape) == 3 else torch.contiguous_format
    x = torch.randn(n, *shape, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    k, rows = s.kept_of(n), kept_now(s, n)
    small = take_samples(x, s)
    assert torch.equal(small, x[rows])
    y = torch.randn_like(small, requires_grad=True)
    full = put_samples(y, s, n)
    exactly(full, torch.zeros_like(x).index_copy(0, rows, y * n / k))
    w = torch.randn_like(full)
    (grad,) = torch.autograd.grad(full, y, w, create_graph=True)
    exactly(grad, w[rows] * n / k)
    (grad,) = torch.autograd.grad(small, x, torch.ones_like(small))
    exactly(grad, torch.zeros_like(x).index_fill(0, rows, 1.0))
    with without_views():  # as in a captured step: by the start in device memory
        exactly(take_samples(x, s), small)
        exactly(put_samples(y, s, n), full)
        exactly(torch.autograd.grad(put_samples(y, s, n), y, w)[0], w[rows] * n / k)


@given(rate=st.floats(0.0, 0.999), n=st.integers(1, 3000))
def test_the_number_of_samples_follows_the_batch(rate, n):
    s = Samples(rate)
    assert 1 <= s.kept_of(n) <= n
    assert abs(s.kept_of(n) - max(1, (1 - rate) * n)) <= 0.5 + n / RING
    s.on = False
    assert s.kept_of(n) == n


@pytest.mark.parametrize("n", [4, 8, 128])
def test_every_sample_is_kept_by_equally_many_starts(n):
    s, times = Samples(0.4), torch.zeros(n)
    for first in range(n):
        times[kept_now(moved_to(s, first * RING // n), n)] += 1
    assert times.unique().tolist() == [s.kept_of(n)]


def test_gradients_of_gradients():
    s = moved_to(Samples(0.5), RING - 5)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: put_samples(take_samples(x, s).sin(), s, 6), x)


# -- blocks whose branch is known --------------------------------------------------------------------------------------


class Block(nn.Module):
    """``after(x + branch(x))``; what a test expects is computed by ``branch`` itself."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.branch(x))

    def after(self, x: Tensor) -> Tensor:
        return x

    def expected(self, x: Tensor, s: Samples | None) -> Tensor:
        if s is None:
            return self.forward(x)
        n, rows = len(x), kept_now(s, len(x))
        return self.after(x.index_add(0, rows, self.branch(x[rows]) * (n / len(rows))))


class PreNorm(Block):
    def branch(self, x):
        y = self.norm(x)
        return self.attention(y, y, y, need_weights=False)[0]


class PostNorm(Block):
    def branch(self, x):
        return self.down(F.gelu(self.up(x)))

    def after(self, x):
        return self.norm(x)


class Basic(Block):
    def branch(self, x):
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))

    def forward(self, x):  # in place, as in ResNets
        shortcut, y = x, self.branch(x)
        y += shortcut
        return self.after(y)

    def after(self, x):
        return F.relu(x)


class PreActivation(Block):
    def branch(self, x):
        return self.conv2(self.bn2(self.conv1(self.relu(self.bn1(x)))))


class Inverted(Block):
    def branch(self, x):
        y = self.bn(self.depthwise(F.silu(self.expand(x))))
        return self.project(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())


class LayerScale(Block):
    """The scale is a parameter of the block, multiplied by its own code."""

    def branch(self, x):
        return self.scale[:, None, None] * self.pointwise(self.depthwise(x))


class Parallel(Block):
    """Two branches that share a norm, added one after the other."""

    def branch(self, x):
        y = self.norm(x)
        return self.one(y) + self.two(y)

    def forward(self, x):
        y = self.norm(x)
        return x + self.one(y) + self.two(y)


def conv(i: int, o: int, size: int = 3, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, size, padding=size // 2, **kwargs)


def sequence() -> Tensor:
    return torch.randn(7, 5, 8)


def maps() -> Tensor:
    return torch.randn(7, 8, 6, 6)


BLOCKS: dict[str, tuple[Callable[[], Block], Callable[[], Tensor]]] = {
    "pre-norm attention": (
        lambda: PreNorm(norm=nn.LayerNorm(8), attention=nn.MultiheadAttention(8, 2, batch_first=True)), sequence
    ),
    "post-norm mlp": (lambda: PostNorm(up=nn.Linear(8, 16), down=nn.Linear(16, 8), norm=nn.LayerNorm(8)), sequence),
    "basic": (
        lambda: Basic(conv1=conv(8, 8), bn1=nn.BatchNorm2d(8), conv2=conv(8, 8), bn2=nn.BatchNorm2d(8)), maps
    ),
    "pre-activation, in place": (
        lambda: PreActivation(
            bn1=nn.BatchNorm2d(8), relu=nn.ReLU(inplace=True), conv1=conv(8, 8), bn2=nn.BatchNorm2d(8), conv2=conv(8, 8)
        ),
        maps,
    ),
    "inverted bottleneck": (
        lambda: Inverted(
            expand=conv(8, 16, 1), depthwise=conv(16, 16, groups=16), bn=nn.BatchNorm2d(16), gate=conv(16, 16, 1),
            project=conv(16, 8, 1),
        ),
        maps,
    ),
    "layer scale": (
        lambda: LayerScale(
            depthwise=conv(8, 8, 5, groups=8), pointwise=conv(8, 8, 1), scale=nn.Parameter(torch.rand(8))
        ),
        maps,
    ),
    "parallel": (lambda: Parallel(norm=nn.LayerNorm(8), one=nn.Linear(8, 8), two=nn.Linear(8, 8)), sequence),
}  # fmt: skip


def two_blocks(kind: str) -> tuple[nn.Sequential, Tensor]:
    make, data = BLOCKS[kind]
    x = data()
    stem = nn.Linear(x.shape[-1], x.shape[-1])
    return nn.Sequential(stem, make(), make(), nn.Flatten(), nn.LazyLinear(3)), x


def built(kind: str, rate: Any = 0.4, **settings: Any) -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """A plain model, the same one converted, and a batch."""
    torch.manual_seed(1)
    plain, x = two_blocks(kind)
    plain(x)
    plain.train()
    ours = copy.deepcopy(plain)
    sliceout.convert_(ours, rate, scheme="samples", example_inputs=x[:2], **settings)
    return plain, ours, x


def expected(plain: nn.Sequential, x: Tensor, slices: list[Samples]) -> Tensor:
    left = list(slices)
    for part in plain:
        x = part.expected(x, left.pop(0)) if isinstance(part, Block) else part(x)
    return x


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("by_views", [True, False])
def test_a_block_equals_one_that_adds_the_branch_of_the_kept_samples(kind, by_views, float64):
    plain, ours, x = built(kind)
    slices: Any = list(sliceout.slices(ours))
    assert len(slices) == 2
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for _ in range(4):
        sliceout.draw_(ours)
        want = expected(plain, x, slices)
        if by_views:
            got = ours(x)
        else:
            with without_views():
                got = ours(x)
        exactly(got, want)
        w = torch.randn_like(want)
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            p.grad = q.grad = None
        (want * w).sum().backward()
        (got * w).sum().backward()
        for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
            exactly(q.grad, p.grad, name)
        for (name, a), b in zip(plain.named_buffers(), ours.buffers(), strict=True):  # statistics of what came through
            exactly(b, a, name)


@pytest.mark.parametrize("kind", BLOCKS)
def test_eval_is_bit_identical_and_revert_leaves_nothing(kind):
    plain, ours, x = built(kind)
    ours.train()(x)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    sliceout.revert_(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain.modules()]
    assert not ours._forward_pre_hooks
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(ours.modules(), plain.modules(), strict=True))


def test_the_mean_over_all_starts_is_the_full_branch(float64):
    plain, ours, x = built("post-norm mlp")
    first: Any = ours[1]
    x, total = x[:4], 0.0
    s: Any = first.up.axes["samples"].slice
    first.norm = nn.Identity()
    for start in range(4):
        moved_to(s, start * RING // 4)
        total = total + first(x) / 4
    exactly(total, x + plain[1].branch(x))


def test_a_batch_norm_that_is_frozen_does_not_take_part_in_the_decision(float64):
    """Fine-tuning keeps batch norms in eval mode: here they are where samples are put back."""
    plain, ours, x = built("basic")
    for model in (plain, ours):
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
    slices: Any = list(sliceout.slices(ours))
    exactly(ours(x), expected(plain, x, slices))
    ours[1].conv1.eval()  # where they are taken
    exactly(ours[1](x), plain[1](x))


def test_batches_may_change_and_be_too_small(float64):
    plain, ours, x = built("pre-norm attention")
    slices: Any = list(sliceout.slices(ours))
    for n in (7, 3, 1, 2, 6):
        exactly(ours(x[:n]), expected(plain, x[:n], slices), str(n))
    exactly(ours[1](x), plain[1].expected(x, slices[0]))  # a part of the model, called by itself


def test_copies_and_pickles_have_slices_of_their_own(float64):
    _, ours, x = built("basic")
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        other.load_state_dict(ours.state_dict())
        exactly(other(x), ours(x))
        sliceout.draw_(other)
        assert sliceout.slices(other).step == 1
        assert sliceout.slices(ours).step == 0
        exactly(other(x[:5]).shape, ours(x[:5]).shape)


# -- modes of training -------------------------------------------------------------------------------------------------


def test_slices_move_once_a_step_and_accumulation_keeps_them(float64):
    plain, ours, x = built("post-norm mlp")
    optimizer = torch.optim.SGD(ours.parameters(), 0.0)
    slices: Any = list(sliceout.slices(ours))
    seen = set()
    for step in range(3):
        for _ in range(2):
            exactly(ours(x), expected(plain, x, slices))
            ours(x).sum().backward()
        assert sliceout.slices(ours).step == step
        seen.add(tuple(s.start_on_host for s in slices))
        optimizer.step()
    assert len(seen) == 3


def test_checkpointed_blocks_recompute_with_the_same_samples(float64):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for part in self:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    _, ours, x = built("post-norm mlp")
    grads = []
    for model in (ours, Checkpointed(*ours)):
        ours.zero_grad()
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in ours.parameters()])
    for a, b in zip(*grads, strict=True):
        exactly(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre-norm attention", "basic", "layer scale"])
def test_one_compiled_graph_serves_all_starts(kind, fresh_compiler):
    plain, ours, x = built(kind)
    slices: Any = list(sliceout.slices(ours))
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(5):
        sliceout.draw_(ours)
        want = expected(plain, x, slices)
        got = compiled(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        w = torch.randn_like(want)
        for model, y in ((plain, want), (ours, got)):
            model.zero_grad()
            (y * w).sum().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_checkpoints_can_be_compiled(fresh_compiler):
    """The compiler lets nothing be written under a checkpoint: the size of the batch is known before."""

    class Checkpointed(nn.Module):
        def __init__(self, parts: nn.Sequential) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    torch.manual_seed(1)
    make, data = BLOCKS["post-norm mlp"]
    model, x = Checkpointed(nn.Sequential(make(), make())).train(), data()
    sliceout.convert_(model, 0.4, scheme="samples", example_inputs=x)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        sliceout.draw_(model)
        torch.testing.assert_close(compiled(x), model(x))


def test_schedules_turn_it_up_and_off(float64):
    plain, ours, x = built("post-norm mlp")
    slices: Any = list(sliceout.slices(ours))
    sliceout.Tail(ours, 0.1).step(0.95)
    exactly(ours(x), plain(x))
    grow = sliceout.Grow(ours, {0: 0.5, 0.5: 0.0})  # early stochastic depth
    grow.step(0.0)
    assert [s.kept_of(10) for s in slices] == [5, 5]
    exactly(ours(x), expected(plain, x, slices))
    sliceout.WarmUp(ours, until=0.5, steps=2).step(0.0)
    assert [s.kept_of(100) for s in slices] == [75, 75]


def test_training_without_draws_warns():
    _, ours, x = built("post-norm mlp")

    def train() -> None:
        for _ in range(6):
            ours(x).sum().backward()
            with torch.no_grad():
                for p in ours.parameters():
                    p -= 0.01

    with pytest.warns(UserWarning, match="have never been redrawn"):
        train()


# -- rates, names, options ---------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """As timm has it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = x.new_empty([len(x)] + [1] * (x.dim() - 1)).bernoulli_(1 - self.drop_prob)
        return x * keep.div_(1 - self.drop_prob)


class Dropped(PostNorm):
    def branch(self, x):
        return self.drop_path(super().branch(x))


def with_drop_paths(*rates: float) -> nn.Sequential:
    return nn.Sequential(*(Dropped(
        up=nn.Linear(8, 16), down=nn.Linear(16, 8), norm=nn.LayerNorm(8), drop_path=DropPath(rate)
    ) for rate in rates))  # fmt: skip


def test_the_models_own_drop_paths_give_their_rates_and_rest(float64):
    model, x = with_drop_paths(0.0, 0.2, 0.4), torch.randn(10, 8)
    plain = copy.deepcopy(model)
    report = sliceout.convert_(model, scheme="samples", example_inputs=x)
    assert [round(s.rate, 3) for s in report.slices] == [0.2, 0.4]
    assert report.rows[0].reason.code is Skip.NO_RATE
    assert [s.kept_of(10) for s in report.slices] == [8, 6]
    for part in plain:
        part.drop_path.drop_prob = 0.0
    exactly(model(x), expected(plain, x, [None, *report.slices]))  # nothing else is dropped
    assert model[1].drop_path.drop_prob == 0.2
    sliceout.off_(model)  # the full network has its own drop path again
    torch.manual_seed(3)
    dropped = model(x)
    sliceout.revert_(model)
    torch.manual_seed(3)
    exactly(dropped, model(x))


def test_one_drop_path_for_two_branches_is_left_to_rest(float64):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.drop_path = nn.Linear(8, 8), nn.Linear(8, 8), DropPath(0.3)

        def forward(self, x):
            x = x + self.drop_path(self.one(x))
            return x + self.drop_path(self.two(x))

    model, x = Shared(), torch.randn(10, 8)
    report = sliceout.convert_(model, scheme="samples", example_inputs=x)
    assert [r.name for r in report.rows] == ["one", "two"]
    for s in report.slices:
        s.start_on_host = 0
    y = x.clone()
    y[:7] += F.linear(x[:7], model.one.weight, model.one.bias) * 10 / 7
    z = y.clone()
    z[:7] += F.linear(y[:7], model.two.weight, model.two.bias) * 10 / 7
    exactly(model(x), z)


def test_rates_by_number_name_function_and_depth():
    def rates(rate: Any, **settings: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(BLOCKS["post-norm mlp"][0]() for _ in range(3)))
        report = sliceout.convert_(model, rate, scheme="samples", example_inputs=sequence(), **settings)
        return [0.0 if r.slice is None else round(r.slice.rate, 3) for r in report.rows]

    assert rates(0.4) == [0.4, 0.4, 0.4]
    assert rates(0.4, decay="linear") == [0.0, 0.2, 0.4]
    assert rates({"1": 0.5, "2": 0.25}) == [0.0, 0.5, 0.25]
    assert rates(lambda name: {"0": 0.1}.get(name)) == [0.1, 0.0, 0.0]
    assert rates(0.4, filter="[12]") == [0.0, 0.4, 0.4]


@pytest.mark.parametrize(("settings", "message"), [
    ({"decay": "cosine"}, "decay='cosine': expected one of 'linear'"),
    ({"decay": "linear", "rate": None}, "goes with a number as rate"),
    ({"parts": 8}, "parts=8 has no effect with scheme='samples'"),
    ({"sampling": "window"}, "no effect"),
    ({"norm": "flow"}, "no effect"),
    ({"grads": "compact"}, "no effect"),
    ({"rate": 1.0}, "expected 0 <= rate < 1"),
    ({"rate": 0.0}, "at rate 0 all samples are kept"),
    ({"rate": None}, "no DropPath of a rate above 0"),
    ({"scheme": "droppath", "seed": 3}, "no effect"),
    ({"scheme": "sliceout", "decay": "linear"}, "decay='linear' has no effect"),
])  # fmt: skip
def test_what_is_refused_leaves_the_model_as_it_was(settings, message):
    model = nn.Sequential(BLOCKS["post-norm mlp"][0]())
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        sliceout.convert_(model, **{"rate": 0.4, "scheme": "samples", "example_inputs": sequence(), **settings})
    assert [type(m) for m in model.modules()] == before
    assert not model._forward_pre_hooks


def test_a_model_that_is_sliced_already_is_refused():
    model = nn.Sequential(BLOCKS["post-norm mlp"][0](), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    sliceout.convert_(model, 0.5, example_inputs=sequence())
    with pytest.raises(ValueError, match=r"is sliced already: call sliceout.revert_"):
        sliceout.convert_(model, 0.4, scheme="samples", example_inputs=sequence())


def test_drop_path_is_the_baseline_at_the_same_places(float64):
    torch.manual_seed(0)
    model = nn.Sequential(*(BLOCKS["post-norm mlp"][0]() for _ in range(2))).train()
    plain, x = copy.deepcopy(model), torch.randn(4000, 5, 8)
    report = sliceout.convert_(model, 0.4, scheme="droppath", example_inputs=sequence())
    assert report.flop_saving == 0
    assert all(isinstance(s, DroppedPath) for s in report.slices)
    added = model[0].down(F.gelu(model[0].up(x))) / plain[0].branch(x)
    share = added[:, 0, 0]
    assert set(share.detach().round(decimals=6).unique().tolist()) == {0.0, round(1 / 0.6, 6)}
    assert abs((share > 0).double().mean().item() - 0.6) < 0.05
    assert (added - share[:, None, None]).abs().max() < 1e-9  # whole samples
    sliceout.off_(model)
    exactly(model(x[:3]), plain(x[:3]))
    assert torch.equal(model.eval()(x[:3]), plain.eval()(x[:3]))


def test_the_report_counts_what_the_branches_save():
    model = nn.Sequential(nn.Linear(8, 8), BLOCKS["post-norm mlp"][0]())
    report = sliceout.convert_(model, 0.4, scheme="samples", example_inputs=sequence())
    assert str(report).startswith("Sample-SliceOut: Sequential, 1 residual branch\n")
    assert "0.6 of the samples" in str(report)
    work = 2 * 8 * 16 / (2 * 8 * 16 + 8 * 8)
    assert report.flop_saving == pytest.approx(0.4 * work, rel=1e-3)
    assert report.as_dict()["groups"][0]["name"] == "1"


# -- what is left alone ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A block with a proper branch, and one that has something wrong with it."""

    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.good, self.block = nn.Linear(8, 8), OddBlock(code)

    def forward(self, x):
        return self.block(x + self.good(x))


class OddBlock(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.bad, self.other, self.code = nn.Linear(8, 8), nn.Linear(8, 8), code

    def forward(self, x):
        return self.code(self, x)


def odd_residual(m: Any, x: Tensor) -> Tensor:
    return x + m.bad(x)


@pytest.mark.parametrize(("code", "reason"), [
    (lambda m, x: m.other(x) + m.bad(x), Skip.NOT_RESIDUAL),
    (lambda m, x: x + m.bad(x - x.mean(0)), Skip.MIXES_SAMPLES),
    (lambda m, x: x + m.bad(torch.softmax(m.other(x), 0)), Skip.MIXES_SAMPLES),
    (lambda m, x: x + m.bad(m.other(x) * x), Skip.NO_MODULE),
    (lambda m, x: x + m.bad(x).sin().cos(), Skip.NO_MODULE),
    (lambda m, x: (y := m.other(x), x + m.bad(y), y)[1:], Skip.ESCAPES),
    (lambda m, x: odd_residual(m, x.transpose(0, 1)), Skip.NOT_SAMPLES),
    (lambda m, x: odd_residual(m, x) * m.bad(x.sin()), Skip.SHARED_MODULE),
])  # fmt: skip
def test_other_sums_are_left_alone_with_the_reason(code, reason):
    model, x = Odd(code), torch.randn(6, 5, 8)
    report = sliceout.convert_(model, 0.4, scheme="samples", example_inputs=x)
    assert report.converted == 1
    assert [r.reason.code for r in report.skipped] == [reason], [str(r.reason) for r in report.skipped]
    model.train()(x)


def test_what_follows_the_last_module_may_see_all_samples(float64):
    model, x = Odd(lambda m, x: x + m.bad(x) * x), torch.randn(6, 5, 8)
    report = sliceout.convert_(model, 0.4, scheme="samples", example_inputs=x)
    assert report.converted == 2
    y = model.block(x)
    rows = kept_now(list(report.slices)[1], 6)
    linear = F.linear(x[rows], model.block.bad.weight, model.block.bad.bias)
    exactly(y, x.index_add(0, rows, linear * x[rows] * 6 / len(rows)))


def test_sums_that_are_no_residual_connections_are_not_named():
    class Activation(nn.Module):
        def forward(self, x):  # a tanh approximation, as transformers writes it
            return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3))))

    block = Basic(conv1=conv(8, 8), bn1=nn.BatchNorm2d(8), conv2=nn.Sequential(Activation()), bn2=nn.BatchNorm2d(8))
    report = sliceout.convert_(nn.Sequential(block), 0.4, scheme="samples", example_inputs=maps())
    assert len(report.rows) == 1


def test_a_model_without_branches_says_so():
    with pytest.raises(ValueError, match="no residual branch of Sequential can do with fewer samples: found no add"):
        sliceout.convert_(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 0.4, scheme="samples")


# -- models of other libraries -----------------------------------------------------------------------------------------


def same_as_drop_path(model: nn.Module, inputs: dict[str, Tensor], monkeypatch) -> int:
    """Compare a model with DropPath that drops the same samples at the same places; how many branches it has."""
    model = model.double().train()
    reference = copy.deepcopy(model)
    report = sliceout.convert_(model, 0.4, scheme="samples")
    sliceout.convert_(reference, 0.4, scheme="droppath")
    twins = dict(zip(sliceout.slices(reference), sliceout.slices(model), strict=True))
    n, put = len(next(iter(inputs.values()))), samples._put

    def dropped(t: Tensor, s: Any) -> Tensor:
        if not isinstance(s, DroppedPath):
            return put(t, s)
        rows = kept_now(twins[s], n)
        return t * torch.zeros(n).index_fill(0, rows, n / len(rows)).view(-1, *[1] * (t.dim() - 1))

    monkeypatch.setattr(samples, "_put", dropped)
    for _ in range(2):
        sliceout.draw_(model)
        outputs = [m(**inputs) for m in (model, reference)]
        ours, theirs = (y if isinstance(y, Tensor) else y[0] for y in outputs)
        exactly(ours, theirs)
        w = torch.randn_like(ours)
        for m, y in ((model, ours), (reference, theirs)):
            m.zero_grad()
            (y * w).sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=name)
    return report.converted


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 50, "n_layer": 2, "n_embd": 32, "n_head": 4, "attn_pdrop": 0.0,
                                 "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}, 4),
    "bert": ("BertForMaskedLM", {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 4),
    "llama": ("LlamaForCausalLM", SMALL, 4),
    "gptj": ("GPTJForCausalLM", {"vocab_size": 50, "n_layer": 2, "n_embd": 32, "n_head": 4, "rotary_dim": 4,
                                 "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0,
                                 "eos_token_id": 0}, 2),
    "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": 16, "hidden_dropout_prob": 0.0,
                                     "attention_probs_dropout_prob": 0.0}, 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", TEXT)
def test_models_of_transformers_equal_drop_path(kind, padded, monkeypatch, float64):
    transformers = pytest.importorskip("transformers")
    name, settings, branches = TEXT[kind]
    made = getattr(transformers, name)
    model = made(made.config_class(**settings))
    ids = torch.randint(0, 50, (10, 12))
    inputs = {"input_ids": ids}
    if padded:  # masks have samples too
        mask = torch.ones_like(ids)
        mask[3, 8:] = mask[7, 2:] = 0
        inputs["attention_mask"] = mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_as_drop_path(model, inputs, monkeypatch) == branches


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side", "branches"), [
    ("vit_tiny_patch16_224", 64, 24), ("convnext_atto", None, 12), ("swin_tiny_patch4_window7_224", 112, 24),
    ("mixer_s32_224", 64, 16),
])  # fmt: skip
def test_models_of_timm_equal_drop_path(name, side, branches, monkeypatch, float64):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=5, **({"img_size": side} if side else {}))
    assert same_as_drop_path(model, {"x": torch.randn(4, 3, side or 64, side or 64)}, monkeypatch) == branches
