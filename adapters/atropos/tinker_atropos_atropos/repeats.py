"""Tells a post that is repeated from a group that has the same content: the same within a window of time, else new."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW = 600.0
"""Seconds within which equal content without a key counts as the same post, repeated."""


class Repeats:
    """Names contents. A name holds for `window` seconds since its content was new; then the content is another group.

    Names carry the number of the window they were given in, by the `wall` clock: a process that starts anew within
    that window gives the same.
    """

    def __init__(
        self,
        window: float = WINDOW,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._window = window
        self._clock = clock
        self._wall = wall
        self._names: dict[str, tuple[str, float]] = {}  # by content, oldest first

    def __len__(self) -> int:
        return len(self._names)

    def name(self, content: str) -> str:
        """Return what a content's digest is called now."""
        self._expire()
        found = self._names.get(content)
        if found is None:
            found = f"{content}.{int(self._wall() / self._window)}", self._clock()
            self._names[content] = found
        return found[0]

    def again(self, content: str) -> None:
        """Begin the window anew: the content was not taken, and its poster will come again."""
        found = self._names.pop(content, None)
        if found is not None:
            self._names[content] = found[0], self._clock()

    def _expire(self) -> None:
        now = self._clock()
        while self._names:
            content, (_, since) = next(iter(self._names.items()))
            if now - since < self._window:
                break
            del self._names[content]
