"""What trains and measures: data, models, the demo and the command line (extra ``lab``). The core never imports it."""

from __future__ import annotations


class LabError(Exception):
    """Something the user can put right. The command line shows its message without a traceback."""

    code = 1
    """Of the process that ends with it."""
