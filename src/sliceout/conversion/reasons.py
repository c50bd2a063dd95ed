"""Why units are left whole: a code that the library compares, and the sentence that a user reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


@dataclass(frozen=True)
class Reason:
    """Why a group was skipped; ``str(reason)`` is the sentence."""

    code: Skip
    text: str

    def __str__(self) -> str:
        return self.text


class Skip(StrEnum):
    """What kind of reason it is. A code makes a :class:`Reason` of a sentence.

    Example:
        >>> Skip.FROZEN("all its parameters are frozen")
        Reason(code=<Skip.FROZEN: 'frozen'>, text='all its parameters are frozen')
    """

    # found by the trace
    INPUT = auto()
    OUTPUT = auto()
    RESIDUAL = auto()
    POSITION = auto()  # pixels, tokens, or units that a constant numbers
    INDEXED = auto()
    CONCATENATED = auto()
    SPLIT = auto()
    RESHAPED = auto()
    PADDED = auto()
    MIXED = auto()  # by a softmax, a reduction or a running sum over the units
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
    CONFLICT = auto()  # another way to slice the same layers was chosen: of no interest to a user, so not printed
    ATTENTION_OFF = auto()
    ROTARY = auto()
    FUSED_VALUES = auto()
    STEM = auto()
    STAGES = auto()
    NOT_EXPANDED = auto()
    PAPER_EXCLUSIONS = auto()
    FILTERED = auto()
    NO_RATE = auto()
    RATE = auto()  # it keeps all units, too few of them, or cannot be met
    NOT_PROFITABLE = auto()
    NEGLIGIBLE = auto()
    ONE_PART = auto()  # sliced, but with one slice for the whole batch
    # from other schemes
    NO_READER = auto()
    NOT_A_MAP = auto()
    NOT_A_BLOCK = auto()
    # residual branches
    NOT_RESIDUAL = auto()
    NOT_SAMPLES = auto()
    MIXES_SAMPLES = auto()
    ESCAPES = auto()
    NO_MODULE = auto()
    SHARED_MODULE = auto()

    def __call__(self, text: str) -> Reason:
        return Reason(self, text)


FROZEN = Skip.FROZEN("all its parameters are frozen")
FILTERED = Skip.FILTERED("left out by filter")
CONFLICT = "another way to slice the same layers was chosen"
