"""What users get wrong: every error names the value, the rule and the way out, and leaves the module as it was."""

from __future__ import annotations

import pytest
import torch
from conftest import devices
from torch import nn

import sliceout
from layercases import randomise
from oracle import path
from sliceout import Axis, Slice, Slices
from sliceout.nn import plain_, slice_

# -- Slice -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "rate=1.2: expected 0 <= rate < 1", {"rate": 1.2}),
        (ValueError, "rate=1.0: expected 0 <= rate < 1", {"rate": 1}),
        (ValueError, "rate=-0.1: expected 0 <= rate < 1", {"rate": -0.1}),
        (ValueError, "rate=nan: expected 0 <= rate < 1", {"rate": float("nan")}),
        (TypeError, "rate='0.5': expected a number", {"rate": "0.5"}),
        (TypeError, "rate=None: expected a number", {"rate": None}),
        (TypeError, "rate=True: expected a number", {"rate": True}),
        (ValueError, "size=0: expected at least one unit", {"size": 0}),
        (ValueError, "size=-4: expected at least one unit", {"size": -4}),
        (TypeError, "size=64.0: expected a whole number", {"size": 64.0}),
        (TypeError, "size='64': expected a whole number", {"size": "64"}),
        (TypeError, "size=True: expected a whole number", {"size": True}),
        (ValueError, "align=0: expected a positive whole number", {"align": 0}),
        (ValueError, "align=-8: expected a positive whole number", {"align": -8}),
        (TypeError, "align=8.0: expected a whole number", {"align": 8.0}),
        (ValueError, "size=64 is smaller than align=128: choose a smaller align", {"align": 128}),
        (
            ValueError,
            "rate=0.99 of size=10 keeps 0.1 units, which is 0 at align=1: choose a lower rate or a smaller align",
            {"size": 10, "rate": 0.99},
        ),
        (
            ValueError,
            "rate=0.9 of size=64 keeps 6.4 units, which is 0 at align=16: choose a lower rate or a smaller align",
            {"rate": 0.9, "align": 16},
        ),
        (ValueError, "sampling='random': expected one of 'circular', 'window', 'prefix'", {"sampling": "random"}),
        (ValueError, "norm='batch': expected one of 'probabilistic', 'flow', 'none'", {"norm": "batch"}),
        (ValueError, "norm=None: expected one of 'probabilistic', 'flow', 'none'", {"norm": None}),
        (ValueError, "fold='both': expected one of 'consumer', 'producer'", {"fold": "both"}),
        (TypeError, "seed=0.5: expected a whole number", {"seed": 0.5}),
    ],
)
def test_slice_says_what_is_wrong(error, message, options):
    with pytest.raises(error) as caught:
        Slice(**{"size": 64, "rate": 0.5, **options})
    assert str(caught.value) == message


@pytest.mark.parametrize("rate", [0, 0.0])
def test_rate_zero_is_the_whole_layer(rate):
    s = Slice(10, rate)
    assert (s.width, s.starts, s.sliced) == (10, (0,), False)


@pytest.mark.parametrize(
    ("error", "message", "tiling"),
    [
        (ValueError, "blocks=0: expected at least 1", {"blocks": 0}),
        (ValueError, "inner=-1: expected at least 1", {"inner": -1}),
        (TypeError, "blocks=2.0: expected a whole number", {"blocks": 2.0}),
    ],
)
def test_axis_says_what_is_wrong(error, message, tiling):
    with pytest.raises(error) as caught:
        Slice(8).axis(**tiling)
    assert str(caught.value) == message


def test_a_checkpoint_of_other_slices_is_refused_and_changes_nothing():
    here, there = Slices([Slice(64), Slice(32)]), Slices([Slice(64), Slice(16)], step=9)
    with pytest.raises(ValueError, match=r"\[64, 32\], \[16, 8\].*\[64, 32\], \[32, 16\].*convert it alike first"):
        here.load_state_dict(there.state_dict())
    assert here.step == 0


# -- slices that do not fit their layer --------------------------------------------------------------------------------


