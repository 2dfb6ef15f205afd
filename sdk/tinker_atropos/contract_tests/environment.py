"""The contract of a text environment, checked by playing it with scripted completions."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tinker_atropos.environment import EnvironmentSpec, Step, TextEnvironment
from tinker_atropos.trajectory import Completion, TaskRef

Result = TypeVar("Result")

NOT_TEXT = "check_environment knows text and control environments; {name} is of kind {kind!r}"
MADE = "of a control environment check_environment takes the specification, or use check_control(make)"
NOT_AN_ENVIRONMENT = "{what} is no TextEnvironment: it needs tasks(split) and async episode(task)"
BAD_SIZE = "tasks({split!r}) returned {size!r}; it must return a count, or None for an endless split"
NO_TRAINING_TASKS = "tasks('train') is 0: there is nothing to train on"
NOT_A_STEP = "{method}() returned {value!r}; it must return a Step ({where})"
BAD_OBSERVATION = (
    "{method}() returned the observation {value!r}; it must be text, or messages with 'role' and 'content' ({where})"
)
EMPTY_FIRST = "reset() gave an empty observation; the policy needs something to go on"
ENDED_AT_RESET = "reset() ended the episode; a policy must get one turn at least"
REWARD_AT_RESET = "reset() gave the reward {value!r}; nothing was done yet, so it must be 0"
NOT_FINITE = "step() returned {name} = {value!r} for the completion {text!r}; it must be a finite number"
NOT_DETERMINISTIC = "the same task and the same completions gave {first!r} and then {second!r} ({where})"
SHARED_STATE = "an episode went otherwise while another was open: {first!r} alone, {second!r} beside it ({where})"
NO_END = "an episode had not ended after {turns} turns; terminate it, or truncate it ({where})"
BROKEN_BY_CANCELLATION = "after a cancelled episode the same task gave {second!r} instead of {first!r} ({where})"
NOT_REPRODUCIBLE = "made a second time with the same settings, it gave {second!r} instead of {first!r} ({where})"
KEPT_MESSAGES = (
    "a change to the messages it had given out changed the next episode: {first!r}, then {second!r} ({where})"
)
RAISED = "{method}() raised {error} ({where})"
HUNG = "{method}() did not return within {seconds:g} s ({where})"

# What policies really say: nothing, much, half a sentence, another alphabet, markup, what looks like an answer.
COMPLETIONS: tuple[Completion, ...] = (
    Completion("", "stop", tokens=1),
    Completion("The answer is 42.", "stop", tokens=7),
    Completion("#### 18\n\\boxed{18}", "stop", tokens=12),
    Completion("Let me think step by step: first", "length", tokens=8),
    Completion("žluťoučký 🐎 \u202e\x00 <|im_end|> </s>", "stop", tokens=30),
    Completion("9" * 20_000, "length", tokens=20_000),
)


class ContractViolated(AssertionError):
    """A plugin broke its contract; the message says where and how."""


def hold(true: bool, message: str) -> None:
    """Raise `ContractViolated` with the message unless the condition is true."""
    if not true:
        raise ContractViolated(message)


def check_environment(
    environment: EnvironmentSpec | TextEnvironment,
    *,
    tasks: int = 3,
    completions: Sequence[Completion] = COMPLETIONS,
    max_turns: int = 64,
    deterministic: bool = True,
    timeout: float = 60.0,
    steps: int = 300,
) -> None:
    """Raise `ContractViolated` if an environment breaks its contract.

    Takes a specification (made with its default configuration) or, of a text environment, a made one. A control
    environment is driven for `steps` steps: see `check_control`; the other arguments are not for it. Checks of text, on
    the first `tasks` tasks of both splits: well-formed steps; finite rewards whatever the completion; that an episode
    ends within `max_turns`; that the same task and completions give the same result (`deterministic=False` for judges
    that do not); that a specification gives the same when it is made again; that episodes share no state, the messages
    given out included; that a cancelled episode harms no other; that no call raises, or takes longer than `timeout`
    seconds.
    """
    made: Any = environment
    again: Any = None
    if isinstance(environment, EnvironmentSpec):
        if environment.kind == "control":
            from tinker_atropos.contract_tests.control import check_control

            spec = environment
            check_control(lambda n: spec.make(spec.config(**{"num_envs": n})), name=spec.name, steps=steps)
            return
        if environment.kind != "text":
            raise ContractViolated(NOT_TEXT.format(name=environment.name, kind=environment.kind))
        made, again = (environment.make(environment.config()) for _ in range(2))
    if hasattr(made, "single_action_space"):
        raise ContractViolated(MADE)
    if not isinstance(made, TextEnvironment):
        raise ContractViolated(NOT_AN_ENVIRONMENT.format(what=type(made).__name__))
    _run(_check(made, again, tasks, completions, _Play(max_turns, timeout), deterministic))


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run in a loop of its own, also when called from within a running one."""
    failure: list[BaseException] = []

    def target() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


async def _check(
    environment: TextEnvironment,
    again: TextEnvironment | None,
    tasks: int,
    completions: Sequence[Completion],
    play: _Play,
    deterministic: bool,
) -> None:
    refs = [ref for split in ("train", "test") for ref in _refs(environment, split, tasks)]
    for place, ref in enumerate(refs):
        for completion in completions:
            alone = await play(environment, ref, completion)
            if deterministic:
                _same(alone, await play(environment, ref, completion), NOT_DETERMINISTIC, ref, completion)
        if not deterministic:
            continue
        completion = completions[place % len(completions)]
        alone = await play(environment, ref, completion)
        if again is not None:
            _same(alone, await play(again, ref, completion), NOT_REPRODUCIBLE, ref, completion)
        # An episode of the very same task is among those beside it.
        others = [play(environment, other, completions[0], yielding=True) for other in refs]
        beside, *_ = await asyncio.gather(play(environment, ref, completion, yielding=True), *others)
        _same(alone, beside, SHARED_STATE, ref, completion)
        await _cancel(environment, ref, play)
        _same(alone, await play(environment, ref, completion), BROKEN_BY_CANCELLATION, ref, completion)
        await play(environment, ref, completion, spoil=True)
        _same(alone, await play(environment, ref, completion), KEPT_MESSAGES, ref, completion)


