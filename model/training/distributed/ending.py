"""The end of a process of a training when another one has ended. This module imports nothing that takes time."""

from __future__ import annotations

import ctypes
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1  # prctl(2)
ENDED = "another process of this training ended, so this one ends too; to continue, run the same command with --resume"


def end_with_others() -> None:
    """Let SIGTERM raise ValueError(ENDED). torchrun sends it when another process was killed.

    Linux sends it when torchrun itself is killed, which does not end its processes.
    """
    signal.signal(signal.SIGTERM, _end)
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        raise OSError("the kernel refuses PR_SET_PDEATHSIG")


def ignore_the_end() -> None:
    """Ignore SIGTERM from now on: this process ends anyway, but first reports why."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end(_: int, __: FrameType | None) -> None:
    ignore_the_end()
    raise ValueError(ENDED)