def refused(module: nn.Module, error: type[Exception], **slices) -> str:
    """The message with which slice_ refuses; the module must be untouched."""
    before, kind = dict(module.__dict__), type(module)
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in before.items()}
    with pytest.raises(error) as caught:
        slice_(module, **slices)
    assert type(module) is kind
    assert module.__dict__.keys() == before.keys()
    assert all(module.__dict__[k] is before[k] for k in before)
    assert all(dict(module.__dict__[k]) == v for k, v in values.items() if isinstance(v, dict))
    return str(caught.value)


@pytest.mark.parametrize(
    ("layer", "slices", "message"),
    [
        (nn.Linear(8, 4), {"in_slice": 10}, "slice of size 10 does not match in_features=8 of Linear"),
        (nn.Linear(8, 4), {"out_slice": 10}, "slice of size 10 does not match out_features=4 of Linear"),
        (nn.Linear(8, 4), {"in_slice": 8, "out_slice": 8}, "slice of size 8 does not match out_features=4 of Linear"),
        (nn.Conv1d(8, 4, 3), {"in_slice": 4}, "slice of size 4 does not match in_channels=8 of Conv1d"),
        (nn.Conv2d(8, 4, 3), {"out_slice": 8}, "slice of size 8 does not match out_channels=4 of Conv2d"),
        (nn.BatchNorm2d(8), {"slice": 4}, "slice of size 4 does not match num_features=8 of BatchNorm2d"),
        (nn.GroupNorm(2, 8), {"slice": 4}, "slice of size 4 does not match num_channels=8 of GroupNorm"),
        (nn.LayerNorm(8), {"slice": 4}, "slice of size 4 does not match normalized_shape=8 of LayerNorm"),
        (nn.RMSNorm(8), {"slice": 4}, "slice of size 4 does not match normalized_shape=8 of RMSNorm"),
        (nn.PReLU(8), {"slice": 4}, "slice of size 4 does not match num_parameters=8 of PReLU"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_a_slice_of_another_size_is_refused_and_the_layer_untouched(layer, slices, message):
    assert refused(layer, ValueError, **{role: Slice(n) for role, n in slices.items()}) == message


def test_the_size_of_a_tiled_axis_is_named():
    message = refused(nn.Linear(50, 4), ValueError, in_slice=Slice(10).axis(inner=4))
    assert message == "slice of size 10 (axis of 40) does not match in_features=50 of Linear"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: sliceout.nn.Linear(4, 8, in_slice=s), "does not match in_features=4 of Linear"),
        (lambda s: sliceout.nn.Conv1D(8, 4, in_slice=s), "slice of size 10 does not match nx=4 of Conv1D"),
        (lambda s: sliceout.nn.Conv1D(8, 4, out_slice=s), "slice of size 10 does not match nf=8 of Conv1D"),
        (lambda s: sliceout.nn.LayerScale(8, slice=s), "slice of size 10 does not match dim=8 of LayerScale"),
    ],
)
def test_constructors_refuse_a_slice_of_another_size(make, message):
    with pytest.raises(ValueError, match=message):
        make(Slice(10))


def test_slices_that_cut_through_the_groups_of_a_convolution_are_refused():
    conv = nn.Conv2d(8, 8, 3, groups=2)
    rule = "axis(blocks=2), or whole groups with one Slice(2) for input and output"
    message = refused(conv, ValueError, out_slice=Slice(8))
    assert message.startswith("out_slice=Slice(4 of 8, circular) does not fit groups=2")
    assert rule in message
    assert "in_slice=" in refused(conv, ValueError, in_slice=Slice(8), out_slice=Slice(4).axis(blocks=2))
    # two different slices of the groups: input and output would not line up
    depthwise = nn.Conv2d(8, 8, 3, groups=8)
    assert "one Slice(8)" in refused(depthwise, ValueError, in_slice=Slice(8), out_slice=Slice(8))
    # the groups on one side only
    assert "one Slice(8)" in refused(depthwise, ValueError, out_slice=Slice(8))


