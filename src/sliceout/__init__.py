"""SliceOut: train every layer on one random contiguous slice of its units, so that each step is really smaller.

Everything a user needs is listed here; other names may change.
"""

from . import nn
from .capture import capture
from .conversion.convert import convert_, revert_
from .conversion.report import Report
from .drawing import Slices, draw_, off_, on_, slices
from .schedule import Grow, Schedule, Tail, WarmUp, recalibrate_
from .schemes.subset import Subset
from .slices import Axis, Slice

__all__ = [
    "Axis", "Grow", "Report", "Schedule", "Slice", "Slices", "Subset", "Tail", "WarmUp", "capture",
    "convert_", "draw_", "nn", "off_", "on_", "recalibrate_", "revert_", "slices",
]  # fmt: skip
__version__ = "0.1.0"
