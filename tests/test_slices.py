"""Slice: widths, eligible starts, keep probabilities, scales, and draws that depend on (seed, stream, step) only."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from fractions import Fraction

import pytest
import torch
from conftest import cuda_only
from hypothesis import assume, given
from hypothesis import strategies as st

from oracle import M32, kept_units, slow_mix
from sliceout import Axis, Slice, Slices
from sliceout.drawing import draw_table as table
from sliceout.drawing import owner_of, starts_at
from sliceout.schemes.subset import Subset, tables
from sliceout.slices import width_of


@st.composite
def slices(draw, sampling=("circular", "window", "prefix"), norm=("probabilistic",), max_size=80):
    size = draw(st.integers(2, max_size))
    align = draw(st.sampled_from([None, 1, 2, 3, 4, 8]))
    rate = draw(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9]))
    assume(rate == 0 or align is None or (align <= size and math.floor((1 - rate) * size / align + 0.5) > 0))
    assume(math.floor((1 - rate) * size + 0.5) > 0)
    return Slice(size, rate, align=align, sampling=draw(st.sampled_from(sampling)), norm=draw(st.sampled_from(norm)))


@st.composite
def subsets(draw, max_size=40):
    size = draw(st.integers(2, max_size))
    return Subset(size, draw(st.sampled_from([0.0, 0.3, 0.5])), align=1, seed=draw(st.integers(0, 5)))


def chi_square_limit(categories: int) -> float:
    """Five standard deviations above the mean of chi-square: passed by chance once in a million uniform samples."""
    freedom = categories - 1
    return freedom + 5 * math.sqrt(2 * freedom) + 10


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((c - expected) ** 2 / expected for c in counts)


# -- widths and starts -------------------------------------------------------------------------------------------------


def test_papers_example():
    hidden = Slice(10, rate=0.4, sampling="window")
    assert hidden.width == 6
    assert hidden.starts == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("size", "rate", "align", "width"),
    [
        (10, 0.4, 1, 6),
        (10, 0.5, 2, 6),  # 2.5 steps of 2 are rounded up
        (10, 0.5, 4, 4),
        (10, 0.1, 4, 8),  # 9 units, but 12 do not fit
        (10, 0.0, 4, 10),  # rate 0 is the whole layer, aligned or not
        (2048, 0.5, None, 1024),
        (100, 0.5, None, 52),  # align 4: the largest power of two up to 8 that divides 100
        (63, 0.5, None, 32),  # align 1 below 64 units
        (640, 0.3, 64, 448),
        (16, 0.01, 8, 16),
    ],
)
def test_width_is_the_kept_fraction_rounded_to_a_multiple_of_align(size, rate, align, width):
    assert Slice(size, rate, align=align).width == width


def test_default_align_is_the_largest_power_of_two_up_to_8_that_divides_the_size():
    assert [Slice(n).align for n in (63, 64, 66, 100, 101, 2048)] == [1, 8, 2, 4, 1, 8]


@given(slices())
def test_width_is_within_half_an_align_of_the_kept_fraction(s):
    assert 1 <= s.width <= s.size
    assert s.rate == 0 or s.width % s.align == 0
    fits = s.size - s.size % s.align if s.rate else s.size
    assert s.width == fits or abs(s.width - (1 - s.rate) * s.size) <= s.align / 2 + 1e-9


@given(slices())
def test_eligible_starts_are_steps_of_align_and_reach_the_end(s):
    room = s.size - s.width
    if s.sampling == "prefix" or room == 0:
        assert s.starts == (0,)
    elif s.sampling == "window":
        assert s.starts == tuple(sorted({*range(0, room + 1, s.align), room}))
    else:
        step = math.gcd(s.align, s.size)
        assert s.starts == tuple(range(0, s.size, step))


# -- keep probabilities and scales -------------------------------------------------------------------------------------


def kept_count(s: Slice) -> list[int]:
    """How many of the eligible starts keep each unit, by enumeration."""
    count = Counter((start + i) % s.size for start in s.starts for i in range(s.width))
    return [count[unit] for unit in range(s.size)]


@given(slices())
def test_keep_probability_equals_enumeration_and_sums_to_the_width(s):
    exact = [Fraction(c, len(s.starts)) for c in kept_count(s)]
    assert sum(exact) == s.width
    assert s.keep_probability.tolist() == [float(p) for p in exact]
    assert s.keep_probability.dtype == torch.float64


@given(slices(sampling=("circular", "window")))
def test_every_unit_can_be_kept(s):
    assert min(kept_count(s)) > 0


@given(slices(sampling=("circular",)))
def test_circular_slices_keep_every_unit_equally_often_for_any_align(s):
    assert len(set(kept_count(s))) == 1


@given(slices(norm=("probabilistic",)))
def test_probabilistic_norm_divides_each_unit_by_its_own_keep_probability(s):
    factor = torch.ones(s.size, dtype=torch.float64) if s.scale is None else s.scale
    kept = s.keep_probability > 0
    torch.testing.assert_close(factor[kept] * s.keep_probability[kept], kept[kept].double(), rtol=1e-15, atol=0)
    assert torch.isfinite(factor).all()


@given(slices(norm=("flow",)))
def test_flow_norm_divides_all_units_by_the_kept_fraction(s):
    factor = torch.ones(s.size, dtype=torch.float64) if s.scale is None else s.scale
    assert factor.tolist() == [s.size / s.width] * s.size


@given(slices(sampling=("circular",), norm=("flow", "probabilistic")))
def test_for_circular_slices_both_norms_are_one_gain(s):
    assert s.gain == pytest.approx(s.size / s.width, rel=1e-15)


@given(slices(norm=("none",)))
def test_norm_none_scales_nothing(s):
    assert (s.gain, s.scale) == (1.0, None)


@given(slices(norm=("probabilistic", "flow", "none")))
def test_gain_is_the_scale_where_that_is_one_number_and_none_elsewhere(s):
    factor = torch.ones(s.size, dtype=torch.float64) if s.scale is None else s.scale
    if s.gain is None:
        assert len(set(factor.tolist())) > 1
    else:
        assert set(factor.tolist()) == {s.gain}


# -- draws -------------------------------------------------------------------------------------------------------------


def slow_start(s: Slice, step: int) -> int:
    """The start at ``step``, in plain Python."""
    bits = slow_mix((slow_mix((slow_mix(s.seed & M32) + step) & M32) + s.stream * 0x9E3779B9) & M32)
    return s.starts[bits * len(s.starts) >> 32]


seeds = st.one_of(st.integers(0, 3), st.integers(-(2**70), 2**70))
steps = st.one_of(st.integers(0, 100), st.integers(0, 2**40))


@given(st.lists(slices(), min_size=1, max_size=5), seeds, st.integers(0, 2**20), steps)
def test_starts_equal_a_slow_reference_in_python_ints(members, seed, stream, step):
    for i, s in enumerate(members):
        s.seed, s.stream = seed, stream + i
    family = Slices(members, step=step)
    for _ in range(3):
        assert [s.start_on_host for s in members] == [slow_start(s, family.step) for s in members]
        assert [int(s.start) for s in members] == [s.start_on_host for s in members]
        family.draw_()


@given(st.lists(slices(), min_size=1, max_size=4), steps)
def test_a_step_given_as_a_tensor_draws_the_same(members, step):
    rows = table(members)
    assert starts_at(torch.tensor(step), rows).tolist() == starts_at(step, rows).tolist()


@cuda_only
def test_gpu_draws_the_same_starts(device):
    members = [Slice(n, 0.5, seed=seed, sampling=how) for n in (7, 64, 2048) for seed in (0, 2**31, -1)
               for how in ("circular", "window")]  # fmt: skip
    Slices(members)
    rows = table(members)
    for step in (0, 1, 12345, 2**33):
        assert starts_at(step, rows.to(device)).tolist() == starts_at(step, rows).tolist()
        assert starts_at(torch.tensor(step, device=device), rows.to(device)).tolist() == starts_at(step, rows).tolist()


@cuda_only
def test_draws_reach_the_device_of_each_slice(device):
    here, there = Slice(64, 0.5), Slice(64, 0.5)
    family = Slices([here, there])
    there.to(torch.device(device, torch.cuda.current_device()))
    for _ in range(5):
        family.draw_()
        assert (int(here.start), int(there.start)) == (here.start_on_host, there.start_on_host)
        assert (here.start.device.type, there.start.device.type) == ("cpu", "cuda")


def test_draws_neither_read_nor_advance_the_global_random_state():
    def ten_starts(seed):
        torch.manual_seed(seed)
        family = Slices([Slice(2048, 0.5), Slice(512, 0.5)])
        starts = []
        for _ in range(10):
            family.draw_()
            starts.append([s.start_on_host for s in family])
        return starts, torch.get_rng_state()

    (a, after), (b, _) = ten_starts(1), ten_starts(2)
    assert a == b
    torch.manual_seed(1)
    assert torch.equal(after, torch.get_rng_state())


def test_seeds_streams_and_steps_give_different_draws():
    def sequence(seed=0, stream=0, first=0):
        s = Slice(2048, 0.5, align=1, seed=seed)
        s.stream = stream
        return starts_at(torch.arange(first, first + 32), table([s])).tolist()

    sequences = [sequence(), sequence(seed=1), sequence(stream=1), sequence(first=1000)]
    for i, a in enumerate(sequences):
        for b in sequences[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) <= 2


def test_slices_of_one_model_get_streams_of_their_own():
    members = [Slice(2048, 0.5) for _ in range(6)]
    family = Slices(members)
    assert len({s.stream for s in members}) == 6
    family.draw_()
    assert len({s.start_on_host for s in members}) > 1


@pytest.mark.parametrize("sampling", ["circular", "window"])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_starts_are_uniform(seed, sampling):
    s = Slice(20, 0.5, align=1, sampling=sampling, seed=seed)
    counts = Counter(starts_at(torch.arange(40_000), table([s])).tolist())
    assert set(counts) == set(s.starts)
    assert chi_square([counts[start] for start in s.starts]) < chi_square_limit(len(s.starts))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 0, 0), (0, 0, 1)),  # consecutive steps of one slice
        ((0, 0, 0), (0, 0, 7)),
        ((0, 0, 0), (0, 1, 0)),  # two slices of a model at one step
        ((0, 3, 0), (0, 11, 0)),
        ((0, 1, 0), (0, 0, 1)),  # a neighbour's next step
        ((0, 0, 0), (1, 0, 0)),  # two seeds
    ],
    ids=str,
)
def test_draws_are_independent_across_streams_steps_and_seeds(a, b):
    """The pairs of starts fill the square of possibilities evenly."""
    columns = []
    for seed, stream, shift in (a, b):
        s = Slice(8, 0.5, align=1, seed=seed)
        s.stream = stream
        columns.append(starts_at(torch.arange(shift, shift + 40_000), table([s])))
    pairs = Counter((columns[0] * 8 + columns[1]).tolist())
    assert chi_square([pairs[i] for i in range(64)]) < chi_square_limit(64)


@given(st.lists(subsets(), min_size=1, max_size=4), steps)
def test_the_table_of_a_subset_lists_its_units_and_their_places(members, step):
    family = Slices(members, step=step)
    for _ in range(2):
        for s in members:
            order, place = s.start
            assert order[: s.width].tolist() == s.kept.tolist() == kept_units(s)
            assert sorted(order.tolist()) == list(range(s.size))
            assert place[order].tolist() == list(range(s.size))
        family.draw_()


def test_every_pair_of_units_is_kept_equally_often_by_a_subset():
    """Six units, three kept: each of the 20 subsets as often as the others."""
    made = tables(starts_at(torch.arange(20_000), table([Subset(6, 0.5)])).tolist(), 6, 3)
    counts = Counter(map(tuple, made[:, 0, :3].tolist()))
    assert len(counts) == 20
    assert chi_square(list(counts.values())) < chi_square_limit(20)


def test_drawing_again_from_an_earlier_step_repeats_the_sequence():
    family = Slices([Slice(64, 0.5), Slice(32, 0.25)])
    seen = []
    for _ in range(6):
        family.draw_()
        seen.append([s.start_on_host for s in family])
    family.seek_(2)
    for expected in seen[2:]:
        family.draw_()
        assert [s.start_on_host for s in family] == expected


def test_state_dict_continues_the_sequence_elsewhere():
    here, there = (Slices([Slice(64, 0.5, seed=seed), Slice(32, 0.25, seed=seed)]) for seed in (3, 4))
    for _ in range(5):
        here.draw_()
    there.load_state_dict(here.state_dict())
    for _ in range(3):
        assert [s.start_on_host for s in there] == [s.start_on_host for s in here]
        here.draw_()
        there.draw_()


# -- the live slice ----------------------------------------------------------------------------------------------------


@given(st.one_of(slices(), subsets()), st.integers(0, 50), st.integers(1, 3), st.integers(1, 3))
def test_kept_units_are_the_run_from_the_start_or_the_subset_in_order(s, step, blocks, inner):
    owner_of(s).seek_(step)
    assert s.kept.tolist() == kept_units(s)
    axis = s.axis(blocks=blocks, inner=inner)
    entries = torch.arange(blocks * s.size * inner).view(blocks, s.size, inner)
    assert axis.kept.tolist() == entries[:, s.kept].flatten().tolist()
    assert (axis.size, axis.width) == (entries.numel(), len(axis.kept))


def test_window_slices_never_wrap_and_circular_ones_do():
    wraps = {}
    for sampling in ("circular", "window"):
        s = Slice(12, 0.5, sampling=sampling)
        wraps[sampling] = [start + s.width > s.size for start in s.starts]
    assert any(wraps["circular"])
    assert not any(wraps["window"])


def test_a_slice_is_live_unless_switched_off_or_at_rate_zero():
    s = Slice(8, 0.5)
    assert s.sliced
    s.on = False
    assert not s.sliced
    assert not Slice(8, 0.0).sliced
    assert not Slice(8, 0).sliced


@given(slices(sampling=("circular", "window")), st.sampled_from([0.0, 0.2, 0.5]), st.integers(0, 20))
def test_a_changed_rate_is_as_if_it_had_been_there_from_the_start(s, rate, step):
    other = Slice(s.size, rate, align=s.align, sampling=s.sampling) if rate * s.size >= s.align else None
    assume(other is not None)
    owner_of(s).seek_(step)
    owner_of(other).seek_(step)
    start, scale = s.start, s.scale
    s.rerate_(rate)
    assert (s.width, s.rate, s.gain, s.start_on_host) == (other.width, other.rate, other.gain, other.start_on_host)
    assert s.start is start, "graphs hold this tensor"
    assert scale is None or s.scale is scale
    if other.scale is not None:
        assert torch.equal(s.scale, other.scale)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_a_family_draw_the_same_and_by_themselves(clone):
    family = Slices([Slice(64, 0.5), Slice(32, 0.25, sampling="window")])
    family.draw_()
    other = clone(family)
    assert [s.owner is other for s in other] == [True, True]
    before = [s.start_on_host for s in family]
    assert [s.start_on_host for s in other] == before
    other.draw_()
    assert [s.start_on_host for s in family] == before
    family.draw_()
    assert [s.start_on_host for s in other] == [s.start_on_host for s in family]
    assert [s.start.item() for s in other] == [s.start_on_host for s in other]


def test_numpy_integers_are_taken_as_ints():
    numpy = pytest.importorskip("numpy")
    s = Slice(numpy.int64(64), numpy.float32(0.5), align=numpy.int32(4), seed=numpy.int64(3))
    assert [type(v) for v in (s.size, s.rate, s.align, s.width, s.seed)] == [int, float, int, int, int]
    assert [type(v) for v in s.axis(blocks=numpy.int64(2)).geometry] == [int] * 4


def test_repr_says_what_is_kept():
    assert repr(Slice(10, 0.4)) == "Slice(6 of 10, circular)"
    assert repr(Slice(10, 0.4, sampling="window", norm="flow", fold="producer")) == (
        "Slice(6 of 10, window, norm=flow, fold=producer)"
    )
    assert repr(Axis(Slice(10, 0.4), 2, 3)) == "Slice(6 of 10, circular), blocks=2, inner=3"


@given(st.integers(1, 200), st.floats(0, 0.999), st.one_of(st.none(), st.integers(1, 16)))
def test_any_size_rate_and_align_gives_a_usable_width_or_a_value_error(size, rate, align):
    step = align or 1
    if rate and align and (size < align or (1 - rate) * size < step / 2):
        with pytest.raises(ValueError, match="choose"):
            width_of(size, rate, align)
        return
    assume((1 - rate) * size >= 4.5)  # half of the largest default align
    width, align = width_of(size, rate, align)
    assert 1 <= width <= size
    assert rate == 0 or width % align == 0
