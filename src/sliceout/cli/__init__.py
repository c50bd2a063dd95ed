"""The ``sliceout`` command (extra ``cli``): ``inspect`` and ``bench`` for a model of one's own.

The library never imports this package; ``sliceout_lab``, which reproduces the paper, builds on it.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can correct. The command line prints its message without a traceback."""

    code = 1
    """Exit code of the process."""
