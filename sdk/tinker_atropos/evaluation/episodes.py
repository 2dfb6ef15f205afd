"""Plays the episodes of an evaluation that are not yet there, several at a time, and writes each down as it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos.errors import (
    ConfigError,
    ContextOverflow,
    EpisodesFailed,
    PluginError,
    PolicyUnavailable,
    RunError,
)
from tinker_atropos.evaluation.folder import EvaluationFolder, Record
from tinker_atropos.evaluation.players import Played, Player
from tinker_atropos.evaluation.turns import AnswerBook, Halted, Turns
from tinker_atropos.rollout.records import trajectory_record
from tinker_atropos.rollout.schedule import derive_seed
from tinker_atropos.trajectory import TaskRef

log = logging.getLogger(__name__)

MOST_FAILED_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Which episodes there are, and how they are tried. `timeout` is of one try, in seconds."""

    split: str
    tasks: int
    samples: int
    seed: int
    concurrency: int
    timeout: float
    retries: int

    def task(self, index: int) -> TaskRef:
        """Return a task, the same one as a run's own evaluation has at this index."""
        return TaskRef(self.split, index, derive_seed(self.seed, self.split, index))


@dataclass(slots=True)
class Outcome:
    """What came of it: whole `records` by task and sample, and causes of those that `failed`. `halted`: as asked."""

    records: dict[tuple[int, int], Record]
    failed: Counter[str] = field(default_factory=Counter)
    last_error: str = ""
    halted: bool = False
    asked: int = 0


async def play_missing(
    environment: Any,
    player: Player,
    plan: Plan,
    folder: EvaluationFolder,
    known: Mapping[tuple[int, int], Record],
    *,
    stop: asyncio.Event,
    say: Callable[[str], None],
    on_record: Callable[[Record], None],
) -> Outcome:
    """Play every episode of the plan that `known` lacks or holds as failed; returns all whole records.

    An episode that fails (an error of the environment, a time-out, no answer) is tried `plan.retries` times more, then
    written down as failed. Raises `EpisodesFailed` after several of them in a row, and at once what no other episode
    would fare better with (`RunError`, `ConfigError`, `PluginError`).
    """
    outcome = Outcome({key: record for key, record in known.items() if not record.get("failed")})
    missing = iter(
        [
            (index, sample)
            for index in range(plan.tasks)
            for sample in range(plan.samples)
            if (index, sample) not in outcome.records
        ]
    )
    book = AnswerBook(folder.answers, folder.answers.read(say), stop)
    in_a_row = 0

    async def work() -> None:
        nonlocal in_a_row
        for index, sample in missing:  # shared: each worker takes the next
            if stop.is_set():
                outcome.halted = True
                return
            try:
                record = await _record(environment, player, plan, book, index, sample, outcome)
            except Halted:
                outcome.halted = True
                return
            await asyncio.shield(folder.episodes.append(record))
            if record.get("failed"):
                in_a_row += 1
            else:
                in_a_row = 0
                outcome.records[index, sample] = record
            on_record(record)
            if in_a_row >= MOST_FAILED_IN_A_ROW:
                raise EpisodesFailed(
                    f"{in_a_row} episodes in a row failed; the last cause: {outcome.last_error}. What is there is kept"
                )

    workers = [asyncio.create_task(work()) for _ in range(plan.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    outcome.asked = book.asked
    return outcome


async def _record(
    environment: Any, player: Player, plan: Plan, book: AnswerBook, index: int, sample: int, outcome: Outcome
) -> Record:
    task = plan.task(index)
    head = {"task": index, "split": plan.split, "sample": sample, "seed": task.seed, "step": 0}
    causes: list[str] = []
    for attempt in range(plan.retries + 1):
        try:
            played = await _tried(environment, player, plan, Turns(book, index, sample, attempt, plan.seed), task)
        except _Failed as error:
            causes.append(error.cause)
            outcome.last_error = str(error)
            log.warning("task %s/%d, sample %d failed: %s", task.split, index, sample, error)
            if error.final:
                break
            continue
        return head | _played_record(played)
    outcome.failed[causes[-1]] += 1
    return head | {"failed": True, "cause": causes[-1], "error": outcome.last_error[:500]}


def _played_record(played: Played) -> Record:
    step = played.trajectory.policies[0].step
    return {
        "step": step,
        **trajectory_record(played.trajectory),
        "tokens": {"prompt": played.prompt_tokens, "sampled": played.sampled_tokens},
        "finishes": list(played.finishes),
    }


class _Failed(Exception):
    def __init__(self, cause: str, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.cause, self.final = cause, final


async def _tried(environment: Any, player: Player, plan: Plan, turns: Turns, task: TaskRef) -> Played:
    """Play once; raises `_Failed` for whatever concerns this episode alone. Somebody else's code runs inside."""
    limit = asyncio.timeout(plan.timeout)
    try:
        async with limit:
            return await player.play(environment, task, turns)
    except (RunError, ConfigError, PluginError, Halted):
        raise
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        raise _Failed("CancelledError", "something inside cancelled itself") from None
    except (PolicyUnavailable, ContextOverflow) as error:  # tried often enough, or no use in trying
        raise _Failed(type(error).__name__, str(error), final=True) from error
    except (Exception, SystemExit, GeneratorExit) as error:
        if limit.expired():
            raise _Failed("timeout", f"no end within {plan.timeout:g} s (rollout.episode_timeout)") from error
        raise _Failed(type(error).__name__, f"{type(error).__name__}: {error}") from error
