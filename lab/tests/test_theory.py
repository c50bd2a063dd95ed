"""Theory as code, against counting and against sampling."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from oracle import exactly
from sliceout import Slice, Subset
from sliceout_lab import cli
from sliceout_lab.theory import architectures, compare, controlled_moments, dropout_moments, masks, moments
from sliceout_lab.theory_view import keep_plot


@pytest.fixture
def layer():
    return torch.randn(5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)


def brute(weight, x, columns, rows=None):
    """Moments over lists of (probability, mask)."""
    rows = rows or [(1.0, torch.ones(len(weight)))]
    mean, second = 0.0, 0.0
    for (p, c), (q, r) in itertools.product(columns, rows):
        y = r * (weight @ (c * x))
        mean, second = mean + p * q * y, second + p * q * torch.outer(y, y)
    return mean, second


def uniform(s):
    """Each start with its mask, by definition."""
    out = []
    for start in s.starts:
        mask = torch.zeros(s.size, dtype=torch.float64)
        for i in range(s.width):
            unit = (start + i) % s.size
            keeping = sum((unit - a) % s.size < s.width for a in s.starts)
            mask[unit] = len(s.starts) / keeping if s.norm == "probabilistic" else s.size / s.width
        out.append((1 / len(s.starts), mask))
    return out


@pytest.mark.parametrize("sampling", ["window", "circular"])
@pytest.mark.parametrize("norm", ["flow", "probabilistic"])
def test_moments_are_sums_over_all_pairs_of_starts(layer, sampling, norm):
    weight, x = layer
    into, out = Slice(8, 0.4, sampling=sampling, norm=norm), Slice(5, 0.4, sampling=sampling, norm=norm)
    got = moments(weight, x, into, out)
    mean, second = brute(weight, x, uniform(into), uniform(out))
    exactly(got.mean, mean)
    exactly(got.second, second)
    assert got.errors(got) == (0.0, 0.0)
    kept = torch.allclose(mean, weight @ x)
    assert kept == (norm == "probabilistic" or sampling == "circular")


def test_standard_and_controlled_dropout_have_closed_forms(layer):
    weight, x = layer
    rate = 0.3
    everything = [
        (math.prod(1 - rate if k else rate for k in kept), torch.tensor(kept, dtype=torch.float64) / (1 - rate))
        for kept in itertools.product((0, 1), repeat=8)
    ]
    got = dropout_moments(weight, x, rate)
    for one, other in zip((got.mean, got.second), brute(weight, x, everything), strict=True):
        exactly(one, other)
    s = Subset(8, 0.4)
    subsets = list(itertools.combinations(range(8), s.width))
    each = [
        (1 / len(subsets), torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor(c), 8 / s.width))
        for c in subsets
    ]
    got = controlled_moments(weight, x, s)
    for one, other in zip((got.mean, got.second), brute(weight, x, each), strict=True):
        exactly(one, other)
    assert architectures(s) == len(subsets)


def test_the_number_of_networks_is_that_of_distinct_masks():
    one, two = Slice(10, 0.4, sampling="window"), Slice(7, 0.5, sampling="circular", align=1)
    assert architectures(one) == len(masks(one).unique(dim=0)) == 5
    assert architectures(two) == len(masks(two).unique(dim=0)) == 7
    assert architectures(one, two) == 35  # every pair: quadratic
    assert architectures() == 1
    wide, wider = (architectures(Slice(n, 0.5, sampling="window", align=1)) for n in (512, 1024))
    assert (wide, wider) == (257, 513)  # linear


def test_compare_knows_what_the_paper_claims():
    lines = {(line.scheme, line.norm): line for line in compare(64, 0.5)}
    assert lines["window", "probabilistic"].mean_error < 1e-12
    assert lines["circular", "probabilistic"].mean_error < 1e-12
    assert lines["window", "flow"].mean_error > 0.01
    assert lines["standard", "either"].networks == 2**64
    assert lines["window", "probabilistic"].second_error > lines["circular", "probabilistic"].second_error


def test_the_text_plot_has_the_shape_of_the_probabilities():
    window, circular = (
        keep_plot(Slice(64, 0.5, sampling=s, align=1), columns=32).splitlines() for s in ("window", "circular")
    )
    assert [len(line) for line in window[:6]] == [37] * 6
    assert window[0].startswith("1.0 |")
    assert set(window[0][5:11]) == {" "}  # the edges are rarely kept, the middle nearly always
    assert window[0][20] in "▆▇█"
    assert window[0][5:] == window[0][5:][::-1]
    assert set(circular[0][5:]) == {" "}
    assert set(circular[5][5:]) == {"█"}


def test_the_command(capsys, tmp_path):
    picture = tmp_path / "new" / "keep.png"
    assert cli.main(["theory", "--size", "2048", "--rate", "0.5", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "1024 of 2048 units, 129 starts (window)" in out
    assert "16,641 if both are" in out.replace("\n", " ")
    assert "10^617" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(("arguments", "message"), [
    (["--rate", "1"], "rate=1.0: expected 0 <= rate < 1"),
    (["--size", "0"], "size=0: expected at least one unit"),
    (["--sampling", "no"], "sampling='no': expected one of"),
    (["--size", "4", "--align", "8"], "size=4 is smaller than align=8"),
    (["--plot", "/proc/no/keep.png"], "--plot /proc/no: cannot write there"),
])  # fmt: skip
def test_what_the_command_refuses(capsys, arguments, message):
    assert cli.main(["theory", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_command_leaves_no_file_behind_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["theory", "--size", "16", "--rate", "0.25"]) == 0
    assert list(Path(tmp_path).iterdir()) == []
