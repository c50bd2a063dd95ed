"""Train one job that another process has written down: ``python -m sliceout_lab.train JOB.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sliceout.cli import UserError

from ..experiment import Job
from . import Settings, Stopped, run


def write(path: Path, job: Job, settings: Settings) -> None:
    """Write down what to train, for :func:`main` in another process."""
    fields: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(settings).items()}
    path.write_text(json.dumps({"job": vars(job), "settings": fields}))


def main(path: Path) -> int:
    """Train it; returns the exit code."""
    saved = json.loads(path.read_text())
    fields = saved["settings"]
    fields |= {"out": Path(fields["out"]), "data": None if fields["data"] is None else Path(fields["data"])}
    try:
        run(Job(**saved["job"]), Settings(**fields))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
