"""The contract of a text environment, checked by playing it with scripted completions."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tinker_atropos.environment import EnvironmentSpec, Step, TextEnvironment
from tinker_atropos.trajectory import Completion, TaskRef

Result = TypeVar("Result")

NOT_TEXT = "check_environment knows text environments; {name} is of kind {kind!r}"
NOT_AN_ENVIRONMENT = "{what} is no TextEnvironment: it needs tasks(split) and async episode(task)"
BAD_SIZE = "tasks({split!r}) returned {size!r}; it must return a count, or None for an endless split"
NO_TRAINING_TASKS = "tasks('train') is 0: there is nothing to train on"
NOT_A_STEP = "{method}() returned {value!r}; it must return a Step"
BAD_OBSERVATION = (
    "{method}() returned the observation {value!r}; it must be text, or messages with 'role' and 'content'"
)
EMPTY_FIRST = "reset() gave an empty observation; the policy needs something to go on"
ENDED_AT_RESET = "reset() ended the episode; a policy must get one turn at least"
REWARD_AT_RESET = "reset() gave the reward {value!r}; nothing was done yet, so it must be 0"
NOT_FINITE = "step() returned {name} = {value!r} for the completion {text!r}; it must be a finite number"
NOT_DETERMINISTIC = "the same task and the same completions gave {first!r} and then {second!r} ({where})"
SHARED_STATE = "an episode went otherwise while another was open: {first!r} alone, {second!r} beside it ({where})"
NO_END = "an episode had not ended after {turns} turns; terminate it, or truncate it"
BROKEN_BY_CANCELLATION = "after a cancelled episode the same task gave {second!r} instead of {first!r} ({where})"

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
    """An environment broke its contract; the message says where and how."""


def check_environment(
    environment: EnvironmentSpec | TextEnvironment,
    *,
    tasks: int = 3,
    completions: Sequence[Completion] = COMPLETIONS,
    max_turns: int = 64,
    deterministic: bool = True,
) -> None:
    """Raise `ContractViolated` if a text environment breaks its contract.

    Takes a specification (made with its default configuration) or a made environment. Checks, on the first `tasks`
    tasks of both splits: well-formed steps; finite rewards whatever the completion; that an episode ends within
    `max_turns`; that the same task and completions give the same result (`deterministic=False` for judges that do not);
    that episodes share no state; that a cancelled episode harms no other.
    """
    made: Any = environment
    if isinstance(environment, EnvironmentSpec):
        if environment.kind != "text":
            raise ContractViolated(NOT_TEXT.format(name=environment.name, kind=environment.kind))
        made = environment.make(environment.config())
    if not isinstance(made, TextEnvironment):
        raise ContractViolated(NOT_AN_ENVIRONMENT.format(what=type(made).__name__))
    _run(_check(made, tasks, completions, max_turns, deterministic))


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
    environment: TextEnvironment, tasks: int, completions: Sequence[Completion], max_turns: int, deterministic: bool
) -> None:
    refs = [ref for split in ("train", "test") for ref in _refs(environment, split, tasks)]
    for place, ref in enumerate(refs):
        for completion in completions:
            alone = await _play(environment, ref, completion, max_turns)
            if deterministic:
                again = await _play(environment, ref, completion, max_turns)
                _same(alone, again, NOT_DETERMINISTIC, ref)
        if not deterministic:
            continue
        completion = completions[place % len(completions)]
        alone = await _play(environment, ref, completion, max_turns)
        others = [_play(environment, other, completions[0], max_turns) for other in refs if other != ref]
        beside, *_ = await asyncio.gather(_play(environment, ref, completion, max_turns, yielding=True), *others)
        _same(alone, beside, SHARED_STATE, ref)
        await _cancel(environment, ref)
        _same(alone, await _play(environment, ref, completion, max_turns), BROKEN_BY_CANCELLATION, ref)


def _refs(environment: TextEnvironment, split: str, tasks: int) -> list[TaskRef]:
    size: Any = environment.tasks(split)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise ContractViolated(BAD_SIZE.format(split=split, size=size))
    if split == "train" and size == 0:
        raise ContractViolated(NO_TRAINING_TASKS)
    return [TaskRef(split, index, seed=1_000 + index) for index in range(tasks if size is None else min(tasks, size))]


async def _play(
    environment: TextEnvironment, ref: TaskRef, completion: Completion, max_turns: int, *, yielding: bool = False
) -> list[Step]:
    """Play one episode, every turn the same completion; return its steps, each checked."""
    episode = await environment.episode(ref)
    try:
        step = _well_formed(await episode.reset(), "reset")
        if step.done:
            raise ContractViolated(ENDED_AT_RESET)
        if step.reward != 0:
            raise ContractViolated(REWARD_AT_RESET.format(value=step.reward))
        if not step.observation:
            raise ContractViolated(EMPTY_FIRST)
        steps = [step]
        while True:
            if len(steps) > max_turns:
                raise ContractViolated(NO_END.format(turns=max_turns))
            if yielding:
                await asyncio.sleep(0)
            step = _well_formed(await episode.step(completion), "step")
            for name, value in {"reward": step.reward, **step.metrics}.items():
                if not _finite(value):
                    raise ContractViolated(NOT_FINITE.format(name=name, value=value, text=completion.text[:60]))
            steps.append(step)
            if step.done:
                return steps
    finally:
        await episode.close()


async def _cancel(environment: TextEnvironment, ref: TaskRef) -> None:
    """Cancel an episode in mid-step, and close it as the rollout would."""
    episode = await environment.episode(ref)
    try:
        await episode.reset()
        step = asyncio.ensure_future(episode.step(COMPLETIONS[1]))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    finally:
        await episode.close()


def _well_formed(step: Any, method: str) -> Step:
    if not isinstance(step, Step):
        raise ContractViolated(NOT_A_STEP.format(method=method, value=step))
    observation = step.observation
    messages = isinstance(observation, Sequence) and all(
        isinstance(message, dict) and "role" in message and "content" in message for message in observation
    )
    if not isinstance(observation, str) and not messages:
        raise ContractViolated(BAD_OBSERVATION.format(method=method, value=observation))
    return step


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _same(first: list[Step], second: list[Step], message: str, ref: TaskRef) -> None:
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            where = f"task {ref.split}/{ref.index}, turn {turn}"
            raise ContractViolated(message.format(first=one, second=other, where=where))
    if len(first) != len(second):
        where = f"task {ref.split}/{ref.index}"
        raise ContractViolated(message.format(first=f"{len(first)} steps", second=f"{len(second)} steps", where=where))
