"""Every kind of sliced class: copies and pickles keep what it is, and plain_ takes all of it away again."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout
from networks import Residual
from sliceout import Slice
from sliceout import nn as snn
from sliceout.nn.base import Sliced, sliced_subclass
from sliceout.nn.factory import give_slices_
from sliceout.nn.foreign import AttentionNumbers, ForeignLayer, ForeignUnits, RotaryValues
from sliceout.nn.mixing import Conv1D
from sliceout.schemes.dropout import Dropping
from sliceout.schemes.patch import PatchBlock


class Named(nn.Linear):
    """A subclass that computes what its base does."""


class Doubled(nn.Linear):
    """One that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class OwnNorm(nn.Module):
    """A norm of somebody's own, with statistics and a number."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.rand(num_features))
        self.register_buffer("seen", torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.1)
        return (x - self.seen) * self.weight * self.num_features**-0.5


class Heads(nn.Module):
    """Attention that computes with numbers of its own; with ``rotary``, dims of queries and keys are tied in pairs."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.head_dim, self.scale, self.rotary = 16, 16**-0.5, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1]
        q = self.q_proj(x).view(*shape, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(*shape, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(*shape, -1, self.head_dim).transpose(1, 2)
        if self.rotary:
            q, k = (torch.cat((-t[..., 8:], t[..., :8]), -1) + t for t in (q, k))
        y = torch.softmax(q @ k.transpose(-1, -2) * self.scale, -1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


def mlp(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def by_hand(model: Any) -> nn.Module:
    """The same layers, made sliced."""
    hidden = Slice(16)
    return mlp(
        snn.Linear(6, 16, out_slice=hidden), snn.BatchNorm1d(16, slice=hidden), snn.Dropout(slice=hidden),
        snn.Linear(16, 3, in_slice=hidden),
    )  # fmt: skip


def swapped(model: Any) -> nn.Module:
    """Give the ends of an MLP, and what lies between them, one slice."""
    hidden = Slice(16).axis()
    first, *between, last = model
    give_slices_(first, {"out": hidden})
    for layer in between:
        give_slices_(layer, {"unit": hidden}, dim=1)
    give_slices_(last, {"in": hidden})
    return model


def converted(scheme: str, *sample: int, **settings: Any) -> Callable[[nn.Module], nn.Module]:
    def convert(model: nn.Module) -> nn.Module:
        sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=torch.zeros(2, *sample), **settings)
        return model

    return convert


@dataclass
class Case:
    plain: Callable[[], nn.Module]
    slice: Callable[[nn.Module], nn.Module]
    sample: tuple[int, ...]
    kinds: set[type]
    """The sliced classes that must be in the model."""


CASES = {
    "by hand": Case(
        lambda: mlp(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3)),
        by_hand, (6,), {snn.Linear, snn.BatchNorm1d, snn.Dropout},
    ),
    "swapped": Case(
        lambda: mlp(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3)),
        swapped, (6,), {snn.Linear, snn.BatchNorm1d, snn.Dropout},
    ),
    "subclass": Case(
        lambda: mlp(Named(6, 16), nn.Linear(16, 3)), swapped, (6,), {sliced_subclass(Named, snn.Linear)}
    ),
    "foreign unitwise": Case(
        lambda: mlp(nn.Linear(6, 16), OwnNorm(16), nn.Linear(16, 3)), swapped, (6,), {ForeignLayer, ForeignUnits}
    ),
    "foreign mixing": Case(lambda: mlp(Doubled(6, 16), Doubled(16, 3)), swapped, (6,), {ForeignLayer, snn.Linear}),
    "multihead attention": Case(
        lambda: nn.TransformerEncoderLayer(32, 2, 48, batch_first=True), converted("sliceout", 5, 32), (5, 32),
        {snn.MultiheadAttention, snn.Linear, snn.Dropout},
    ),
    "attention numbers": Case(
        lambda: mlp(Heads(rotary=False)), converted("sliceout", 5, 32), (5, 32), {AttentionNumbers, snn.Linear}
    ),
    "rotary values": Case(
        lambda: mlp(Heads(rotary=True)), converted("sliceout", 5, 32), (5, 32), {RotaryValues, snn.Linear}
    ),
    "dropping": Case(
        lambda: mlp(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3)), converted("standard", 6), (6,),
        {Dropping, snn.Dropout},
    ),
    "subset": Case(lambda: mlp(nn.Linear(6, 16), nn.Linear(16, 3)), converted("controlled", 6), (6,), {snn.Linear}),
    "patch": Case(lambda: mlp(Residual(), Residual()), converted("patch", 4, 8, 8), (4, 8, 8), {PatchBlock}),
}  # fmt: skip


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def alignment(model: nn.Module) -> list[Any]:
    """For every sliced layer its axes by role, with the slices numbered: one number for one object."""
    numbers: dict[Slice, int] = {}

    def told(axis: Any) -> Any:
        return str(axis), [(numbers.setdefault(s, len(numbers)), s.start_on_host) for s in axis.slices]

    layers = [m for m in model.modules() if isinstance(m, Sliced)]
    return [{role: told(axis) for role, axis in layer.axes.items()} for layer in layers]


def attributes(model: nn.Module) -> list[Any]:
    """Class and attributes of every module; of those that are dicts (parameters, hooks...) the keys."""
    return [
        (type(m), {name: sorted(v) if isinstance(v, dict) else repr(v) for name, v in vars(m).items()})
        for m in model.modules()
    ]