def test_a_slice_that_cuts_through_the_groups_of_a_norm_is_refused():
    message = refused(nn.GroupNorm(4, 16), ValueError, slice=Slice(16))
    assert message == (
        "slice=Slice(8 of 16, circular) cuts through the 4 groups of this norm: slice whole groups with "
        "Slice(4).axis(inner=4), or inside every group with axis(blocks=4)"
    )


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_several_dimensions_is_refused(kind):
    message = refused(kind((4, 8)), ValueError, slice=Slice(8))
    assert message == "normalized_shape=(4, 8): only a norm over the last dimension alone can be sliced"


# -- the wrong thing in the wrong place --------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Conv1D(nn.Module):
    """Not transformers' Conv1D, whatever it does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.bias = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.Embedding(8, 8),
        nn.ConvTranspose2d(8, 8, 3),
        nn.Sequential(nn.Linear(8, 8)),
        OwnForward(8, 8),
        Conv1D(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_layer_without_a_sliced_form_is_refused(layer):
    message = refused(layer, TypeError, out_slice=Slice(8))
    assert message.startswith(f"{type(layer).__name__} has no sliced form: there is one for BatchNorm1d, ")
    assert "Linear" in message


def test_slicing_twice_is_refused():
    layer = slice_(nn.Linear(8, 8), out_slice=Slice(8))
    message = refused(layer, ValueError, in_slice=Slice(8))
    assert message == "Linear is sliced already: call plain_ on it first"
    assert list(layer.axes) == ["out"]


def test_a_slice_on_the_wrong_side_is_refused():
    assert refused(nn.Linear(8, 8), TypeError, slice=Slice(8)) == (
        "Linear was given slice: it takes in_slice and out_slice"
    )
    assert refused(nn.BatchNorm1d(8), TypeError, out_slice=Slice(8)) == (
        "BatchNorm1d was given out_slice: it takes slice"
    )
    assert refused(nn.GroupNorm(2, 8), TypeError, in_slice=Slice(8), slice=Slice(4).axis(blocks=2)) == (
        "GroupNorm was given in_slice, slice: it takes slice"
    )


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.LayerNorm(8)], ids=["Linear", "LayerNorm"])
def test_slicing_with_no_slice_is_refused(layer):
    assert "was given no slice: it takes" in refused(layer, TypeError)


@pytest.mark.parametrize(
    "thing", [0.5, 8, "hidden", Slice, torch.ones(8)], ids=["rate", "size", "name", "class", "tensor"]
)
def test_something_that_is_no_slice_is_refused(thing):
    assert "expected a Slice, or an Axis from Slice.axis" in refused(nn.Linear(8, 8), TypeError, out_slice=thing)
    with pytest.raises(TypeError, match=r"out_slice=.*: expected a Slice, or an Axis from Slice\.axis"):
        sliceout.nn.Linear(8, 8, out_slice=thing)
    with pytest.raises(TypeError, match=r"slice=.*: expected a Slice, or an Axis from Slice\.axis"):
        sliceout.nn.BatchNorm1d(8, slice=thing)


def test_undoing_what_is_not_sliced_is_refused():
    layer = nn.Linear(8, 8)
    with pytest.raises(TypeError, match="Linear is not sliced"):
        plain_(layer)
    for made in (sliceout.nn.Conv1D(8, 8, in_slice=Slice(8)), sliceout.nn.LayerScale(8, slice=Slice(8))):
        with pytest.raises(TypeError, match="was made sliced and has no plain form"):
            plain_(made)
        assert isinstance(made, sliceout.nn.Sliced)
        assert made.axes


# -- networks that do not add up ---------------------------------------------------------------------------------------


def test_a_slice_that_no_layer_uses_is_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = Slice(8)
            self.body = nn.Module()
            self.body.extra = Slice(16)
            self.body.fc = sliceout.nn.Linear(4, 8, out_slice=self.hidden)

    with pytest.raises(ValueError, match=r"body\.extra = Slice\(8 of 16, circular\) is used by no layer: pass it as"):
        sliceout.slices(Net())


def test_a_model_without_slices_says_how_to_get_them():
    with pytest.raises(
        ValueError, match=r"Sequential has no sliced layer: call sliceout\.convert_ or use sliceout\.nn"
    ):
        sliceout.slices(nn.Sequential(nn.Linear(4, 8)))
    with pytest.raises(ValueError, match="has no sliced layer"):
        sliceout.draw_(nn.Linear(4, 8))


@devices
def test_a_consumer_fed_the_wrong_width_says_what_it_takes(device):
    layer = sliceout.nn.Linear(8, 3, in_slice=Slice(8)).to(device)
    with pytest.raises(RuntimeError, match="was given 5 units: it takes all 8, or the 4 that are kept"):
        layer(torch.zeros(2, 5, device=device))


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_cumulative_average_of_slices_is_refused_before_anything_changes(how):
    layer = sliceout.nn.BatchNorm1d(8, momentum=None, slice=Slice(8))
    with path(how), pytest.raises(ValueError, match=r"momentum=None .* call sliceout\.off_\(model\) before"):
        layer(torch.randn(4, 4))
    assert int(layer.num_batches_tracked) == 0
    assert not layer.running_mean.any()
    layer(torch.randn(4, 8))  # the full layer has its cumulative average
    assert int(layer.num_batches_tracked) == 1


def test_batch_norm_of_one_value_per_channel_fails_as_the_plain_layer_does():
    layer = sliceout.nn.BatchNorm1d(8, slice=Slice(8))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(torch.randn(1, 4))


def test_batch_norm_of_the_wrong_dimensions_fails_as_the_plain_layer_does():
    layer = sliceout.nn.BatchNorm2d(8, slice=Slice(8))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.randn(4, 4))


# -- numbers that are not numbers --------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_in_the_input_pass_through_as_in_the_plain_layer(value, how, device):
    s = Slice(8, sampling="prefix", norm="none")
    for made, shape in (
        (lambda: sliceout.nn.Linear(8, 8, in_slice=s, out_slice=s), (3, 4)),
        (lambda: sliceout.nn.Linear(8, 8, bias=False, in_slice=s, out_slice=s), (3, 4)),
        (lambda: sliceout.nn.Conv2d(8, 8, 1, in_slice=s, out_slice=s), (3, 4, 2, 2)),
        (lambda: sliceout.nn.LayerNorm(8, slice=s), (3, 4)),
        (lambda: sliceout.nn.PReLU(8, slice=s), (3, 4)),
    ):
        layer = randomise(made()).to(device)
        narrow = type(layer)._plain(*([4, 4] + [1] * (len(shape) == 4) if layer.axes.get("in") else [4])).to(device)
        with torch.no_grad():
            for name, p in narrow.named_parameters():
                full = getattr(layer, name) if getattr(layer, name) is not None else p.new_zeros(8)
                p.copy_(full[:4, :4] if full.dim() > 1 else full[:4])
            if layer.axes.get("in") and layer.bias is None:
                narrow.bias.zero_()
        x = torch.randn(shape, device=device)
        x[1, 2] = value
        with path(how):
            got = layer(x)
        assert not got.isfinite().all()
        assert torch.equal(got.isfinite(), narrow(x).isfinite())
        torch.testing.assert_close(got, narrow(x), equal_nan=True)


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_and_single_batches_have_the_shape_of_the_plain_layer(batch):
    s, t = Slice(8), Slice(10)
    x = torch.randn(batch, 3, s.width, requires_grad=True)
    layer = sliceout.nn.Linear(8, 10, in_slice=s, out_slice=t)
    y = layer(x)
    assert y.shape == (batch, 3, t.width)
    y.sum().backward()
    assert layer.weight.grad.shape == (10, 8)
    assert layer.eval()(torch.randn(batch, 3, 8)).shape == (batch, 3, 10)


def test_axes_are_values_and_slices_are_identities():
    """Two equal axes of one slice are the same; two slices of equal size are not."""
    s, t = Slice(8), Slice(8)
    assert s.axis() == Axis(s) == s.axis(1, 1)
    assert s.axis() != t.axis()
    assert s != t
