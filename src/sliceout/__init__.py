"""SliceOut: train every layer on one random contiguous slice of its units, so that each step is really smaller.

Everything a user needs is listed here; other names may change.
"""

from . import nn
from .draws import draw_, slices
from .slices import Axis, Slice, Slices

__all__ = ["Axis", "Slice", "Slices", "draw_", "nn", "slices"]
__version__ = "0.1.0"
