"""Why units are left whole: a code that the library compares, and the sentence that a user reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


class Skip(StrEnum):
    """What kind of reason it is."""

    # found by the trace
    INPUT = auto()
    OUTPUT = auto()
    RESIDUAL = auto()
    POSITION = auto()
    """Pixels, tokens, or units that a constant numbers."""
    INDEXED = auto()
    CONCATENATED = auto()
    SPLIT = auto()
    RESHAPED = auto()
    PADDED = auto()
    MIXED = auto()
    """By a softmax, a reduction or a running sum over the units."""
    UNKNOWN_OP = auto()
    UNEXPECTED_SHAPE = auto()
    # found in the layers
    SHARED = auto()
    QUANTISED = auto()
    NO_SLICED_FORM = auto()
    CHANNEL_GROUPS = auto()
    REPEATED = auto()
    ADAPTER = auto()
    FROZEN = auto()
    # found when the sliced copy was run
    FAILED = auto()
    MISALIGNED = auto()
    TEMPERATURE = auto()
    # from recipes and options
    CONFLICT = auto()
    """Another way to slice the same layers was chosen: of no interest to a user, so reports leave it out."""
    ATTENTION_OFF = auto()
    ROTARY = auto()
    STEM = auto()
    STAGES = auto()
    NOT_EXPANDED = auto()
    PAPER_EXCLUSIONS = auto()
    FILTERED = auto()
    NO_RATE = auto()
    RATE = auto()
    """The rate keeps all units, too few of them, or cannot be met."""
    NOT_PROFITABLE = auto()
    NEGLIGIBLE = auto()
    # from other schemes
    NO_READER = auto()
    NOT_A_MAP = auto()
    NOT_A_BLOCK = auto()


@dataclass(frozen=True)
class Reason:
    """Why a group was skipped; ``str(reason)`` is the sentence."""

    code: Skip
    text: str

    def __str__(self) -> str:
        return self.text


FROZEN = Reason(Skip.FROZEN, "all its parameters are frozen")
FILTERED = Reason(Skip.FILTERED, "left out by filter")


def conflict(which: str) -> Reason:
    return Reason(Skip.CONFLICT, f"another way to slice the same layers was chosen{which}")
