"""The environment: poses a problem, takes one answer, rewards it when it is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_atropos.environment import Step
from tinker_atropos.errors import DataError, PluginError
from tinker_atropos.grading import Limits
from tinker_atropos.trajectory import Completion, Group, Message, Stop, TaskRef

from tinker_atropos_math_server import prompts
from tinker_atropos_math_server.boxed import after_thought, final_box
from tinker_atropos_math_server.config import MathServerConfig
from tinker_atropos_math_server.difficulty import SuccessRates
from tinker_atropos_math_server.grading import Grader
from tinker_atropos_math_server.loading import Loaded, load
from tinker_atropos_math_server.problems import Problem

NAME = "math_server"


def make(config: MathServerConfig) -> MathServerEnvironment:
    """Return the environment with its data loaded; raises `DataError` if they can't be had or a row is wrong."""
    if importlib.util.find_spec("math_verify") is None:
        raise PluginError(
            f"environment {NAME!r} grades with math-verify, which is not installed; `pip install math-verify`"
        )
    loaded = load(config)
    return FilteredEnvironment(config, loaded) if config.filters else MathServerEnvironment(config, loaded)


class MathServerEnvironment:
    """Single-turn problems whose answers stand in a box.

    `stop` is where a turn ends and `max_tokens` how many new tokens one needs.
    """

    name = NAME

    def __init__(self, config: MathServerConfig, loaded: Loaded) -> None:
        self.config = config
        self.max_tokens = prompts.MAX_TOKENS
        self.stop: Stop = list(prompts.COMPLETION_STOP) if config.prompt_format == "completion" else None
        self.grader = Grader(
            workers=config.grading_workers,
            limits=Limits(config.grading_seconds, memory_bytes=config.grading_memory_mb * 2**20),
        )
        self._loaded = loaded

    def tasks(self, split: str) -> int:
        """Return the number of problems in the split; for `train`, in one pass over the mix."""
        return {"train": len(self._loaded.train), "test": len(self._loaded.test)}.get(split, 0)

    def problem(self, task: TaskRef) -> Problem:
        """Return the problem at `index` modulo the size; the seed changes nothing."""
        size = self.tasks(task.split)
        if size == 0:
            raise DataError(
                f"environment {NAME!r} has no tasks in split {task.split!r}; it has "
                + " and ".join(split for split in ("train", "test") if self.tasks(split))
            )
        return self._loaded.train[task.index] if task.split == "train" else self._loaded.test[task.index % size]

    async def episode(self, task: TaskRef) -> MathEpisode:
        """Return an episode of a problem; it draws nothing at random."""
        named = task.split == "test" or len(self._loaded.sets["train"]) > 1
        return MathEpisode(self, self.problem(task), by_set=named)

    async def close(self) -> None:
        """End the grading processes, if any were started."""
        await self.grader.close()

    def prompt(self, problem: Problem) -> str | list[Message]:
        """Return what the policy is shown."""
        config = self.config
        instruction = prompts.INSTRUCTION if config.instruction is None else config.instruction
        if config.prompt_format == "completion":
            return prompts.SHOWN.completion(problem.question, instruction=instruction, shots=config.few_shot)
        return prompts.SHOWN.chat(
            problem.question, instruction=instruction, system=config.system_prompt, shots=config.few_shot
        )

    async def score(self, completion: Completion, problem: Problem, *, by_set: bool = False) -> Step:
        """Return the last step of the episode.

        The reward is 1 for the right answer and 0 otherwise, plus `format_weight` and `length_weight` times their
        terms. A truncated completion is wrong whatever it says. Metrics: `correct` (and `correct/SET`), `truncated`,
        `no_answer`, `ungraded` (a worker was stopped), `echoed`, `format`, and `length` where it is weighted.
        """
        box = final_box(after_thought(completion.text))
        answer = None if box.content is None or not box.content.strip() else box.content
        correct: bool | None = False
        reason = ""
        if not completion.truncated and answer is not None:
            verdict = await self.grader.grade(problem.answer, answer, problem.question)
            correct, reason = verdict.right, verdict.reason
        formatted = not completion.truncated and answer is not None and box.count == 1
        reward = float(bool(correct)) + self.config.format_weight * formatted
        metrics = {
            "correct": float(bool(correct)),
            "truncated": float(completion.truncated),
            "no_answer": float(answer is None),
            "ungraded": float(correct is None),
            "echoed": float(reason == "echo"),
            "format": float(formatted),
        }
        if by_set:
            metrics[f"correct/{problem.set}"] = metrics["correct"]
        if self.config.length_weight:
            limit = self.config.length_tokens or prompts.MAX_TOKENS
            # Only a right answer earns it: brevity must never pay more than the work.
            metrics["length"] = max(0.0, 1.0 - completion.tokens / limit) if correct else 0.0
            reward += self.config.length_weight * metrics["length"]
        return Step(reward=reward, terminated=True, metrics=metrics)


class FilteredEnvironment(MathServerEnvironment):
    """Leaves out problems that the policy nearly always or hardly ever solves; what it counts is in the checkpoint."""

    def __init__(self, config: MathServerConfig, loaded: Loaded) -> None:
        super().__init__(config, loaded)
        self.rates = SuccessRates(
            low=config.min_success, high=config.max_success, window=config.success_window, retry=config.success_retry
        )

    def skip(self, task: TaskRef) -> str:
        """Return why a training task is not to be played now, "" to play it."""
        return self.rates.reason(self.problem(task).id, task.seed)

    def ended(self, groups: Sequence[Group]) -> None:
        """Count the answers of groups that ended with a step."""
        for group in groups:
            answers = [trajectory.metrics.get("correct", 0.0) > 0 for trajectory in group.trajectories]
            self.rates.add(self.problem(group.task).id, answers)

    def snapshot(self) -> dict[str, Any]:
        """Return the success rates."""
        return self.rates.snapshot()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the success rates of a snapshot."""
        self.rates.restore(state)


class MathEpisode:
    """One problem, one answer. `by_set`: its metrics name the set it is of."""

    def __init__(self, environment: MathServerEnvironment, problem: Problem, *, by_set: bool = False) -> None:
        self._environment = environment
        self._by_set = by_set
        self.problem = problem

    async def reset(self) -> Step:
        """Return the prompt."""
        return Step(self._environment.prompt(self.problem))

    async def step(self, completion: Completion) -> Step:
        """Grade the completion and end the episode."""
        return await self._environment.score(completion, self.problem, by_set=self._by_set)

    async def close(self) -> None:
        """Nothing to free: the grading processes belong to the environment."""
