"""The demo trains three schemes on equal terms, and reports what it measured."""

from __future__ import annotations

import io
import statistics

import pytest
import torch
from rich.console import Console

import sliceout
from sliceout.cli import UserError
from sliceout_lab import demo_view as show
from sliceout_lab.data import Images
from sliceout_lab.demo import (
    DROPOUT,
    NONE,
    SLICEOUT,
    Scheme,
    Settings,
    accuracy,
    batches,
    schemes,
    steps_per_epoch,
    summary,
    train,
)
from sliceout_lab.models.mlp import mlp

WIDTHS = [12, 64, 64, 4]
QUICK = Settings(epochs=4, hidden=(64, 64), batch=16, lr=3e-3)


@pytest.fixture(scope="module")
def data() -> Images:
    """Four classes, each with three pixels of its own that light up: easy, but not for an untrained network."""
    generator = torch.Generator().manual_seed(1)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(4, (n,), generator=generator)
        images = torch.randint(100, (n, 12), generator=generator)
        images.view(n, 4, 3)[torch.arange(n), labels] += 150
        return images.view(n, 3, 4).byte(), labels.byte()

    return Images("toy", *draw(330), *draw(200), classes=4)


@pytest.fixture(scope="module")
def trained(data: Images) -> list[Scheme]:
    contenders = schemes(QUICK, WIDTHS)
    for _ in train(contenders, data, QUICK):
        pass
    return contenders


