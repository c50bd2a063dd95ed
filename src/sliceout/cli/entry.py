"""The ``sliceout`` command. The library itself needs torch alone; the command needs the extra ``cli``."""

from __future__ import annotations

import sys

CLI_PACKAGES = ("rich", "typer")


def main() -> None:
    """Run the command line, or say what is missing."""
    try:
        from . import app

        code = app.main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CLI_PACKAGES:
            raise
        sys.exit(f"sliceout: the command line needs {package}, which is missing: pip install 'sliceout[cli]'")
    sys.exit(code)
