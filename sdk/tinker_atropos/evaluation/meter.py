"""Shows how far an evaluation is: one line on stderr, redrawn on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from tinker_atropos.progress import duration
from tinker_atropos.terminal import printable

REDRAW_SECONDS, LINE_SECONDS = 0.2, 15.0


class Meter:
    """Counts episodes. A reader of stderr who goes away does not end the evaluation."""

    def __init__(self, total: int, done: int, rewards: float, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._live = bool(self._out.isatty())
        self._total, self._done, self._rewards = total, done, rewards
        self._new = self._failed = self._tokens = 0
        self._began = self._shown = time.monotonic()
        self._drawn = 0

    def begin(self) -> None:
        """Note that asking begins: time and tokens a second count from here."""
        self._began = self._shown = time.monotonic()

    def say(self, text: str) -> None:
        """Show a notice."""
        self._wipe()
        self._print(printable(text) + "\n")

    def count(self, record: Mapping[str, Any]) -> None:
        """Count an episode that ended."""
        self._new += 1
        if record.get("failed"):
            self._failed += 1
        else:
            self._done += 1
            self._rewards += record["reward"]
            self._tokens += record["tokens"]["sampled"] or 0
        now = time.monotonic()
        last = self._done + self._failed >= self._total
        if last or now - self._shown >= (REDRAW_SECONDS if self._live else LINE_SECONDS):
            self._shown = now
            self._wipe()
            line = self.line(now - self._began)
            self._print(line if self._live else line + "\n")
            self._drawn = len(line) if self._live else 0

    def line(self, seconds: float) -> str:
        """Return the figures after so many seconds."""
        parts = [f"episodes {self._done + self._failed} / {self._total}"]
        if self._done:
            parts.append(f"reward {self._rewards / self._done:.3f}")
        if self._tokens and seconds > 0:
            parts.append(f"tokens/s {self._tokens / seconds:.0f}")
        if self._failed:
            parts.append(f"failed {self._failed}")
        left = self._total - self._done - self._failed
        if left > 0 and self._new:
            parts.append(f"time left {duration(seconds / self._new * left)}")
        return "  ".join(parts)

    def close(self) -> None:
        """End the line."""
        if self._drawn:
            self._print("\n")
            self._drawn = 0

    def _wipe(self) -> None:
        if self._drawn:
            self._print("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._out.write(text)
            self._out.flush()
