"""A dataset and a function are an environment."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tinker_atropos import Completion, DataError, EnvironmentSpec, PluginError, Task, TaskRef, UserError, single_turn
from tinker_atropos.testing import check_environment

TASKS = [Task("1 + 1 =", "2"), Task("2 + 2 =", "4")]


def tasks(split: str) -> list[Task]:
    return TASKS if split == "train" else []


def right(completion: Completion, task: Task) -> bool:
    return completion.text.strip() == task.answer


async def short(completion: Completion, task: Task) -> float:
    await asyncio.sleep(0)
    return 1.0 / (1 + len(completion.text))


async def play(spec: EnvironmentSpec, text: str = "2", index: int = 0, **config: Any) -> tuple[Any, Any]:
    """Return the observation of a task and the step that a completion of it earns."""
    environment = spec.make(spec.config(**config))
    episode = await environment.episode(TaskRef("train", index, 0))
    first = await episode.reset()
    step = await episode.step(Completion(text))
    await episode.close()
    return first.observation, step


async def test_a_right_answer_a_wrong_one_and_the_end() -> None:
    spec = single_turn("sums", tasks, right)
    observation, step = await play(spec, " 2")
    assert observation == [{"role": "user", "content": "1 + 1 ="}]
    assert (step.reward, step.terminated, step.truncated, dict(step.metrics)) == (1.0, True, False, {})
    assert (await play(spec, "3"))[1].reward == 0.0
    check_environment(spec)


async def test_several_rewards_are_weighted_and_logged_apart() -> None:
    _, step = await play(single_turn("sums", tasks, [right, short], weights=[2, 0.5]), "2")
    assert step.reward == 2 * 1.0 + 0.5 * 0.5
    assert step.metrics == {"reward/right": 1.0, "reward/short": 0.5}
    _, step = await play(single_turn("sums", tasks, {"a": right, "b": short}, weights={"b": -1, "a": 1}), "2")
    assert (step.reward, step.metrics) == (0.5, {"reward/a": 1.0, "reward/b": 0.5})


async def test_rewards_default_to_weight_one() -> None:
    assert (await play(single_turn("sums", tasks, [right, short]), "2"))[1].reward == 1.5


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.int64(1), Fraction(1, 2)])
async def test_any_finite_number_is_a_reward(value: Any) -> None:
    assert (await play(single_turn("sums", tasks, lambda c, t: value)))[1].reward == float(value)


@pytest.mark.parametrize("value", [None, "1", b"1", [1], float("nan"), float("inf"), -float("inf"), 10**400, 1j])
async def test_anything_else_is_an_error_that_names_reward_and_value(value: Any) -> None:
    with pytest.raises(DataError, match=r"reward 'grade' of environment 'sums' returned .*; expected a finite number"):
        await play(single_turn("sums", tasks, {"grade": lambda c, t: value}))


async def test_a_sum_that_overflows_is_an_error() -> None:
    with pytest.raises(DataError, match=r"sum up to 3e\+39"):
        await play(single_turn("sums", tasks, [lambda c, t: 3e37], weights=[100]))


@pytest.mark.parametrize("leave", [SystemExit(0), GeneratorExit()])
async def test_a_reward_that_leaves_the_program_is_an_error(leave: BaseException) -> None:
    def grade(completion: Completion, task: Task) -> float:
        raise leave

    with pytest.raises(DataError, match="a reward must return a number"):
        await play(single_turn("sums", tasks, grade))


async def test_callables_of_any_make_are_rewards() -> None:
    class Grader:
        def __call__(self, completion: Completion, task: Task) -> float:
            return 0.25

    _, step = await play(single_turn("sums", tasks, [Grader(), functools.partial(right)]))
    assert step.metrics == {"reward/reward_0": 0.25, "reward/reward_1": 1.0}


@pytest.mark.parametrize(
    ("reward", "weights", "says"),
    [
        ([lambda c, t: 0, lambda c, t: 1], None, "one name"),
        ([], None, "at least one reward"),
        (None, None, "expected a function"),
        ("right", None, "expected a function"),
        ([right], [1, 2], "1 rewards need as many weights, got 2"),
        ([right], {"wrong": 1}, "they must be the same"),
        ([right], [float("nan")], "expected a finite number"),
        ([right], ["1"], "expected a finite number"),
    ],
)
def test_rewards_and_weights_that_do_not_fit(reward: Any, weights: Any, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        single_turn("sums", tasks, reward, weights=weights)


def test_tasks_must_be_a_function_of_the_split() -> None:
    with pytest.raises(PluginError, match="is a list; expected a function of the split"):
        single_turn("sums", TASKS, right)  # type: ignore[arg-type]


def test_a_generator_is_read_once_and_kept() -> None:
    reads: list[str] = []

    def generate(split: str) -> Iterator[Task]:
        reads.append(split)
        yield from TASKS

    spec = single_turn("sums", generate, right)
    environment = spec.make(spec.config())
    assert reads == []
    assert [environment.tasks("train") for _ in range(2)] == [2, 2]
    assert reads == ["train"]


async def test_an_empty_split_has_no_tasks_and_no_episodes() -> None:
    environment = single_turn("sums", tasks, right).make(single_turn("sums", tasks, right).config())
    assert environment.tasks("test") == 0
    with pytest.raises(DataError, match="no tasks in split 'test'"):
        await environment.episode(TaskRef("test", 0, 0))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, r"tasks\('train'\) returned None"),
        (Task("a"), "expected tasks to iterate over"),
        ([TASKS[0], {"prompt": "a"}], "row 1: expected a Task, got dict"),
        ([Task("")], "row 0: the prompt is ''"),
        ([Task(3)], "row 0: the prompt is 3"),  # type: ignore[arg-type]
        ([Task([{"content": "no role"}])], "messages with 'role' and 'content'"),
    ],
)
def test_rows_that_are_no_tasks_are_named(rows: Any, says: str) -> None:
    spec = single_turn("sums", lambda split: rows, right)
    with pytest.raises(DataError, match=says):
        spec.make(spec.config()).tasks("train")


async def test_prompt_formats_and_system_prompt() -> None:
    spec = single_turn("sums", lambda split: [Task("a"), Task([{"role": "user", "content": "b"}])], right)
    assert (await play(spec, prompt_format="completion"))[0] == "a"
    system = {"role": "system", "content": "Be brief."}
    assert (await play(spec, index=1, system_prompt="Be brief."))[0] == [system, {"role": "user", "content": "b"}]
    with pytest.raises(UserError, match=r"env.prompt_format=completion needs prompts that are text"):
        await play(spec, index=1, prompt_format="completion")


async def test_a_caller_who_changes_the_messages_does_not_change_the_task() -> None:
    spec = single_turn("sums", lambda split: [Task([{"role": "user", "content": "b"}])], right)
    environment = spec.make(spec.config())
    for _ in range(2):
        (message,) = (await (await environment.episode(TaskRef("train", 0, 0))).reset()).observation
        assert message["content"] == "b"
        message["content"] = "changed"


def test_extra_fields_of_a_task_are_attributes() -> None:
    task = Task("2 + 2 =", "4", level=3)
    assert (task.prompt, task.answer, task.level) == ("2 + 2 =", "4", 3)
    assert repr(task) == "Task('2 + 2 =', '4', level=3)"
    with pytest.raises(AttributeError, match="this task has no 'levle'; it has prompt, answer, level"):
        _ = task.levle
    with pytest.raises(DataError, match="can't be called 'extra'"):
        Task("a", extra=1)


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_task_survives_copying_and_pickling(through: Any) -> None:
    again = through(Task("2 + 2 =", "4", level=3))
    assert (again.prompt, again.answer, again.level) == ("2 + 2 =", "4", 3)
