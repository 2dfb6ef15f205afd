"""The environment: poses a problem, takes one answer, rewards it when it is right."""

from __future__ import annotations

import importlib.util

from tinker_atropos.environment import Step
from tinker_atropos.errors import DataError, PluginError
from tinker_atropos.trajectory import Completion, Message, Stop, TaskRef

from tinker_atropos_gsm8k import arithmetic, prompts
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.grading import Answer, bare_integer, final_answer
from tinker_atropos_gsm8k.problems import FirstOf, FixedSource, Problem, Source
from tinker_atropos_gsm8k.verifier import Verifier


def make(config: Gsm8kConfig) -> Gsm8kEnvironment:
    """Return the environment with its data loaded; raises `DataError` if they can't be had or a row is wrong."""
    if importlib.util.find_spec("math_verify") is None:
        raise PluginError(
            "environment 'gsm8k' grades with math-verify, which is not installed; `pip install math-verify`"
        )
    limits = {"train": config.train_tasks, "test": config.test_tasks}
    return Gsm8kEnvironment(config, FirstOf(_source(config), limits))


def _source(config: Gsm8kConfig) -> Source:
    if config.source == "arithmetic":
        return arithmetic.source()
    if config.source == "gsm_symbolic":
        from tinker_atropos_gsm8k.symbolic import TEST_SIZE, SymbolicSource

        return SymbolicSource(config.data_seed or 0, config.test_tasks or TEST_SIZE)
    if config.source == "local":
        from tinker_atropos_gsm8k.rows import read_path

        return FixedSource(read_path(config.dataset))
    from tinker_atropos_gsm8k.hub import read_hub

    return FixedSource(read_hub(config.dataset, config.subset))


class Gsm8kEnvironment:
    """Single-turn problems with exact answers.

    `stop` is where a turn ends and `max_tokens` how many new tokens one needs; both follow the data set and the prompt
    format.
    """

    name = "gsm8k"

    def __init__(self, config: Gsm8kConfig, source: Source) -> None:
        self.config = config
        self.verifier = Verifier()
        self._source = source
        self._sums = config.source == "arithmetic"
        self.stop: Stop = None
        self.max_tokens = prompts.MAX_TOKENS
        if self._sums:
            self.stop = list(arithmetic.STOP)
            self.max_tokens = arithmetic.MAX_TOKENS
        elif config.resolved_format == "completion" and config.shots:
            self.stop = list(prompts.COMPLETION_STOP)

    def tasks(self, split: str) -> int | None:
        """Return the number of problems in the split; None for the endless stream of gsm_symbolic."""
        return self._source.size(split)

    async def episode(self, task: TaskRef) -> Gsm8kEpisode:
        """Return an episode of the problem at `index` modulo the size; it draws nothing at random."""
        if self.tasks(task.split) == 0:
            raise DataError(
                f"environment 'gsm8k' has no tasks in split {task.split!r} of env.dataset={self.config.dataset}; it "
                "has " + (" and ".join(split for split in ("train", "test") if self.tasks(split) != 0) or "none")
            )
        return Gsm8kEpisode(self, self._source.problem(task.split, task.index))

    async def close(self) -> None:
        """End the grading process, if one was started."""
        await self.verifier.close()

    def prompt(self, problem: Problem) -> str | list[Message]:
        """Return what the policy is shown."""
        config = self.config
        if self._sums:
            return arithmetic.prompt(problem.question, config.shots)
        if config.resolved_format == "completion":
            return prompts.SHOWN.completion(problem.question, instruction=config.instruction or "", shots=config.shots)
        instruction = prompts.INSTRUCTION if config.instruction is None else config.instruction
        return prompts.SHOWN.chat(
            problem.question, instruction=instruction, system=config.system_prompt, shots=config.shots
        )

    def read(self, text: str) -> Answer:
        """Return the answer a completion gives: the whole text for sums, else what `final_answer` finds."""
        if not self._sums:
            return final_answer(text)
        value = bare_integer(text)
        return Answer("none") if value is None else Answer("number", text, value)

    async def score(self, completion: Completion, problem: Problem) -> Step:
        """Return the last step of the episode.

        The reward is 1 for the right answer and 0 otherwise, plus `format_weight` and `length_weight` times their
        terms. A truncated completion is wrong whatever it says. Metrics: `correct`, `truncated`, `no_answer`,
        `ungraded` (math-verify was stopped), `format`, and `length` where it is weighted.
        """
        answer = self.read(completion.text)
        correct: bool | None = False
        if not completion.truncated and answer.value is not None:
            correct = answer.value == problem.answer
        elif not completion.truncated and answer.expression is not None:
            correct = await self.verifier.equal(answer.expression, problem.answer)
        formatted = not completion.truncated and (answer.given if self._sums else answer.marked)
        reward = float(bool(correct)) + self.config.format_weight * formatted
        metrics = {
            "correct": float(bool(correct)),
            "truncated": float(completion.truncated),
            "no_answer": float(not answer.given),
            "ungraded": float(correct is None),
            "format": float(formatted),
        }
        if self.config.length_weight:
            limit = self.config.length_tokens or prompts.MAX_TOKENS
            # Only a right answer earns it: brevity must never pay more than the work.
            metrics["length"] = max(0.0, 1.0 - completion.tokens / limit) if correct else 0.0
            reward += self.config.length_weight * metrics["length"]
        return Step(reward=reward, terminated=True, metrics=metrics)


class Gsm8kEpisode:
    """One problem, one answer."""

    def __init__(self, environment: Gsm8kEnvironment, problem: Problem) -> None:
        self._environment = environment
        self.problem = problem

    async def reset(self) -> Step:
        """Return the prompt."""
        return Step(self._environment.prompt(self.problem))

    async def step(self, completion: Completion) -> Step:
        """Grade the completion and end the episode."""
        return await self._environment.score(completion, self.problem)

    async def close(self) -> None:
        """Nothing to free: the grading process belongs to the environment."""