def _refs(environment: TextEnvironment, split: str, tasks: int) -> list[TaskRef]:
    size: Any = environment.tasks(split)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise ContractViolated(BAD_SIZE.format(split=split, size=size))
    if split == "train" and size == 0:
        raise ContractViolated(NO_TRAINING_TASKS)
    return [TaskRef(split, index, seed=1_000 + index) for index in range(tasks if size is None else min(tasks, size))]


@dataclass(frozen=True, slots=True)
class _Play:
    """Plays one episode, every turn the same completion, and checks each step."""

    max_turns: int
    timeout: float

    async def __call__(
        self,
        environment: TextEnvironment,
        ref: TaskRef,
        completion: Completion,
        *,
        yielding: bool = False,
        spoil: bool = False,
    ) -> list[Step]:
        episode = await self.call("episode", environment.episode(ref), ref)
        try:
            step = _well_formed(await self.call("reset", episode.reset(), ref), "reset", _where(ref))
            if step.done:
                raise ContractViolated(ENDED_AT_RESET)
            if step.reward != 0:
                raise ContractViolated(REWARD_AT_RESET.format(value=step.reward))
            if not step.observation:
                raise ContractViolated(EMPTY_FIRST)
            steps = [_copy(step)]
            while True:
                if spoil:
                    _spoil(step)
                if len(steps) > self.max_turns:
                    raise ContractViolated(NO_END.format(turns=self.max_turns, where=_where(ref, completion)))
                if yielding:
                    await asyncio.sleep(0)
                step = await self.call("step", episode.step(completion), ref, completion)
                step = _well_formed(step, "step", _where(ref, completion))
                for name, value in {"reward": step.reward, **step.metrics}.items():
                    if not _finite(value):
                        raise ContractViolated(NOT_FINITE.format(name=name, value=value, text=completion.text[:60]))
                steps.append(_copy(step))
                if step.done:
                    break
        except BaseException:
            with suppress(ContractViolated):  # the first violation is the one to tell
                await self.call("close", episode.close(), ref, completion)
            raise
        await self.call("close", episode.close(), ref, completion)
        return steps

    async def call(
        self, method: str, work: Awaitable[Result], ref: TaskRef, completion: Completion | None = None
    ) -> Result:
        """Await one call of the environment; raises `ContractViolated` if it raises or hangs."""
        where = _where(ref, completion)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await work
        except Exception as error:
            if limit.expired():
                raise ContractViolated(HUNG.format(method=method, seconds=self.timeout, where=where)) from None
            said = f"{type(error).__name__}: {error}"
            raise ContractViolated(RAISED.format(method=method, error=said, where=where)) from error


def _copy(step: Step) -> Step:
    """Return a step that later changes to its messages don't reach."""
    observation = step.observation if isinstance(step.observation, str) else copy.deepcopy(list(step.observation))
    return replace(step, observation=observation, metrics=dict(step.metrics))


def _spoil(step: Step) -> None:
    """Do to the messages what a caller may: they are its own from now on."""
    if not isinstance(step.observation, str):
        for message in step.observation:
            message["content"] = "changed by whoever got it"


async def _cancel(environment: TextEnvironment, ref: TaskRef, play: _Play) -> None:
    """Cancel an episode in its reset, and another in mid-step; close both as the rollout would."""
    for steps in (0, 1):
        episode = await play.call("episode", environment.episode(ref), ref)
        try:
            if steps:
                await play.call("reset", episode.reset(), ref)
            work = asyncio.ensure_future(episode.step(COMPLETIONS[1]) if steps else episode.reset())
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        finally:
            await play.call("close", episode.close(), ref)


def _where(ref: TaskRef, completion: Completion | None = None, turn: int | None = None) -> str:
    """Return which call is meant: the task, the turn, and the completion that was played in every turn."""
    parts = [f"task {ref.split}/{ref.index}"]
    parts += [] if turn is None else [f"turn {turn}"]
    parts += [] if completion is None else [f"completion {_shown(completion)}"]
    return ", ".join(parts)


def _shown(completion: Completion) -> str:
    text = repr(completion.text)
    return text if len(text) <= 60 else text[:60] + "…"


def _well_formed(step: Any, method: str, where: str) -> Step:
    if not isinstance(step, Step):
        raise ContractViolated(NOT_A_STEP.format(method=method, value=step, where=where))
    observation = step.observation
    messages = isinstance(observation, Sequence) and all(
        isinstance(message, dict) and "role" in message and "content" in message for message in observation
    )
    if not isinstance(observation, str) and not messages:
        raise ContractViolated(BAD_OBSERVATION.format(method=method, value=observation, where=where))
    return step


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _same(first: list[Step], second: list[Step], message: str, ref: TaskRef, completion: Completion) -> None:
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            where = _where(ref, completion, turn)
            raise ContractViolated(message.format(first=one, second=other, where=where))
    if len(first) != len(second):
        where = _where(ref, completion)
        raise ContractViolated(message.format(first=f"{len(first)} steps", second=f"{len(second)} steps", where=where))
