"""The ``sliceout`` command. The library itself needs torch alone; the command needs the extra ``lab``."""

from __future__ import annotations

import sys

LAB_PACKAGES = ("matplotlib", "numpy", "rich", "typer")


def main() -> None:
    """Run the command line, or say what is missing."""
    try:
        from .lab import cli

        code = cli.main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LAB_PACKAGES:
            raise
        sys.exit(f"sliceout: the command line needs {package}, which is missing: pip install 'sliceout[lab]'")
    sys.exit(code)


if __name__ == "__main__":
    main()
