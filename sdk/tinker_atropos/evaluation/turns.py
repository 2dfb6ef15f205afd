"""The questions of one episode: each is asked once, its answer kept at once, and given again after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tinker_atropos.errors import TinkerAtroposError
from tinker_atropos.evaluation.folder import AppendedLines, Record
from tinker_atropos.rollout.schedule import derive_seed

Key = tuple[int, int, int, int]
"""Task, sample, attempt, turn."""


class Halted(TinkerAtroposError):
    """The user asked to stop, so no new question is asked."""


class AnswerBook:
    """All answers that came so far, on the disk before anything is made of them.

    An episode counts only when it is whole. What it was answered before a kill stands here, so that playing it again
    asks nothing twice.
    """

    def __init__(self, lines: AppendedLines, known: list[Record], stop: asyncio.Event) -> None:
        self._lines, self._stop = lines, stop
        self._known: dict[Key, Record] = {}
        for record in known:
            try:
                key = (record["task"], record["sample"], record["attempt"], record["turn"])
                _ = record["question"], record["answer"]
            except KeyError:
                continue
            self._known[key] = record
        self.asked = 0
        """Questions asked in this process."""

    async def answer(
        self, key: Key, question: str, ask: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        """Return the answer kept for this very question, else what `ask()` gives; raises `Halted` after a stop."""
        kept = self._known.get(key)
        if kept is not None and kept["question"] == question:
            found: Mapping[str, Any] = kept["answer"]
            return found
        if self._stop.is_set():
            raise Halted("asked to stop")
        self.asked += 1
        answer = await ask()
        task, sample, attempt, turn = key
        # Shielded: an answer that came is kept, whatever is cancelled meanwhile.
        await asyncio.shield(
            self._lines.append(
                {
                    "task": task,
                    "sample": sample,
                    "attempt": attempt,
                    "turn": turn,
                    "question": question,
                    "answer": dict(answer),
                }
            )
        )
        return answer


class Turns:
    """The turns of one try at one episode. `seed` is the evaluation's; the same one gives the same seeds."""

    def __init__(self, book: AnswerBook, task: int, sample: int, attempt: int, seed: int) -> None:
        self._book, self._task, self._sample, self._attempt, self._seed = book, task, sample, attempt, seed

    def seed(self, turn: int) -> int:
        """Return the sampling seed of a turn."""
        parts: tuple[int | str, ...] = (self._seed, "eval", self._task, self._sample, "turn", turn)
        return derive_seed(*parts, self._attempt) if self._attempt else derive_seed(*parts)

    async def answer(
        self, turn: int, question: Any, ask: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        """Return the answer to a turn's question, JSON-ready; `question` is all that decides it."""
        text = json.dumps(question, sort_keys=True, ensure_ascii=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return await self._book.answer((self._task, self._sample, self._attempt, turn), digest, ask)
