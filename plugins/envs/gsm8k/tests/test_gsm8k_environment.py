"""What is asked and how it is rewarded, for every kind of data set, and which settings go together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos import Completion, ConfigError, DataError, TaskRef
from tinker_atropos_gsm8k import arithmetic, environment_spec
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.environment import Gsm8kEnvironment, make
from tinker_atropos_gsm8k.prompts import EXAMPLES, INSTRUCTION

FIXTURE = str(Path(__file__).parent / "gsm8k_fixture.jsonl")
FIRST = "Mara stacks 7 crates with 12 bottles in each. Five bottles break. How many whole bottles are there?"


def made(**settings: Any) -> Gsm8kEnvironment:
    return make(Gsm8kConfig(**{"dataset": FIXTURE, **settings}))


async def prompt(environment: Gsm8kEnvironment, split: str = "train", index: int = 0, seed: int = 0) -> Any:
    return (await (await environment.episode(TaskRef(split, index, seed))).reset()).observation


async def answered(environment: Gsm8kEnvironment, completion: Completion, index: int = 0) -> Any:
    episode = await environment.episode(TaskRef("train", index, 0))
    await episode.reset()
    step = await episode.step(completion)
    await episode.close()
    return step


async def test_by_default_a_chat_message_asks_for_gsm8ks_form() -> None:
    environment = made()
    assert await prompt(environment) == [{"role": "user", "content": f"{FIRST}\n\n{INSTRUCTION}"}]
    assert (environment.stop, environment.max_tokens) == (None, 512)


async def test_a_chat_prompt_takes_system_message_instruction_and_worked_examples() -> None:
    messages = await prompt(made(system_prompt="Be brief.", instruction="Think.", few_shot=2))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief."
    assert messages[1]["content"] == f"{EXAMPLES[0][0]}\n\nThink."
    assert messages[2]["content"] == EXAMPLES[0][1]
    assert messages[-1]["content"] == f"{FIRST}\n\nThink."
    assert await prompt(made(instruction="")) == [{"role": "user", "content": FIRST}]


async def test_a_completion_prompt_is_raw_text_that_stops_at_the_next_question() -> None:
    environment = made(prompt_format="completion", few_shot=1, instruction="Solve.")
    example = f"Question: {EXAMPLES[0][0]}\nAnswer: {EXAMPLES[0][1]}"
    assert await prompt(environment) == f"Solve.\n\n{example}\n\nQuestion: {FIRST}\nAnswer:"
    assert environment.stop == ["\n\nQuestion:"]
    assert made(prompt_format="completion").stop is None


async def test_the_worked_examples_are_right() -> None:
    from tinker_atropos_gsm8k.grading import final_answer

    for _, solution in EXAMPLES:
        *_, last_line, marked = solution.split("\n")
        assert final_answer(marked).value == final_answer(last_line.replace(" km", "")).value


async def test_tasks_wrap_around_and_do_not_depend_on_the_seed() -> None:
    environment = made()
    assert (environment.tasks("train"), environment.tasks("test"), environment.tasks("other")) == (8, 0, 0)
    assert await prompt(environment, index=8, seed=5) == await prompt(environment, index=0, seed=1)
    assert await prompt(environment, index=1) != await prompt(environment, index=0)


async def test_a_split_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DataError, match=r"no tasks in split 'test' .* it has train"):
        await made().episode(TaskRef("test", 0, 0))


async def test_fewer_tasks_may_be_used() -> None:
    environment = made(train_tasks=3)
    assert environment.tasks("train") == 3
    assert await prompt(environment, index=3) == await prompt(environment, index=0)
    assert made(train_tasks=300).tasks("train") == 8


async def test_a_reward_is_correctness_and_nothing_else_by_default() -> None:
    environment = made()
    right = await answered(environment, Completion("84 - 5 = 79\n#### 79", tokens=10))
    assert (right.reward, right.terminated, right.truncated) == (1.0, True, False)
    assert right.metrics == {"correct": 1.0, "truncated": 0.0, "no_answer": 0.0, "ungraded": 0.0, "format": 1.0}
    assert (await answered(environment, Completion("79"))).reward == 1.0
    assert (await answered(environment, Completion("#### 80"))).reward == 0.0


async def test_format_and_length_are_added_when_weighted() -> None:
    environment = made(format_weight=0.25, length_weight=0.5, length_tokens=100)
    assert (await answered(environment, Completion("#### 79", tokens=40))).reward == 1.0 + 0.25 + 0.5 * 0.6
    assert (await answered(environment, Completion("79", tokens=100))).reward == 1.0
    assert (await answered(environment, Completion("79", tokens=999))).reward == 1.0
    assert (await answered(environment, Completion("#### 80", tokens=0))).reward == 0.25
    assert (await answered(environment, Completion("#### 79", "length", tokens=0))).reward == 0.0
    assert (await answered(environment, Completion("", tokens=0))).reward == 0.0


async def test_arithmetic_is_a_two_shot_continuation_that_ends_at_the_line_break() -> None:
    environment = made(dataset="arithmetic")
    assert (environment.stop, environment.max_tokens) == (["\n"], 4)
    assert (environment.tasks("train"), environment.tasks("test")) == (200, 200)
    text = await prompt(environment)
    head, _, question = text.rpartition("\n")
    assert head == "3 + 4 = 7\n12 + 5 = 17"
    a, b = question.removesuffix(" =").split(" + ")
    for reply, reward in (
        (f" {int(a) + int(b)}", 1.0),
        (f" {int(a) + int(b) + 1}", 0.0),
        (f" {a} + {b}", 0.0),
        ("", 0.0),
    ):
        assert (await answered(environment, Completion(reply))).reward == reward
    cheat = " ".join(str(total) for total in range(2, 41))
    assert (await answered(environment, Completion(cheat))).metrics["no_answer"] == 1.0
    truncated = await answered(environment, Completion(f" {int(a) + int(b)}", "length"))
    assert (truncated.reward, truncated.metrics["truncated"]) == (0.0, 1.0)


def test_arithmetic_holds_out_the_same_half_always_and_shows_none_of_it() -> None:
    train, test = arithmetic.pairs()
    assert (train, test) == arithmetic.pairs()
    assert len(train) == len(set(train)) == len(test) == len(set(test)) == 200
    assert {*train, *test} == {(a, b) for a in range(1, 21) for b in range(1, 21)}
    held_out = set(test)
    assert not held_out & {(b, a) for a, b in train}  # not even the other way round
    assert not held_out & {pair for a, b in arithmetic.SHOTS for pair in ((a, b), (b, a))}
    assert train[:3] == [(7, 20), (5, 14), (13, 5)]  # pinned: a change would make old evaluations incomparable


async def test_arithmetic_shows_as_many_sums_as_asked() -> None:
    assert (await prompt(made(dataset="arithmetic", few_shot=0))).count("\n") == 0
    assert (await prompt(made(dataset="arithmetic", few_shot=4))).startswith(
        "3 + 4 = 7\n12 + 5 = 17\n8 + 11 = 19\n15 + 2 = 17\n"
    )


async def test_gsm_symbolic_is_endless_seeded_and_never_trains_on_a_test_problem() -> None:
    one, same = made(dataset="gsm_symbolic", data_seed=7), made(dataset="gsm-symbolic", data_seed=7)
    other = made(dataset="gsm_symbolic", data_seed=8)
    assert (one.tasks("train"), one.tasks("test")) == (None, 200)
    for split, index in (("train", 0), ("train", 499), ("train", 500), ("train", 10**9), ("test", 3)):
        assert await prompt(one, split, index) == await prompt(same, split, index)
        assert await prompt(one, split, index) != await prompt(other, split, index)
    tests = {(await prompt(one, "test", index))[0]["content"] for index in range(200)}
    trains = {(await prompt(one, "train", index))[0]["content"] for index in range(2000)}
    assert not tests & trains
    sized = made(dataset="gsm_symbolic", train_tasks=10, test_tasks=5)
    assert (sized.tasks("train"), sized.tasks("test")) == (10, 5)


async def test_gsm_symbolic_is_graded_by_its_own_answers() -> None:
    environment = made(dataset="gsm_symbolic")
    for index in range(50):
        episode = await environment.episode(TaskRef("train", index, 0))
        gold = episode.problem.answer
        assert (await episode.step(Completion(f"#### {float(gold):.2f}"))).reward == 1.0
        assert (await episode.step(Completion(f"#### {float(gold + 1):.2f}"))).reward == 0.0


def test_gsm_symbolic_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "reasoning_gym":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(DataError, match=r"pip install 'tinker-atropos-gsm8k\[symbolic\]'"):
        made(dataset="gsm_symbolic")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "arithmatic"}, r"env\.dataset: 'arithmatic' .* Did you mean 'arithmetic'\?"),
        ({"dataset": "gsm8k"}, r"env\.dataset: 'gsm8k' .* Did you mean 'openai/gsm8k'\?"),
        ({"dataset": ""}, r"env\.dataset: '' "),
        ({"dataset": "arithmetic", "prompt_format": "chat"}, r"env\.prompt_format: 'chat' does not go with"),
        ({"dataset": "arithmetic", "instruction": "Add."}, r"env\.instruction: "),
        ({"dataset": "arithmetic", "system_prompt": "Add."}, r"env\.system_prompt: "),
        ({"dataset": "arithmetic", "few_shot": 5}, r"env\.few_shot: 5 is more than the 4"),
        ({"few_shot": 9}, r"env\.few_shot: 9 is more than the 8"),
        ({"prompt_format": "completion", "system_prompt": "x"}, r"env\.system_prompt: .* env\.prompt_format=chat"),
        ({"data_seed": 3}, r"env\.data_seed: 3 has no effect"),
        ({"subset": "main"}, r"env\.subset: 'main' has no effect"),
        ({"length_tokens": 100}, r"env\.length_tokens: 100 has no effect while env\.length_weight is 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gsm8kConfig(**{"dataset": FIXTURE, **settings})


@pytest.mark.parametrize("dataset", ["./none", "a/b/c", "none.jsonl", "~/none-of-that-name", "data/train.parquet"])
def test_a_path_that_does_not_exist_never_turns_into_a_question_to_the_hub(dataset: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        made(dataset=dataset)


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in Gsm8kConfig.model_fields.values())


def test_the_specification_is_whole() -> None:
    spec = environment_spec()
    assert (spec.name, spec.kind, spec.config) == ("gsm8k", "text", Gsm8kConfig)
    assert spec.make(Gsm8kConfig(dataset="arithmetic")).tasks("test") == 200
