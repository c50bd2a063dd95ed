"""Batches: every sample once an epoch, the same ones for the same seed, cropped as a loop over single images would."""

from __future__ import annotations

import pytest
import torch
from conftest import devices
from hypothesis import given
from hypothesis import strategies as st

from sliceout.cli import UserError
from sliceout_lab.data import Images, Tokens, augment, feed


def numbered(n: int, channels: int | None = 3, side: int = 8, test: int = 5, classes: int = 10) -> Images:
    """Images of one grey each: the first pixel of the first channel tells the number (below 256) of an image."""
    shape = (n, side, side) if channels is None else (n, channels, side, side)
    train = torch.arange(n).view(-1, *[1] * (len(shape) - 1)).expand(shape).to(torch.uint8)
    labels = torch.arange(n) % classes
    return Images("numbered", train.clone(), labels, train[:test].clone(), labels[:test], classes)


def noise(n: int, channels: int = 3, height: int = 8, width: int = 8) -> Images:
    images = torch.randint(256, (n, channels, height, width), generator=torch.Generator().manual_seed(1)).byte()
    return Images("noise", images, torch.arange(n) % 10, images[:3], torch.arange(3), 10)


def cropped_by_hand(image: list, y: int, x: int, mirrored: bool) -> list:
    """One image ``[c][h][w]``, cropped pixel by pixel: a margin of 4, a window at (y, x), then the mirror."""
    out = []
    for channel in image:
        height, width = len(channel), len(channel[0])
        window = []
        for i in range(height):
            line = []
            for j in range(width):
                a, b = y + i - 4, x + j - 4
                line.append(channel[a][b] if 0 <= a < height and 0 <= b < width else 0)
            window.append(line[::-1] if mirrored else line)
        out.append(window)
    return out


@devices
@pytest.mark.parametrize("channels_last", [False, True])
def test_crops_are_those_of_a_loop_over_single_images(device: str, channels_last: bool) -> None:
    images = noise(6, height=7, width=5).train.to(device)
    order = torch.channels_last if channels_last else torch.contiguous_format
    padded = augment.pad(images.contiguous(memory_format=order))
    rows = torch.tensor([5, 0, 3, 3, 1, 2, 4, 0, 0], device=device)
    draws = torch.tensor(
        [[0, 0, 0], [0, 0, 1], [8, 8, 0], [8, 8, 1], [4, 4, 0], [4, 4, 1], [0, 8, 1], [3, 6, 0], [7, 1, 1]]
    )
    got = augment.crop(padded, rows, draws.to(device))
    assert got.dtype == torch.uint8
    assert got.is_contiguous(memory_format=order)
    for picture, row, (y, x, mirrored) in zip(got, rows, draws.tolist(), strict=True):
        assert picture.tolist() == cropped_by_hand(images[row].tolist(), y, x, bool(mirrored))
    assert torch.equal(got[4], images[1])


def test_every_place_and_both_directions_are_drawn_equally_often() -> None:
    draws = augment.draw_crops(81_000, augment.generator(0))
    for column, values in ((0, 9), (1, 9), (2, 2)):
        share = draws[:, column].bincount(minlength=values).double() / len(draws)
        assert len(share) == values
        assert (share - 1 / values).abs().max() < 0.006  # five standard errors
    joint = (draws[:, 0] * 18 + draws[:, 1] * 2 + draws[:, 2]).bincount(minlength=162)
    assert joint.min() > 380  # of 500: row, column and mirror do not depend on each other


