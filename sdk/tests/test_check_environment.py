"""check_environment passes a sound environment and catches each way to break the contract."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from typing import Any

import pytest
from tinker_atropos import Completion, EnvironmentSpec, Step, Task, TaskRef, single_turn
from tinker_atropos.contract_tests import environment as messages
from tinker_atropos.testing import ContractViolated, check_environment


class Guess:
    """A sound environment of several turns: guess a number; each answer says higher or lower."""

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}

    def tasks(self, split: str) -> int | None:
        return None if split == "train" else 2

    async def episode(self, task: TaskRef) -> GuessEpisode:
        return GuessEpisode(self, task)


class GuessEpisode:
    def __init__(self, environment: Guess, task: TaskRef) -> None:
        self.environment, self.task = environment, task
        self.number = random.Random(task.seed).randrange(100)
        self.turns = 0

    async def reset(self) -> Step:
        return Step([{"role": "user", "content": f"Guess, {self.task.split} {self.task.index}."}])

    async def step(self, completion: Completion) -> Step:
        await asyncio.sleep(0)
        self.turns += 1
        if self.turns == 3:
            return Step(truncated=True, metrics={"turns": self.turns})
        return Step([{"role": "user", "content": "higher" if self.number > 42 else "lower"}], reward=0.1)

    async def close(self) -> None:
        pass


def broken(**methods: Any) -> Guess:
    """Return a Guess whose episodes have other methods."""
    kind = type("BrokenEpisode", (GuessEpisode,), methods)

    class Broken(Guess):
        async def episode(self, task: TaskRef) -> Any:
            return kind(self, task)

    return Broken()


def violation(environment: Any, **settings: Any) -> str:
    with pytest.raises(ContractViolated) as raised:
        check_environment(environment, **settings)
    return str(raised.value)


def begins(text: str, template: str) -> bool:
    """Whether a text is that message, whatever its fields hold."""
    return re.fullmatch(re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(template)), text, re.DOTALL) is not None


def test_a_sound_environment_of_several_turns_passes() -> None:
    check_environment(Guess())
    check_environment(EnvironmentSpec(name="guess", make=lambda config: Guess()))


async def test_it_may_be_called_within_a_running_loop() -> None:
    check_environment(single_turn("one", lambda split: [Task("a")], lambda c, t: len(c.text)))


counter = itertools.count()


async def other_reward(self: GuessEpisode, completion: Completion) -> Step:
    return Step(reward=next(counter), terminated=True)


async def other_task(self: GuessEpisode) -> Step:
    return Step(f"task {next(counter)}")


async def shared_turns(self: GuessEpisode, completion: Completion) -> Step:
    shared = self.environment.shared
    shared["turns"] = shared.get("turns", 0) + 1
    await asyncio.sleep(0)
    if shared["turns"] < 3:
        return Step("more")
    shared["turns"] = 0
    return Step(terminated=True)


async def takes_a_lock(self: GuessEpisode, completion: Completion) -> Step:
    """Forgets to unlock when it is cancelled."""
    if self.environment.shared.get("locked"):
        return Step(reward=-1, terminated=True)
    self.environment.shared["locked"] = self.task
    await asyncio.sleep(0)
    self.environment.shared["locked"] = None
    return Step(terminated=True)


async def same_message(self: GuessEpisode) -> Step:
    return Step([self.environment.shared.setdefault(str(self.task), {"role": "user", "content": "Guess."})])


async def hangs(self: GuessEpisode, completion: Completion) -> Step:
    await asyncio.sleep(3600)
    raise AssertionError("not reached")


def returns(value: Any) -> Any:
    async def method(self: GuessEpisode, *_: Any) -> Any:
        return value

    return method


async def raises(self: GuessEpisode, completion: Completion) -> Step:
    raise KeyError(completion.text[:3])


VIOLATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another reward each time": ({"step": other_reward}, messages.NOT_DETERMINISTIC),
    "another task each time": ({"reset": other_task}, messages.NOT_DETERMINISTIC),
    "turns counted together": ({"step": shared_turns}, messages.SHARED_STATE),
    "a lock that cancellation leaves": ({"step": takes_a_lock}, messages.BROKEN_BY_CANCELLATION),
    "one message for all": ({"reset": same_message}, messages.KEPT_MESSAGES),
    "a reward that is NaN": ({"step": returns(Step(reward=float("nan"), terminated=True))}, messages.NOT_FINITE),
    "a reward that is text": ({"step": returns(Step(reward="1", terminated=True))}, messages.NOT_FINITE),  # type: ignore[arg-type]
    "a reward too large": ({"step": returns(Step(reward=10**400, terminated=True))}, messages.NOT_FINITE),
    "an infinite metric": (
        {"step": returns(Step(terminated=True, metrics={"x": float("inf")}))},
        messages.NOT_FINITE,
    ),
    "no end": ({"step": returns(Step("more"))}, messages.NO_END),
    "no Step from reset": ({"reset": returns("Guess.")}, messages.NOT_A_STEP),
    "no Step from step": ({"step": returns((0.0, True))}, messages.NOT_A_STEP),
    "a message without content": ({"reset": returns(Step([{"role": "user"}]))}, messages.BAD_OBSERVATION),
    "a number to observe": ({"reset": returns(Step(3))}, messages.BAD_OBSERVATION),  # type: ignore[arg-type]
    "nothing to begin with": ({"reset": returns(Step([]))}, messages.EMPTY_FIRST),
    "an end at reset": ({"reset": returns(Step("x", terminated=True))}, messages.ENDED_AT_RESET),
    "a reward at reset": ({"reset": returns(Step("x", reward=1.0))}, messages.REWARD_AT_RESET),
    "an error": ({"step": raises}, messages.RAISED),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_each_planted_violation_is_caught_with_its_message(case: str) -> None:
    methods, message = VIOLATIONS[case]
    text = violation(broken(**methods))
    assert begins(text, message), text


def test_a_call_that_hangs_is_named() -> None:
    text = violation(broken(step=hangs), timeout=0.05)
    assert begins(text, messages.HUNG)
    assert "step() did not return within 0.05 s (task train/0, completion '')" in text


def test_a_specification_that_makes_another_environment_each_time_is_caught() -> None:
    def make(config: Any) -> Any:
        number = next(counter)
        return broken(reset=returns(Step(f"environment {number}")))

    assert begins(violation(EnvironmentSpec(name="drifts", make=make)), messages.NOT_REPRODUCIBLE)


def test_a_judge_that_is_not_deterministic_may_say_so() -> None:
    check_environment(broken(step=other_reward), deterministic=False)
    text = violation(broken(step=returns(Step("more"))), deterministic=False, max_turns=5)
    assert text == messages.NO_END.format(turns=5, where="task train/0, completion ''")


def test_the_completion_that_provoked_it_is_named() -> None:
    async def step(self: GuessEpisode, completion: Completion) -> Step:
        return Step(reward=1 / (len(completion.text) - 17), terminated=True)

    assert violation(broken(step=step)) == (
        "step() raised ZeroDivisionError: division by zero (task train/0, completion 'The answer is 42.')"
    )


def test_a_close_that_fails_too_does_not_hide_the_first_violation() -> None:
    async def close(self: GuessEpisode) -> None:
        raise ValueError("closed twice")

    assert begins(violation(broken(step=returns("no step"), close=close)), messages.NOT_A_STEP)
    assert "close() raised ValueError: closed twice" in violation(broken(close=close))


@pytest.mark.parametrize(
    ("size", "message"),
    [(-1, messages.BAD_SIZE), (True, messages.BAD_SIZE), (2.0, messages.BAD_SIZE), (0, messages.NO_TRAINING_TASKS)],
)
def test_a_bad_number_of_tasks(size: Any, message: str) -> None:
    environment = Guess()
    environment.tasks = lambda split: size  # type: ignore[method-assign]
    assert begins(violation(environment), message)


def test_what_is_no_text_environment() -> None:
    assert "is of kind 'external'" in violation(EnvironmentSpec(name="w", make=lambda config: None, kind="external"))
    assert "it needs tasks(split)" in violation(object())


def test_our_own_completions_include_what_policies_really_say() -> None:
    texts = [completion.text for completion in messages.COMPLETIONS]
    assert "" in texts
    assert any("\x00" in text for text in texts)
    assert any(completion.truncated for completion in messages.COMPLETIONS)