def test_all_start_from_the_same_weights() -> None:
    none, dropout, sliced = (list(s.model.parameters()) for s in schemes(QUICK, WIDTHS))
    for a, b, c in zip(none, dropout, sliced, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_schemes_are_what_they_are_called() -> None:
    by_name = {s.name: s.model for s in schemes(Settings(rate=0.25, hidden=(64, 64)), WIDTHS)}
    assert [m.p for m in by_name[DROPOUT] if isinstance(m, torch.nn.Dropout)] == [0.25, 0.25]
    assert not any(isinstance(m, torch.nn.Dropout) for m in by_name[NONE])
    assert [(s.width, s.size, s.sampling) for s in sliceout.slices(by_name[SLICEOUT])] == [(48, 64, "circular")] * 2
    assert by_name[SLICEOUT][0](torch.rand(5, 12)).shape == (5, 48)


def test_turns_are_fair(data: Images) -> None:
    contenders = schemes(QUICK, WIDTHS)
    names = [s.name for s in train(contenders, data, QUICK)]
    steps = steps_per_epoch(len(data.train), QUICK.batch)
    assert steps == 20
    assert len(names) == 3 * (steps + 1) * QUICK.epochs  # each step, and once more for the evaluation after an epoch
    assert names[:9] == [NONE, DROPOUT, SLICEOUT, DROPOUT, SLICEOUT, NONE, SLICEOUT, NONE, DROPOUT]
    assert names[3 * steps : 3 * steps + 3] == [NONE, DROPOUT, SLICEOUT]
    assert names[3 * steps + 3] == SLICEOUT  # 20 rounds are over, so the third goes first


def test_batches_are_equal_for_all_and_new_every_epoch() -> None:
    first, again, later = ([b.tolist() for b in batches(10, 4, seed=0, epoch=e)] for e in (0, 0, 1))
    assert first == again != later
    assert [len(b) for b in first] == [4, 4]
    assert len({i for b in first for i in b}) == 8
    assert [len(b) for b in batches(3, 4, seed=0, epoch=0)] == [3]


def test_every_scheme_learns(trained: list[Scheme]) -> None:
    for s in trained:
        assert s.accuracy > 0.9, s.name
        assert len(s.steps) == 20 * QUICK.epochs
        assert len(s.curve) == QUICK.epochs
        assert s.curve[-1] == (sum(s.steps), s.accuracy)


def test_slices_move_on_once_a_step(trained: list[Scheme]) -> None:
    sliced = trained[2].model
    assert sliceout.slices(sliced).step == len(trained[2].steps) + 1  # and once for the step whose memory is measured


def test_same_seed_same_result_whatever_the_global_state(data: Images, trained: list[Scheme]) -> None:
    torch.rand(3)
    again = schemes(QUICK, WIDTHS)
    for _ in train(again, data, QUICK):
        pass
    assert [s.loss for s in again if s.name != DROPOUT] == [s.loss for s in trained if s.name != DROPOUT]
    assert [a for _, a in again[2].curve] == [a for _, a in trained[2].curve]


def test_accuracy_is_that_of_the_full_network(data: Images, trained: list[Scheme]) -> None:
    x, y = data.test.flatten(1).float() / 255, data.test_labels.long()
    plain = mlp(WIDTHS, dropout=0.5).eval()
    plain.load_state_dict(trained[2].model.state_dict())
    assert accuracy(trained[2].model, x, y) == float((plain(x).argmax(1) == y).double().mean())
    assert accuracy(plain, x, (plain(x).argmax(1) + 1) % 4) == 0


def test_peak_memory_holds_parameters_gradients_and_state(trained: list[Scheme]) -> None:
    for s in trained:
        parameters = sum(p.nbytes for p in s.model.parameters())
        assert 4 * parameters < s.peak < 8 * parameters, s.name


def test_summary_says_what_was_measured(data: Images, trained: list[Scheme]) -> None:
    result = summary(trained, data, QUICK)
    assert result["images"] == {"train": 330, "test": 200}
    assert result["settings"]["rate"] == 0.5
    assert result["machine"]["torch"] == torch.__version__
    for s in trained:
        row = result["schemes"][s.name]
        assert row["ms_per_step"] == pytest.approx(1000 * statistics.median(s.steps))
        assert row["test_accuracy"] == s.accuracy


def test_table_is_relative_to_standard_dropout() -> None:
    made = _contenders([0.010, 0.020, 0.008], peaks=[10_000_000, 20_000_000, 5_000_000])
    text = _printed(show.table(made, "title"))
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows[SLICEOUT] == ["8.0 ms", "40%", "5.0 MB", "25%", "90.0%"]
    assert rows[DROPOUT] == ["20.0 ms", "100%", "20.0 MB", "100%", "90.0%"]


def test_notes_compare_at_equal_time_and_own_up_to_memory() -> None:
    made = _contenders([0.010, 0.020, 0.008], peaks=[10, 20, 20])
    text = " ".join(show.notes(made))
    assert "took SliceOut 2.4 s and dropout 6.0 s" in text
    assert "After 2.4 s, dropout had reached 72.0% and no dropout had reached 84.0%" in text
    assert "leaves at full size" in text
    made[1].curve = made[1].curve[2:]
    assert "dropout had not finished an epoch" in " ".join(show.notes(made))
    made[2].peak = 10
    assert "leaves at full size" not in " ".join(show.notes(made))


def test_progress_without_a_terminal_is_one_line_an_epoch(data: Images) -> None:
    contenders = schemes(QUICK, WIDTHS)
    console = Console(file=io.StringIO(), width=120)
    show.follow(train(contenders, data, QUICK), contenders, QUICK.epochs, 20, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 3 * QUICK.epochs
    assert max(map(len, lines)) <= 80 - 10  # which leaves room for a bar in a terminal
    assert [line[:10].strip() for line in lines[:3]] == [NONE, DROPOUT, SLICEOUT]
    assert lines[-1].endswith("00:00 left")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (Settings(rate=1.0), r"--rate 1.0: expected 0 < rate < 1"),
        (Settings(rate=0.0), r"--rate 0.0: expected 0 < rate < 1"),
        (Settings(rate=-0.1), r"--rate -0.1: expected 0 < rate < 1"),
        (Settings(rate=float("nan")), r"--rate nan: expected 0 < rate < 1"),
        (Settings(rate=0.999, hidden=(64,)), r"--rate 0.999: rate=0.999 of size=64 keeps 0.064 units"),
        (Settings(rate=0.001), r"--rate 0.001: keeps all 2048 units"),
        (Settings(epochs=0), r"--epochs 0: expected at least 1"),
        (Settings(seed=-1), r"--seed -1: expected 0 <= seed"),
    ],
)
def test_bad_settings(settings: Settings, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        settings.check()


def _contenders(steps: list[float], peaks: list[int]) -> list[Scheme]:
    """Finished runs of 300 steps and three epochs, with these times and peaks."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    made = []
    for name, seconds, peak in zip((NONE, DROPOUT, SLICEOUT), steps, peaks, strict=True):
        s = Scheme(name, torch.nn.Identity(), optimizer, steps=[seconds] * 300, accuracy=0.9, peak=peak)
        s.curve = [(100 * seconds, 0.7), (200 * seconds, 0.8), (300 * seconds, 0.9)]
        made.append(s)
    return made


def _printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]