@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 9),
    channels=st.sampled_from([None, 1, 3]),
    flatten=st.booleans(),
    channels_last=st.booleans(),
    kind=st.sampled_from(["none", "crop-flip", "imagenet"]),
    normalise=st.sampled_from(["unit", "standard", "lite", "none"]),
)
def test_shapes_and_types(n, batch, channels, flatten, channels_last, kind, normalise) -> None:
    data = numbered(n, channels)
    kwargs = {"augment": kind, "flatten": flatten, "channels_last": channels_last, "normalise": normalise}
    if batch > n:
        with pytest.raises(UserError, match="one step of 1 process"):
            feed(data, batch, "cpu", **kwargs)
        return
    made = feed(data, batch, "cpu", **kwargs)
    assert made.steps == n // batch
    batches = list(made.epoch(0, 0))
    assert len(batches) == made.steps
    x0, y0 = made.inputs_like()
    shape = (batch, (channels or 1) * 64) if flatten else (batch, channels or 1, 8, 8)
    for x, y in batches:
        assert x.shape == x0.shape == shape
        assert y.shape == y0.shape == (batch,)
        assert x.dtype == x0.dtype == torch.float32
        assert y.dtype == y0.dtype == torch.int64
        assert x.stride() == x0.stride()
        if channels_last and not flatten:
            assert x.is_contiguous(memory_format=torch.channels_last)
    seen = [len(y) for _, y in made.test()]
    assert sum(seen) == len(data.test)


@given(n=st.integers(20, 200), batch=st.integers(1, 7), world=st.integers(1, 3), seed=st.integers(0, 5))
def test_each_image_comes_once_an_epoch_and_no_two_processes_share_one(n, batch, world, seed) -> None:
    data = numbered(n)
    feeds = [feed(data, batch, "cpu", rank=r, world=world, normalise="none") for r in range(world)]
    for epoch in (0, 1):
        seen = []
        for made in feeds:
            for x, y in made.epoch(seed, epoch):
                numbers = x[:, 0, 0, 0].long()
                assert torch.equal(numbers % 10, y)
                seen += numbers.tolist()
        assert len(set(seen)) == len(seen) == n // (batch * world) * batch * world


@pytest.mark.parametrize("kind", ["none", "crop-flip", "imagenet"])
def test_processes_together_see_what_one_alone_sees(kind: str) -> None:
    data = noise(50)
    alone = list(feed(data, 6, "cpu", augment=kind).epoch(3, 1))
    parts = [list(feed(data, 2, "cpu", augment=kind, rank=r, world=3).epoch(3, 1)) for r in range(3)]
    for step, (x, y) in enumerate(alone):
        assert torch.equal(torch.cat([p[step][0] for p in parts]), x)
        assert torch.equal(torch.cat([p[step][1] for p in parts]), y)


