"""Ctrl-C, SIGTERM and SIGHUP: once stops cleanly, Ctrl-C or SIGTERM twice stops at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


@contextmanager
def interruptible(stop: asyncio.Event, say: Callable[[str], None], notice: str = STOPPING) -> Iterator[None]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP sets `stop`; a second one ends the process with code 130.

    Not so a second SIGHUP: a terminal that closes sends several. Where it is ignored (`nohup`) it stays ignored.
    `notice` is what the user is told at the first. Children notice that their parent is gone by themselves.
    """
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if stop.is_set():
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the panel hides the cursor
                sys.stdout.flush()
            os._exit(130)
        stop.set()
        say(notice)

    def hung_up() -> None:
        if not stop.is_set():
            interrupted()

    handlers = {signal.SIGINT: interrupted, signal.SIGTERM: interrupted}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = hung_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
