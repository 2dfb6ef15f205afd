"""What is asked and how it is rewarded, and the contract of environments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos import Completion, DataError, TaskRef
from tinker_atropos.testing import check_environment
from tinker_atropos_math_server import environment_spec
from tinker_atropos_math_server.boxed import final_box
from tinker_atropos_math_server.config import MathServerConfig
from tinker_atropos_math_server.environment import MathServerEnvironment, make
from tinker_atropos_math_server.prompts import EXAMPLES, INSTRUCTION

FIXTURE = str(Path(__file__).parent / "math_server_fixture.jsonl")
FIRST = r"What is $\frac{1}{3} + \frac{1}{6}$?"


@pytest.fixture
async def made() -> AsyncIterator[Callable[..., MathServerEnvironment]]:
    environments: list[MathServerEnvironment] = []

    def build(**settings: Any) -> MathServerEnvironment:
        environments.append(make(MathServerConfig(**{"dataset": FIXTURE, "grading_workers": 1, **settings})))
        return environments[-1]

    yield build
    for environment in environments:
        await environment.close()


async def prompt(environment: MathServerEnvironment, split: str = "train", index: int = 0) -> Any:
    return (await (await environment.episode(TaskRef(split, index, 0))).reset()).observation


async def answered(environment: MathServerEnvironment, completion: Completion, split: str = "train") -> Any:
    episode = await environment.episode(TaskRef(split, 0, 0))
    await episode.reset()
    step = await episode.step(completion)
    await episode.close()
    return step


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"test_rows": "0:3", "few_shot": 2, "format_weight": 0.1, "length_weight": 0.1},
        {"prompt_format": "completion", "few_shot": 1, "max_success": 0.9, "success_window": 2},
    ],
)
async def test_the_environment_keeps_the_contract(
    made: Callable[..., MathServerEnvironment], settings: dict[str, Any]
) -> None:
    environment = made(**settings)
    check_environment(environment)
    hostile = [
        r"\boxed{\int_0^{\infty} e^{-x^{x^{x}}} dx}",
        r"\boxed{\frac{3}{6}}",
        r"\boxed{9**9**9}",
        "\\boxed{\ud800}",
    ]
    check_environment(environment, completions=[Completion(text) for text in hostile])


async def test_by_default_a_chat_message_asks_for_a_box(made: Callable[..., MathServerEnvironment]) -> None:
    environment = made()
    assert await prompt(environment) == [{"role": "user", "content": f"{FIRST}\n\n{INSTRUCTION}"}]
    assert (environment.stop, environment.max_tokens) == (None, 2048)
    assert await prompt(made(instruction="")) == [{"role": "user", "content": FIRST}]


async def test_a_prompt_takes_system_message_and_worked_examples(made: Callable[..., MathServerEnvironment]) -> None:
    messages = await prompt(made(system_prompt="Be brief.", few_shot=2))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    environment = made(prompt_format="completion", few_shot=1, instruction="Solve.")
    example = f"Problem: {EXAMPLES[0][0]}\nSolution: {EXAMPLES[0][1]}"
    assert await prompt(environment) == f"Solve.\n\n{example}\n\nProblem: {FIRST}\nSolution:"
    assert environment.stop == ["\n\nProblem:"]


def test_each_worked_example_ends_in_one_box() -> None:
    assert [final_box(solution).content for _, solution in EXAMPLES] == [
        "6",
        r"\frac{5}{9}",
        r"[3 - \sqrt{5}, 3 + \sqrt{5}]",
        r"\begin{pmatrix} 1 & 6 \\ 0 & 1 \end{pmatrix}",
    ]


async def test_the_reward_is_correctness_and_nothing_else_by_default(
    made: Callable[..., MathServerEnvironment],
) -> None:
    environment = made()
    right = await answered(environment, Completion(r"It is $\boxed{\frac{3}{6}}$.", tokens=10))
    assert (right.reward, right.terminated) == (1.0, True)
    named = {"correct": 1.0, "truncated": 0.0, "no_answer": 0.0, "ungraded": 0.0, "echoed": 0.0, "format": 1.0}
    assert right.metrics == named
    for wrong in (r"\boxed{\frac13}", "0.5", "", r"\boxed{}", r"\boxed{0.5} \boxed{1}", r"<think>\boxed{0.5}</think>"):
        assert (await answered(environment, Completion(wrong))).reward == 0.0, wrong
    cut = await answered(environment, Completion(r"\boxed{0.5}", "length"))
    assert (cut.reward, cut.metrics["truncated"], cut.metrics["format"]) == (0.0, 1.0, 0.0)
    echoed = await answered(environment, Completion(r"\boxed{\frac{1}{3} + \frac{1}{6}}"))
    assert (echoed.reward, echoed.metrics["echoed"]) == (0.0, 1.0)


async def test_format_and_length_are_added_when_weighted(made: Callable[..., MathServerEnvironment]) -> None:
    environment = made(format_weight=0.25, length_weight=0.5, length_tokens=100)
    assert (await answered(environment, Completion(r"\boxed{0.5}", tokens=40))).reward == 1.0 + 0.25 + 0.5 * 0.6
    assert (await answered(environment, Completion(r"\boxed{1} \boxed{0.5}", tokens=100))).reward == 1.0
    assert (await answered(environment, Completion(r"\boxed{7}", tokens=1))).reward == 0.25
    assert (await answered(environment, Completion("7", tokens=1))).reward == 0.0


async def test_sets_are_reported_one_by_one(made: Callable[..., MathServerEnvironment], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "What is 1 + 1?", "solution": "It is \\\\boxed{2}."}\n' * 2)
    environment = made(
        eval_sets=[{"dataset": str(other), "name": "sums"}, {"dataset": FIXTURE, "rows": "4:8", "name": "own"}]
    )
    assert [environment.problem(TaskRef("test", index, 0)).set for index in range(6)] == [
        *("sums", "own", "sums", "own", "own", "own")
    ]
    assert environment.tasks("train") == 4  # what an evaluation asks is not trained on
    assert (await answered(environment, Completion(r"\boxed{2}"), "test")).metrics["correct/sums"] == 1.0
    assert "correct/sums" not in (await answered(environment, Completion(r"\boxed{2}"))).metrics


async def test_a_mix_holds_its_sets_by_weight_and_every_problem(
    made: Callable[..., MathServerEnvironment], tmp_path: Path
) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text('{"problem": "1?", "answer": "1"}\n{"problem": "2?", "answer": "2"}\n')
    sets = [{"dataset": FIXTURE, "weight": 1.0}, {"dataset": str(small), "weight": 3.0}]
    environment = made(dataset=None, datasets=sets)
    played = [environment.problem(TaskRef("train", index, 0)) for index in range(environment.tasks("train"))]
    assert len(played) == 32
    assert [sum(problem.set == name for problem in played) for name in ("math_server_fixture", "small")] == [8, 24]
    assert len({problem.id for problem in played}) == 10
    assert made(dataset=None, datasets=[{"dataset": entry["dataset"]} for entry in sets]).tasks("train") == 10


async def test_a_split_that_is_not_there_is_an_error(made: Callable[..., MathServerEnvironment]) -> None:
    with pytest.raises(DataError, match="no tasks in split 'test'; it has train"):
        await made().episode(TaskRef("test", 0, 0))


def test_the_specification_names_the_environment() -> None:
    assert environment_spec().name == "math_server"
