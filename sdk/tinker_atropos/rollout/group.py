"""One group: episodes of one task side by side, their retries, and the first turn sampled in one request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinker_atropos.adapter import Prompt, SessionFactory
from tinker_atropos.environment import score_group
from tinker_atropos.errors import ConfigError, EpisodesFailed, PluginError, RunError
from tinker_atropos.rollout.episode import EpisodeLimits, run_episode, sampling_params
from tinker_atropos.rollout.schedule import derive_seed
from tinker_atropos.trainer import TextPolicy
from tinker_atropos.trajectory import Group, Sample, Stop, TaskRef, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How every group of a run is rolled out."""

    sessions: SessionFactory
    limits: EpisodeLimits
    stop: Stop
    size: int
    min_size: int
    timeout: float
    retries: int
    temperature: float
    top_p: float
    top_k: int


@dataclass(slots=True)
class GroupReport:
    """What happened beside the group itself: failed tries by cause, for the metrics."""

    failures: Counter[str] = field(default_factory=Counter)
    last_error: str = ""


class FirstTurn:
    """Gathers the first prompts of a group: equal ones become one request of several samples.

    The request goes out once each of the `size` members has asked or left, or after half the time that an episode has:
    one that hangs at its start must not take the others with it. Members are served in their own order, so which sample
    a member gets does not depend on who asked first.
    """

    def __init__(self, policy: TextPolicy, plan: GroupPlan, size: int, seed: int) -> None:
        self._policy, self._plan, self._seed = policy, plan, seed
        self._missing = size
        self._asked: dict[int, tuple[Prompt, asyncio.Future[Sample]]] = {}
        self._patience: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, member: int, prompt: Prompt) -> Sample:
        """Return this member's sample; raises what the policy raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        self._asked[member] = (prompt, future)
        if self._missing <= 0:
            self._send([member])  # too late for the others
        else:
            self._patience = self._patience or loop.call_later(self._plan.timeout / 2, self._send_present)
            self._arrive()
        return await future

    def leave(self, member: int) -> None:
        """Count a member that ended before it asked."""
        if member not in self._asked:
            self._asked[member] = (Prompt(np.zeros(0, np.int32), 0, None), asyncio.Future())
            self._asked[member][1].cancel()
            self._arrive()

    async def cancel(self) -> None:
        """Cancel what is under way."""
        if self._patience is not None:
            self._patience.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._send(sorted(self._asked))

    def _send_present(self) -> None:
        if self._missing > 0:
            self._missing = 0
            self._send(sorted(self._asked))

    def _send(self, present: list[int]) -> None:
        alike: dict[tuple[bytes, int], list[int]] = {}
        for member in present:
            prompt, future = self._asked[member]
            if not future.done():
                alike.setdefault((prompt.tokens.tobytes(), prompt.max_tokens), []).append(member)
        for members in alike.values():
            request = asyncio.create_task(self._request(members))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    async def _request(self, members: list[int]) -> None:
        prompt = self._asked[members[0]][0]
        futures = [self._asked[member][1] for member in members]
        plan = self._plan
        params = sampling_params(
            prompt,
            temperature=plan.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            seed=derive_seed(self._seed, "turn", 0, members[0]),
        )
        try:
            samples = await self._policy.sample(prompt.tokens, params, len(members))
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            for future in futures:
                if not future.done():
                    future.cancel() if cancelled else future.set_exception(error)
            if cancelled or not isinstance(error, Exception):
                raise
            return
        for future, sample in zip(futures, samples, strict=True):
            if not future.done():
                future.set_result(sample)


async def run_group(
    environment: Any,
    policy: TextPolicy,
    tokenizer: Any,
    task: TaskRef,
    plan: GroupPlan,
    *,
    id: str,
    seed: int,
    compare: bool = True,
) -> tuple[Group | None, GroupReport]:
    """Roll out a group; None if too few of its episodes came through.

    A failed episode (an error of the environment, a time-out, no sample) is tried again `plan.retries` times. A group
    with at least `plan.min_size` whole episodes is completed with those. Errors that concern the whole run (`RunError`,
    `ConfigError`, `PluginError`) are not absorbed.
    """
    report = GroupReport()
    first = FirstTurn(policy, plan, plan.size, seed)
    members = [
        asyncio.create_task(_member(environment, policy, tokenizer, task, plan, first, number, seed, report))
        for number in range(plan.size)
    ]
    try:
        ended = await asyncio.gather(*members)
    finally:
        for member in members:
            member.cancel()
        await first.cancel()
        await asyncio.gather(*members, return_exceptions=True)
    whole = tuple(trajectory for trajectory in ended if trajectory is not None)
    if len(whole) < plan.min_size:
        return None, report
    group = Group(id=id, task=task, trajectories=whole)
    if not compare or getattr(environment, "score_group", None) is None:
        return group, report
    return await _compared(environment, group, plan, report), report


async def _compared(environment: Any, group: Group, plan: GroupPlan, report: GroupReport) -> Group | None:
    """Return the group as the environment scores it, None where that failed in every try."""
    for _ in range(plan.retries + 1):
        async with _absorbing(plan, report, group.task, "score_group: "):
            return await score_group(environment, group)
    return None


@asynccontextmanager
async def _absorbing(plan: GroupPlan, report: GroupReport, task: TaskRef, what: str = "") -> AsyncIterator[None]:
    """Bound the block in time and note its failure, whatever it is; what concerns the whole run passes through.

    Somebody else's code runs inside: it may call `sys.exit`, or leak a cancellation that nobody asked for.
    """
    limit = asyncio.timeout(plan.timeout)
    try:
        async with limit:
            yield
    except (RunError, ConfigError, PluginError):
        raise  # no other task would fare better
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        _note(report, "CancelledError", f"{what}CancelledError: something inside cancelled itself", task)
    except (Exception, SystemExit, GeneratorExit) as error:
        if limit.expired():
            _note(report, "timeout", f"{what}no end within {plan.timeout:g} s (rollout.episode_timeout)", task)
        else:
            _note(report, type(error).__name__, f"{what}{type(error).__name__}: {error}", task)


async def _member(
    environment: Any,
    policy: TextPolicy,
    tokenizer: Any,
    task: TaskRef,
    plan: GroupPlan,
    first: FirstTurn,
    number: int,
    seed: int,
    report: GroupReport,
) -> Trajectory | None:
    for attempt in range(plan.retries + 1):

        async def ask(prompt: Prompt, turn: int, attempt: int = attempt) -> Sample:
            if turn == 0 and attempt == 0:
                return await first.ask(number, prompt)
            params = sampling_params(
                prompt,
                temperature=plan.temperature,
                top_p=plan.top_p,
                top_k=plan.top_k,
                seed=derive_seed(seed, "turn", turn, number, attempt),
            )
            return (await policy.sample(prompt.tokens, params, 1))[0]

        try:
            async with _absorbing(plan, report, task):
                return await run_episode(environment, task, plan.sessions, tokenizer, ask, plan.limits, stop=plan.stop)
        finally:
            first.leave(number)
    return None


def _note(report: GroupReport, cause: str, text: str, task: TaskRef) -> None:
    report.failures[cause] += 1
    report.last_error = text
    log.warning("an episode of task %s/%d failed: %s", task.split, task.index, text)


def episodes_failed(groups: int, last_error: str) -> EpisodesFailed:
    """Return the error that ends a run whose episodes keep failing."""
    return EpisodesFailed(
        f"{groups} groups in a row failed (rollout.max_failed_groups); the last cause: {last_error or 'unknown'}"
    )
