"""Ctrl-C and SIGTERM: once stops cleanly, twice stops at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(stop: asyncio.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM sets `stop`; the second ends the process with code 130.

    Children notice that their parent is gone by themselves.
    """
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if stop.is_set():
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the panel hides the cursor
                sys.stdout.flush()
            os._exit(130)
        stop.set()
        say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
