"""Reasons: a code that the library compares and a sentence that people read, and what is logged besides."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import sliceout
from models import build
from sliceout.conversion import convert
from sliceout.conversion.other_schemes import recognise
from sliceout.conversion.reasons import Reason, Skip
from sliceout.conversion.trace import RuleError, tracer


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))


def codes(report) -> dict[str, Skip]:
    return {r.name: r.reason.code for r in report.skipped}


class Broken(nn.Module):
    """Its code accepts 16 hidden units only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return self.b(self.a(x).relu().view(2, 16))


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"filter": ["0", "2"]}, Skip.FILTERED),
        ({"rate": {"0": 0.5}}, Skip.NO_RATE),
        ({"rate": {"0": 0.5, "4": 0.001}}, Skip.RATE),
    ],
)
def test_options_leave_their_code(settings, code) -> None:
    assert codes(sliceout.convert_(mlp(), **{"rate": 0.5, **settings})) == {"2": code}


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("basic block", {}, Skip.RESIDUAL),
        ("basic block", {}, Skip.STEM),
        ("basic block", {"paper_exclusions": True}, Skip.PAPER_EXCLUSIONS),
        ("timm efficientnet", {"stages": 1}, Skip.STAGES),
        ("llama", {}, Skip.ROTARY),
        ("vit", {"attention": "off"}, Skip.ATTENTION_OFF),
        ("vit", {"attention": "heads"}, Skip.CONFLICT),
        ("basic block", {"scheme": "spatial"}, Skip.NOT_A_MAP),
    ],
)
def test_models_and_recipes_leave_their_code(name, settings, code) -> None:
    model, x = build(name)
    report = sliceout.convert_(model, 0.5, example_inputs=x, **settings)
    assert code in codes(report).values()


def test_the_plain_data_has_code_and_sentence() -> None:
    data = sliceout.convert_(mlp(), 0.5, filter=["0", "2"]).as_dict()["groups"]
    sliced, left = json.loads(json.dumps(data))
    assert (sliced["reason"], sliced["code"], sliced["kind"]) == (None, None, "mlp")
    assert (left["reason"], left["code"]) == ("left out by filter", "filtered")


def test_conflicts_are_in_the_rows_but_not_in_what_is_printed() -> None:
    model, x = build("vit")
    report = sliceout.convert_(model, 0.5, example_inputs=x)
    (text,) = {str(r.reason) for r in report.skipped if r.reason.code is Skip.CONFLICT}
    assert text == "another way to slice the same layers was chosen: attention='dims'"
    assert "another way" not in str(report)


@pytest.mark.parametrize("name", ["basic block", "timm efficientnet", "vit", "gpt2", "llama"])
def test_no_decision_depends_on_a_sentence(name, monkeypatch) -> None:
    def groups() -> list:
        model, x = build(name)
        report = sliceout.convert_(model, 0.5, example_inputs=x)
        return [(r.name, r.group.kind, r.slice and r.slice.width, r.reason and r.reason.code) for r in report.rows]

    expected = groups()
    original = Reason.__init__

    def init(self, code, text) -> None:
        original(self, code, "a sentence")

    monkeypatch.setattr(Reason, "__init__", init)
    assert groups() == expected


# -- errors: the model's are caught and logged, ours are not -----------------------------------------------------------


def logged(caplog, words: str) -> logging.LogRecord:
    found = [r for r in caplog.records if words in r.getMessage()]
    assert found, [r.getMessage() for r in caplog.records]
    assert all(r.name.startswith("sliceout.") for r in found)
    return found[0]


def test_an_error_of_the_models_code_is_logged_with_its_traceback(caplog) -> None:
    caplog.set_level(logging.DEBUG, "sliceout")
    with pytest.raises(ValueError, match="the model cannot take it"):
        sliceout.convert_(Broken(), 0.5, example_inputs=torch.zeros(2, 6))
    record = logged(caplog, "(2, 6) on meta failed in ''")
    assert record.levelno == logging.DEBUG
    assert "shape '[2, 16]' is invalid" in str(record.exc_info[1])
    assert "the model cannot take it" in logged(caplog, "dropped after a trial: a").getMessage()


def test_a_model_that_cannot_be_copied_is_told_and_logged(caplog) -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("there is only one of me")

    caplog.set_level(logging.DEBUG, "sliceout")
    with pytest.raises(ValueError, match=r"could not run Sequential .* there is only one of me"):
        sliceout.convert_(nn.Sequential(Single(6, 64), nn.Linear(64, 3)), 0.5)
    assert isinstance(logged(caplog, "(2, 6) on meta failed").exc_info[1], TypeError)


def test_an_error_of_a_block_that_only_looks_residual_is_logged(caplog) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x, time):
            return x

    caplog.set_level(logging.DEBUG, "sliceout")
    assert recognise(Odd()) is None
    assert isinstance(logged(caplog, "Odd cannot be run as a residual block").exc_info[1], TypeError)


def test_a_bug_in_a_trace_rule_is_not_taken_for_one_of_the_model(monkeypatch) -> None:
    def bug(*args) -> None:
        raise KeyError("ours")

    monkeypatch.setitem(tracer._RULES, "relu", bug)
    with pytest.raises(RuleError, match=r"tracing aten\.relu\.default in 1 failed: please report it") as error:
        sliceout.convert_(mlp(), 0.5)
    assert isinstance(error.value.__cause__, KeyError)


def test_a_bug_in_slicing_a_layer_is_not_taken_for_one_of_the_model(monkeypatch) -> None:
    def bug(*args, **kwargs) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(convert, "give_slices_", bug)
    with pytest.raises(KeyError, match="ours"):
        sliceout.convert_(mlp(), 0.5)


# -- decisions that nobody asked for -----------------------------------------------------------------------------------


def test_the_guessed_input_is_logged(caplog) -> None:
    caplog.set_level(logging.INFO, "sliceout")
    sliceout.convert_(mlp(), 0.5)
    assert logged(caplog, "traced Sequential with [2, 6] (guessed) on meta").levelno == logging.INFO
    caplog.clear()
    sliceout.convert_(mlp(), 0.5, example_inputs=torch.zeros(3, 6))
    assert logged(caplog, "traced Sequential with [3, 6] on meta").getMessage().endswith("on meta")


def test_groups_left_out_as_negligible_are_logged(caplog) -> None:
    caplog.set_level(logging.INFO, "sliceout")
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4096), nn.ReLU(),
                        nn.Linear(4096, 3))  # fmt: skip
    assert codes(sliceout.convert_(net, 0.5)) == {"0": Skip.NEGLIGIBLE}
    assert "0: saves less than 0.1 %" in logged(caplog, "left out").getMessage()
