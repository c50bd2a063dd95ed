"""Ctrl-C and SIGTERM: the run stops at its next step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

PARENT = "SLICEOUT_PARENT"
"""Environment variable with the process that started this one: when it dies, this one stops."""


class Stopped(Exception):
    """Training was asked to stop, and did so with its state saved."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.code = 128 + signum  # as shells count: 130 for Ctrl-C, 143 for SIGTERM


class Stop:
    """Watches for signals while it is entered. A second Ctrl-C stops at once, without a checkpoint."""

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note)
            if parent := os.environ.get(PARENT):
                threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum = signum


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
