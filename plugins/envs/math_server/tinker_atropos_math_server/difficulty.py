"""Success rates of problems over their last answers, and which problems they leave out. Its state is JSON-ready."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tinker_atropos.errors import CheckpointError

WINDOW = 16
RETRY = 0.1
VERSION = 1


class SuccessRates:
    """Counts only what ended for good, so that a resumed run goes on with what its checkpoint counts.

    A problem is left out once it has a whole window of answers whose share of right ones is below `low` or above `high`
    (None: no bound); it is played all the same at `retry` of its turns, so that a policy that has changed is noticed.
    """

    def __init__(
        self, *, low: float | None, high: float | None, window: int | None = None, retry: float | None = None
    ) -> None:
        self.low, self.high = low, high
        self.window = WINDOW if window is None else window
        self.retry = RETRY if retry is None else retry
        self._answers: dict[str, deque[int]] = {}

    def add(self, problem: str, right: Iterable[bool]) -> None:
        """Count answers to a problem."""
        self._answers.setdefault(problem, deque(maxlen=self.window)).extend(map(int, right))

    def rate(self, problem: str) -> float | None:
        """Return the share of right ones among the last answers; None before there are enough of them."""
        answers = self._answers.get(problem)
        return sum(answers) / len(answers) if answers is not None and len(answers) == self.window else None

    def reason(self, problem: str, seed: int) -> str:
        """Return why a turn of a problem is left out, "" to play it. The same rates and seed give the same."""
        rate = self.rate(problem)
        if rate is None:
            return ""
        if self.low is not None and rate < self.low:
            reason = "too_hard"
        elif self.high is not None and rate > self.high:
            reason = "too_easy"
        else:
            return ""
        return "" if random.Random(f"{seed}/retry").random() < self.retry else reason

    def snapshot(self) -> dict[str, Any]:
        """Return what was counted."""
        return {
            "version": VERSION,
            "window": self.window,
            "answers": {problem: "".join(map(str, answers)) for problem, answers in sorted(self._answers.items())},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the place of what was counted; raises `CheckpointError` for what is no snapshot."""
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version {state['version']}, this program reads {VERSION}")
            restored = {
                str(problem): deque((("0", "1").index(digit) for digit in answers), maxlen=self.window)
                for problem, answers in state["answers"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"success rates that can't be read: {type(error).__name__}: {error}") from None
        self._answers = restored