def trained(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return model.train()(x)


@pytest.mark.parametrize("way", [pickled, copy.deepcopy, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", CASES)
def test_copies_are_of_the_same_class_and_aligned_alike(name, way, float64):
    case = CASES[name]
    model, x = case.slice(case.plain()), torch.randn(4, *case.sample)
    for kind in case.kinds:
        assert any(isinstance(m, kind) for m in model.modules()), kind
    sliceout.draw_(model)
    trained(model, x)
    twin = way(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert alignment(twin) == alignment(model)
    assert not set(sliceout.slices(twin)) & set(sliceout.slices(model))
    assert torch.equal(trained(twin, x), trained(model, x))
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert attributes(sliceout.revert_(twin)) == attributes(sliceout.revert_(model))


@pytest.mark.parametrize("name", CASES)
def test_plain_takes_away_all_that_slicing_brought(name, float64):
    case = CASES[name]
    model, x = case.plain(), torch.randn(4, *case.sample)
    before = attributes(model)
    model = case.slice(model)
    assert attributes(model) != before
    trained(model, x)
    for layer in [m for m in model.modules() if isinstance(m, Sliced)]:
        assert snn.plain_(layer) is layer
    assert attributes(model) == before
    assert not any(isinstance(m, Sliced) for m in model.modules())
    model(x)


def test_a_class_is_made_once_and_knows_its_plain_one():
    made = sliced_subclass(Named, snn.Linear)
    assert sliced_subclass(Named, snn.Linear) is made
    assert (made.__name__, made.__doc__, made._plain) == ("SlicedNamed", Named.__doc__, Named)
    assert sliced_subclass(Named, Dropping).__name__ == "DroppingNamed"
    layer = made(6, 16, out_slice=Slice(16))
    assert type(pickled(layer)) is made
    assert type(snn.plain_(layer)) is Named


# -- buffers that a forward replaces ----------------------------------------------------------------------------------


class Replacing(nn.Module):
    """A norm whose forward does not write to its statistics but replaces them, and then reads them."""

    def __init__(self, shape: tuple[int, ...] = (16,), mean: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.mean = mean or (lambda x: x.mean(0).view(*shape[:-1], -1))
        self.register_buffer("seen", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * self.mean(x)
        return x - self.seen


@pytest.mark.parametrize("shape", [(16,), (1, 16)])
@pytest.mark.parametrize("compiled", [False, True])
def test_statistics_that_a_forward_replaces_are_those_of_the_kept_units(shape, compiled):
    hidden = Slice(16, 0.5, align=1)
    layer: Any = give_slices_(Replacing(shape), {"unit": hidden.axis()}, dim=1)
    owner, full = sliceout.slices(layer), layer.seen
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    expected = torch.zeros(16)
    for _ in range(12):  # some of them wrap around the end
        owner.draw_()
        x = torch.randn(4, 8, requires_grad=True)
        y = forward(x)
        expected[hidden.kept] = 0.9 * expected[hidden.kept] + 0.1 * x.detach().mean(0)
        torch.testing.assert_close(y.detach(), x.detach() - expected[hidden.kept])
        torch.testing.assert_close(layer.seen, expected.view(shape))
        assert layer.seen is full
        assert not full.requires_grad
        (grad,) = torch.autograd.grad(y[0].sum(), x)  # through the mean, as in the plain layer
        torch.testing.assert_close(grad, torch.tensor([[1.0], [0.0], [0.0], [0.0]]).expand(4, 8) - 0.025)
    torch.testing.assert_close(layer.eval()(torch.zeros(2, 16)), -expected.expand(2, 16))


@pytest.mark.parametrize("mean", [lambda x: torch.zeros(3, 8), lambda x: x])
def test_a_replaced_buffer_of_another_shape_is_refused(mean):
    layer = give_slices_(Replacing(mean=mean), {"unit": Slice(16, 0.5).axis()}, dim=1)
    with pytest.raises(RuntimeError, match=r"Replacing has replaced its buffer 'seen' by .*each of the 8 kept units"):
        layer(torch.ones(3, 8))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: snn.Linear(4, 4, out_slices=Slice(4)), "unexpected keyword argument 'out_slices'"),
        (lambda: snn.BatchNorm1d(4, in_slice=Slice(4)), "unexpected keyword argument 'in_slice'"),
        (lambda: snn.MultiheadAttention(4, 2, slice=Slice(4)), "unexpected keyword argument 'slice'"),
        (lambda: Conv1D(4, 4, slice=Slice(4)), "unexpected keyword argument 'slice'"),
        (lambda: snn.Linear(4, out_slice=Slice(4)), "missing 1 required positional argument: 'out_features'"),
        (lambda: snn.slice_(nn.Linear(4, 4), out_slices=Slice(4)), "given out_slices: it takes in_slice and out_slice"),
        (lambda: snn.Dropout2d(0.5), "missing 1 required keyword-only argument: 'slice'"),
    ],
)
def test_wrong_or_missing_arguments_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_help_shows_the_plain_arguments_and_the_slices():
    def names(of: Any) -> list[str]:
        return list(inspect.signature(of).parameters)

    assert names(snn.Linear) == [*names(nn.Linear), "in_slice", "out_slice"]
    assert names(snn.BatchNorm2d) == [*names(nn.BatchNorm2d), "slice"]
    assert names(snn.MultiheadAttention) == [*names(nn.MultiheadAttention), "qk_slice", "v_slice", "heads_slice"]
    assert names(snn.Conv1D) == ["nf", "nx", "in_slice", "out_slice"]
    assert inspect.signature(snn.Dropout).parameters["slice"].default is inspect.Parameter.empty
    assert names(snn.Linear(4, 4)) == names(nn.Linear(4, 4))
