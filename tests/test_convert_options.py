"""Options that the chosen scheme ignores are refused before anything is touched, and exactly those."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout
from networks import Attention
from sliceout import drawing
from sliceout.conversion import convert, options, profitability

SCHEMES = ("sliceout", "controlled", "patch", "samples", "droppath", "none", "standard", "spatial", "dropblock")
DROPS = SCHEMES[5:]
BRANCHES = ("samples", "droppath")
OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "decay": ("linear", ("sliceout", "controlled", "patch", *DROPS)),
    "sampling": ("window", ("controlled", "patch", *BRANCHES, *DROPS)),
    "norm": ("none", (*BRANCHES, *DROPS)),
    "fold": ("producer", ("patch", *BRANCHES, *DROPS)),
    "align": (32, BRANCHES),
    "grads": ("compact", ("controlled", "patch", *BRANCHES, *DROPS)),
    "parts": (2, ("controlled", "patch", *BRANCHES, *DROPS)),
    "ranks": ("equal", ("controlled", "patch", *BRANCHES, *DROPS)),
    "filter": ("*1*", ()),
    "attention": ("off", ("patch", *BRANCHES)),
    "stages": (1, ("patch", *BRANCHES)),
    "paper_exclusions": (True, ("patch", *BRANCHES)),
    "payoff": (True, ("patch", *BRANCHES)),
    "seed": (3, ("droppath", *DROPS)),
}
"""By option: a value other than the default, and the schemes with which it has no effect."""
CASES = [(scheme, option) for scheme in SCHEMES for option in OPTIONS]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.conv2, self.bn2 = nn.Conv2d(24, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def inverted(size: int, hidden: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(size, hidden, 1), nn.Conv2d(hidden, hidden, 3, groups=hidden), nn.Conv2d(hidden, out, 1)]


def build(option: str, scheme: str) -> tuple[nn.Module, Tensor]:
    """A small model with a place for the option."""
    torch.manual_seed(0)
    if scheme != "patch" and option in ("attention", "parts", "ranks"):
        return Attention(), torch.zeros(2, 5, 16)
    if scheme != "patch" and option == "stages":
        layers = [nn.Conv2d(3, 4, 1), *inverted(4, 32, 8), *inverted(8, 64, 16)]
        return nn.Sequential(*layers), torch.zeros(2, 3, 12, 12)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *(Block() for _ in range(3))), torch.zeros(2, 3, 12, 12)


def outcome(scheme: str, option: str, **given: Any) -> Any:
    """All that a conversion decides: the report, the slices and their draws; or the message of the error."""
    model, x = build(option, scheme)
    try:
        report = sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x, **given)
    except ValueError as error:
        return str(error)
    draws = []
    for _ in range(4 if scheme not in DROPS else 0):  # dropout draws from torch's random state
        sliceout.draw_(model)
        draws.append([s.start_as_tensor().tolist() for s in report.slices])
    settings = [(s.width, s.rate, s.align, s.sampling, s.norm, s.fold, s.grads) for s in report.slices]
    return report.as_dict(), settings, draws


@pytest.fixture
def not_profitable(monkeypatch) -> None:
    """As if on a GPU on which slices of these convolutions were measured not to pay."""
    entry = {"dtype": "bf16", "file": "f", "machine": "X", "align": 8, "pays": [["conv3", 24, 8192, 0.5, 1.2]]}
    monkeypatch.setattr(profitability, "_table", lambda: {"cuda": [entry]})
    monkeypatch.setattr(profitability, "_gpu", lambda device: "X")
    monkeypatch.setattr(convert, "device_and_dtype", lambda model: (torch.device("cuda"), torch.bfloat16))


@pytest.fixture
def second_of_two(monkeypatch) -> None:
    """As if two processes train together, and batches have parts."""
    monkeypatch.setattr(drawing, "rank_and_ranks", lambda: (1, 2))
    monkeypatch.setattr(sliceout, "convert_", functools.partial(sliceout.convert_, parts=2, seed=0))


@pytest.mark.parametrize(("scheme", "option"), CASES)
def test_an_option_is_refused_if_and_only_if_it_has_no_effect(scheme, option, monkeypatch, request) -> None:
    if option == "payoff":
        request.getfixturevalue("not_profitable")
    if option == "ranks" and scheme == "sliceout":
        request.getfixturevalue("second_of_two")
    value, ignored_by = OPTIONS[option]
    default = outcome(scheme, option, **{option: convert._DEFAULTS[option]})
    if scheme in ignored_by:
        model, x = build(option, scheme)
        before = [(type(m), sorted(vars(m))) for m in model.modules()]
        with pytest.raises(ValueError, match=f"^{option}={value!r} has no effect with scheme={scheme!r}: "):
            sliceout.convert_(model, 0.5, scheme=scheme, example_inputs=x, **{option: value})
        assert [(type(m), sorted(vars(m))) for m in model.modules()] == before
        monkeypatch.setitem(options.SCHEMES, scheme, options.SCHEMES[scheme]._replace(no_effect=()))
        assert outcome(scheme, option, **{option: value}) == default
    else:
        changed = outcome(scheme, option, **{option: value})
        assert "has no effect" not in str(changed)
        assert changed != default


def test_the_message_names_the_value_the_rule_and_the_way_out() -> None:
    message = "^sampling='window' has no effect with scheme='standard': leave it out$"
    with pytest.raises(ValueError, match=message):
        sliceout.convert_(build("", "")[0], 0.5, scheme="standard", sampling="window")


def test_ranks_have_no_effect_without_parts() -> None:
    with pytest.raises(ValueError, match="ranks='equal' has no effect with parts=1: all ranks slice alike"):
        sliceout.convert_(build("", "")[0], 0.5, ranks="equal")


def test_every_option_of_convert_is_in_the_table() -> None:
    assert set(OPTIONS) == convert._DEFAULTS.keys() - {"model", "rate", "scheme", "example_inputs"}
    assert set(SCHEMES) == set(options.SCHEMES)