@pytest.mark.parametrize("kind", ["none", "crop-flip", "imagenet"])
def test_an_epoch_depends_on_seed_and_number_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(40)
    made = feed(data, 4, "cpu", augment=kind)
    state = torch.random.get_rng_state()
    first = list(made.epoch(7, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    list(made.epoch(7, 1))
    again = list(feed(data, 4, "cpu", augment=kind).epoch(7, 2))
    late = list(made.epoch(7, 2, start=3))
    monkeypatch.setattr("sliceout_lab.data.feeds.MADE_AT_ONCE", 1)  # one batch at a time
    single = list(feed(data, 4, "cpu", augment=kind).epoch(7, 2))
    for a, b in ((first, again), (first[3:], late), (first, single)):
        assert len(a) == len(b)
        assert all(torch.equal(p[i], q[i]) for p, q in zip(a, b, strict=True) for i in (0, 1))
    for other in (made.epoch(7, 3), made.epoch(8, 2)):
        assert not all(torch.equal(p[1], q[1]) for p, q in zip(first, other, strict=True))


def test_standard_means_mean_zero_and_variance_one_of_every_channel() -> None:
    data = noise(60)
    data.train[:, 1] //= 3
    x = torch.cat([x for x, _ in feed(data, 60, "cpu", normalise="standard").epoch(0, 0)])
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-4


def test_fixed_scalings() -> None:
    data = noise(8)
    raw = data.test.float()
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = {"unit": raw / 255, "lite": (raw - 127) / 128, "none": raw, "imagenet": (raw / 255 - mean) / std}
    for name, wanted in expected.items():
        (x, _), *_ = feed(data, 4, "cpu", normalise=name).test()
        torch.testing.assert_close(x, wanted)
    with pytest.raises(UserError, match="is for 3 channels, the images have 1"):
        feed(numbered(8, None), 4, "cpu", normalise="imagenet")


def test_resized_crops_read_the_box_they_are_given() -> None:
    ramp = torch.arange(64).float().expand(1, 1, 64, 64)  # the value is the column
    whole = torch.tensor([[0.5, 0.5, 1.0, 1.0, 1.0]])
    assert torch.allclose(augment.resample(ramp, whole, 64), ramp, atol=1e-4)
    mirrored = torch.tensor([[0.5, 0.5, 1.0, 1.0, -1.0]])
    assert torch.allclose(augment.resample(ramp, mirrored, 64), ramp.flip(3), atol=1e-4)
    right_half = torch.tensor([[0.75, 0.5, 0.5, 1.0, 1.0]])
    got = augment.resample(ramp, right_half, 32)[0, 0, 5]
    assert torch.allclose(got, torch.arange(32, 64).float(), atol=1e-4)


def test_resized_crops_have_the_usual_areas_and_ratios() -> None:
    aspects = torch.full((20_000,), 4 / 3, dtype=torch.float64)
    chance = torch.rand(20_000, 5, generator=augment.generator(0), dtype=torch.float64)
    x, y, width, height, mirror = augment.random_boxes(aspects, chance).double().unbind(1)
    area, ratio = width * height, width * aspects / height
    assert area.min() > 0.079
    assert 0.50 < area.mean() < 0.54  # a little less than (0.08 + 1) / 2: boxes that do not fit are cut
    inside = (width < 1) & (height < 1)
    assert ratio[inside].min() > 0.749
    assert ratio[inside].max() < 1.334
    for centre, extent in ((x, width), (y, height)):
        assert (centre - extent / 2).min() > -1e-6
        assert (centre + extent / 2).max() < 1 + 1e-6
    assert abs(float(mirror.mean())) < 0.04


def text(n: int) -> Tokens:
    stream = torch.arange(n, dtype=torch.int32)
    return Tokens("count", stream, stream[:23], stream[:1], vocabulary=n)


@given(n=st.integers(60, 300), batch=st.integers(1, 4), sequence=st.integers(1, 6), world=st.integers(1, 2))
def test_windows_of_text_are_shifted_by_one_and_do_not_overlap(n, batch, sequence, world) -> None:
    feeds = [feed(text(n), batch, "cpu", sequence=sequence, rank=r, world=world) for r in range(world)]
    for epoch in range(3):
        seen = []
        for made in feeds:
            batches = list(made.epoch(0, epoch))
            assert len(batches) == made.steps
            for x, y in batches:
                assert x.shape == y.shape == made.inputs_like()[0].shape == (batch, sequence)
                assert x.dtype == y.dtype == torch.int64
                assert torch.equal(y, x + 1)
                assert torch.equal(x, x[:, :1] + torch.arange(sequence))
                seen += x.flatten().tolist()
        assert len(set(seen)) == len(seen)
        assert n - len(seen) < sequence * (batch * world + 2)


def test_every_token_of_the_test_text_but_the_first_is_a_target_once() -> None:
    made = feed(text(100), 2, "cpu", sequence=4)
    batches = list(made.test("valid"))
    assert [tuple(x.shape) for x, _ in batches] == [(2, 4), (2, 4), (1, 4), (1, 2)]
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, 23))
    assert torch.cat([x.flatten() for x, _ in batches]).tolist() == list(range(22))
    assert list(made.test("test")) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"augment": "blur"}, "augment='blur': expected one of none, crop-flip, imagenet"),
        ({"normalise": "x"}, "normalise='x': expected one of"),
        ({"batch": 0}, "batch=0: expected at least 1"),
        ({"rank": 2, "world": 2}, "rank=2: expected 0 <= rank < world = 2"),
        ({"batch": 16, "world": 2}, "has 20 training images, one step of 2 process"),
    ],
)
def test_wrong_values_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        feed(numbered(20), **{"batch": 4, "device": "cpu", **wrong})
    with pytest.raises(UserError, match="is for images, count is text"):
        feed(text(100), 4, "cpu", augment="crop-flip", sequence=2)
