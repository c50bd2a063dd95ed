"""SliceOut: train every layer on one random contiguous slice of its units, so that each step is really smaller.

Everything a user needs is listed here; other names may change.
"""

from . import nn
from .capture import capture
from .convert import convert_, off_, on_, revert_
from .draws import draw_, slices
from .report import Report
from .schedule import Schedule, Tail, WarmUp, constant_tail, recalibrate_
from .slices import Axis, Slice, Slices
from .subset import Subset

__all__ = [
    "Axis",
    "Report",
    "Schedule",
    "Slice",
    "Slices",
    "Subset",
    "Tail",
    "WarmUp",
    "capture",
    "constant_tail",
    "convert_",
    "draw_",
    "nn",
    "off_",
    "on_",
    "recalibrate_",
    "revert_",
    "slices",
]
__version__ = "0.1.0"
