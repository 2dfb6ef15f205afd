"""What an environment author implements: a dataset and a reward, or the multi-turn contract."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tinker_atropos.errors import DataError, PluginError, UserError
from tinker_atropos.trajectory import Completion, Group, Message, Stop, TaskRef, Trajectory

Kind: TypeAlias = Literal["text", "control", "external"]

MAX_REWARD = float(np.finfo(np.float32).max)
"""Rewards and advantages are trained on in float32."""

Observation: TypeAlias = str | Sequence[Message]
"""Messages to append to the conversation, or raw text that no chat template touches."""


@dataclass(frozen=True, slots=True)
class Step:
    """What `reset` and `step` return alike.

    `observation` is appended to the conversation (ignored once the episode ended). `reward` belongs to the turn just
    taken (0 at reset). `terminated`: the task ended; `truncated`: the environment cut it off. `metrics` are numbers
    logged apart from the reward. `tools` are JSON schemas offered to the next turn; None keeps those of the step
    before.
    """

    observation: Observation = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class Episode(Protocol):
    """One conversation. Used by one rollout, in order: reset, any number of steps, close."""

    async def reset(self) -> Step:
        """Return the first observation."""
        ...

    async def step(self, completion: Completion) -> Step:
        """Take the policy's turn; return its reward and the next observation."""
        ...

    async def close(self) -> None:
        """Free what the episode holds; called exactly once, also after a cancellation."""
        ...


@runtime_checkable
class TextEnvironment(Protocol):
    """A set of tasks that are solved in text.

    An environment may besides define `stop: Stop` (in place of its specification's), `max_tokens: int | None` (new
    tokens per turn that suit it), `async score_group(group) -> Group` (rewards that compare the trajectories of a
    group) and `async close()`.

    One that learns from what its tasks came to defines `ended(groups)`, called once a step with the groups that ended
    with it, trained on or discarded, in the run's order; `snapshot()`, which returns what it has learned, JSON-ready;
    and `restore(snapshot)`. What `snapshot` returns is kept in each checkpoint, and restored where a run resumes or
    rewinds, so it must depend on nothing but `ended`. `skip(task) -> str` may say why a training task is not worth
    playing now ("" to play it), by what was learned and the task alone: then a resumed run skips the same.
    """

    def tasks(self, split: str) -> int | None:
        """Return how many tasks a split (`train` or `test`) has; None: endless; 0: there is no such split."""
        ...

    async def episode(self, task: TaskRef) -> Episode:
        """Return a new episode of a task; the same reference gives the same task."""
        ...


class EnvironmentConfig(BaseModel):
    """Base of an environment plugin's own configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Describes an environment to the registry without building it.

    `make(config)` builds it from an instance of `config`. `stop` is where a turn ends. `needs` names what the trainer
    must be able to learn or the policy to do (`tools`, `images`, `token_advantages`). `defaults` are settings of other
    sections that suit this environment, as `section.key` paths; anything the user writes goes before them.
    `reference` reads what stands after the colon of `--env NAME:…`, once for each, into settings of `config`.
    """

    name: str
    make: Callable[[Any], Any]
    kind: Kind = "text"
    config: type[EnvironmentConfig] = EnvironmentConfig
    stop: Stop = None
    needs: frozenset[str] = frozenset()
    description: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Sequence[str]], Mapping[str, Any]] | None = None


class Task:
    """One row of a single-turn data set: a prompt, its answer, and anything else the reward wants to see.

    `prompt` is text (one user message, or raw text with `env.prompt_format=completion`) or a list of messages. Extra
    keyword arguments are attributes: `Task("2 + 2 =", "4", level=1).level`.
    """

    __slots__ = ("answer", "extra", "prompt")

    def __init__(self, prompt: Observation, answer: Any = None, **extra: Any) -> None:
        if "extra" in extra:
            raise DataError("a task's own field can't be called 'extra': that holds them all; give it another name")
        self.prompt = prompt
        self.answer = answer
        self.extra: dict[str, Any] = extra

    def __getattr__(self, name: str) -> Any:
        if name == "extra":  # not yet set, as in a copy or an unpickling
            raise AttributeError(name)
        try:
            return self.extra[name]
        except KeyError:
            known = ", ".join(("prompt", "answer", *self.extra))
            raise AttributeError(f"this task has no {name!r}; it has {known}") from None

    def __repr__(self) -> str:
        extra = "".join(f", {key}={value!r}" for key, value in self.extra.items())
        return f"Task({self.prompt!r}, {self.answer!r}{extra})"


Reward: TypeAlias = Callable[[Completion, Task], float | bool | Awaitable[float | bool]]
"""Scores one completion; any finite number. May be async. A plain function runs on the event loop: keep it short."""

PromptFormat: TypeAlias = Literal["chat", "completion"]


class SingleTurnConfig(EnvironmentConfig):
    """What every single-turn environment accepts."""

    prompt_format: PromptFormat = Field(
        "chat", description="chat: render with the model's chat template; completion: the prompt text as it is"
    )
    system_prompt: str | None = Field(None, description="system message put before each chat prompt")


def single_turn(
    name: str,
    tasks: Callable[[str], Iterable[Task]],
    reward: Reward | Sequence[Reward] | Mapping[str, Reward],
    *,
    weights: Sequence[float] | Mapping[str, float] | None = None,
    stop: Stop = None,
    description: str = "",
) -> EnvironmentSpec:
    """Make an environment of a dataset and a function.

    `tasks(split)` yields the tasks of `train` and of `test` (nothing: there is no such split). `reward(completion,
    task)` scores one completion. With several rewards the total is their weighted sum (weights default to 1), and each
    is logged apart as `reward/<name>`. Raises `PluginError` if rewards and weights do not match.
    """
    if not callable(tasks):
        raise PluginError(
            f"tasks of environment {name!r} is a {type(tasks).__name__}; expected a function of the split, such as "
            "lambda split: train if split == 'train' else test"
        )
    rewards = _named_rewards(reward)
    weighed = _named_weights(rewards, weights)

    def make(config: SingleTurnConfig) -> SingleTurnEnvironment:
        return SingleTurnEnvironment(
            name, tasks, rewards, weighed, prompt_format=config.prompt_format, system_prompt=config.system_prompt
        )

    return EnvironmentSpec(name=name, make=make, config=SingleTurnConfig, stop=stop, description=description)


class SingleTurnEnvironment:
    """An environment whose episodes are one prompt and one answer. Splits are loaded on first use and kept."""

    def __init__(
        self,
        name: str,
        tasks: Callable[[str], Iterable[Task]],
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        *,
        prompt_format: PromptFormat = "chat",
        system_prompt: str | None = None,
    ) -> None:
        self.name = name
        self.rewards = dict(rewards)
        self.weights = dict(weights)
        self._load = tasks
        self._splits: dict[str, list[Task]] = {}
        self._prompt_format = prompt_format
        self._system_prompt = system_prompt

    def split(self, split: str) -> list[Task]:
        """Return the tasks of a split, loaded once."""
        if split not in self._splits:
            loaded: Any = self._load(split)
            if isinstance(loaded, Task) or not isinstance(loaded, Iterable):
                raise DataError(
                    f"environment {self.name!r}: tasks({split!r}) returned {loaded!r:.80} ({type(loaded).__name__}); "
                    "expected tasks to iterate over, [] where there is no such split"
                )
            self._splits[split] = [
                _task(task, f"environment {self.name!r}, split {split!r}, row {row}") for row, task in enumerate(loaded)
            ]
        return self._splits[split]

    def tasks(self, split: str) -> int | None:
        """Return the number of tasks in the split."""
        return len(self.split(split))

    async def episode(self, task: TaskRef) -> SingleTurnEpisode:
        """Return an episode of the task at `index` modulo the size of the split."""
        rows = self.split(task.split)
        if not rows:
            raise DataError(f"environment {self.name!r} has no tasks in split {task.split!r}")
        return SingleTurnEpisode(self, rows[task.index % len(rows)])

    def observation(self, task: Task) -> Observation:
        """Return the task's prompt in the configured prompt format."""
        if self._prompt_format == "completion":
            if not isinstance(task.prompt, str):
                raise UserError(
                    f"environment {self.name!r}: env.prompt_format=completion needs prompts that are text, got a list "
                    "of messages; use env.prompt_format=chat"
                )
            return task.prompt
        messages = (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else [dict(m) for m in task.prompt]
        )
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    async def score(self, completion: Completion, task: Task) -> tuple[float, dict[str, float]]:
        """Return the weighted total and each reward by name; raises on a reward that is not a finite number."""
        values = await asyncio.gather(*(self._call(name, completion, task) for name in self.rewards))
        each = dict(zip(self.rewards, values, strict=True))
        total = sum(self.weights[name] * value for name, value in each.items())
        if not abs(total) <= MAX_REWARD:
            raise DataError(f"the weighted rewards of environment {self.name!r} sum up to {total}: {each}")
        return total, {f"reward/{name}": value for name, value in each.items()} if len(each) > 1 else {}

    async def _call(self, name: str, completion: Completion, task: Task) -> float:
        try:
            value: Any = self.rewards[name](completion, task)
            if inspect.isawaitable(value):
                value = await value
        except (SystemExit, GeneratorExit) as error:  # out of a task of its own it would end the whole program
            raise DataError(
                f"reward {name!r} of environment {self.name!r} raised {type(error).__name__}({error}); a reward must "
                "return a number"
            ) from None
        try:
            if isinstance(value, str | bytes):  # float() would read "1"
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"reward {name!r} of environment {self.name!r} returned {value!r:.80} ({type(value).__name__}); "
                "expected a finite number"
            ) from None
        if not abs(number) <= MAX_REWARD:
            raise DataError(f"reward {name!r} of environment {self.name!r} returned {number}; expected a finite number")
        return number


class SingleTurnEpisode:
    """One prompt, one answer."""

    def __init__(self, environment: SingleTurnEnvironment, task: Task) -> None:
        self._environment = environment
        self.task = task

    async def reset(self) -> Step:
        """Return the prompt."""
        return Step(self._environment.observation(self.task))

    async def step(self, completion: Completion) -> Step:
        """Score the completion and end the episode."""
        reward, metrics = await self._environment.score(completion, self.task)
        return Step(reward=reward, terminated=True, metrics=metrics)

    async def close(self) -> None:
        """Nothing to free."""


def _task(task: Any, where: str) -> Task:
    """Return a row as it is; raises `DataError` for one that no policy could be asked."""
    if not isinstance(task, Task):
        raise DataError(
            f"{where}: expected a Task, got {type(task).__name__} ({task!r:.80}); yield Task(prompt, answer) objects"
        )
    prompt: Any = task.prompt
    messages = isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or messages):
        raise DataError(f"{where}: the prompt is {prompt!r:.80}; expected text, or messages with 'role' and 'content'")
    return task


def _named_rewards(reward: Reward | Sequence[Reward] | Mapping[str, Reward]) -> dict[str, Reward]:
    if isinstance(reward, Mapping):
        named = dict(reward)
    elif isinstance(reward, Sequence):
        named = {getattr(function, "__name__", f"reward_{place}"): function for place, function in enumerate(reward)}
        if len(named) != len(reward):
            raise PluginError(
                f"several of the {len(reward)} rewards have one name (they are {', '.join(named)}); pass a mapping "
                "{name: function}"
            )
    else:
        named = {getattr(reward, "__name__", "reward"): reward}
    if not named:
        raise PluginError("an environment needs at least one reward function")
    for name, function in named.items():
        if not callable(function):
            raise PluginError(f"reward {name!r} is {function!r}; expected a function (completion, task) -> number")
    return named


def _named_weights(
    rewards: Mapping[str, Reward], weights: Sequence[float] | Mapping[str, float] | None
) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(rewards, 1.0)
    if not isinstance(weights, Mapping):
        if len(weights) != len(rewards):
            raise PluginError(f"{len(rewards)} rewards need as many weights, got {len(weights)}")
        weights = dict(zip(rewards, weights, strict=True))
    if set(weights) != set(rewards):
        raise PluginError(f"weights name {sorted(weights)}, rewards {sorted(rewards)}; they must be the same")
    weight: Any
    for reward, weight in weights.items():
        if isinstance(weight, str) or not isinstance(weight, SupportsFloat) or not math.isfinite(weight):
            raise PluginError(f"the weight of reward {reward!r} is {weight!r}; expected a finite number")
    return {name: float(weights[name]) for name in rewards}


async def score_group(environment: Any, group: Group) -> Group:
    """Let the environment compare the trajectories of a group, if it defines `score_group`."""
    compare = getattr(environment, "score_group", None)
    if compare is None:
        return group
    scored = await compare(group)
    whose = f"score_group of {type(environment).__name__}"
    if not isinstance(scored, Group) or scored.id != group.id or scored.task != group.task:
        raise DataError(f"{whose} must return the group it was given, with other rewards")
    if len(scored.trajectories) != len(group.trajectories):
        raise DataError(f"{whose} returned {len(scored.trajectories)} of {len(group.trajectories)} trajectories")
    for before, after in zip(group.trajectories, scored.trajectories, strict=True):
        _refuse_other_tokens(whose, before, after)
    return scored


def _refuse_other_tokens(whose: str, before: Trajectory, after: Trajectory) -> None:
    """A comparison may set rewards, metrics and per-token advantages; what was sampled stays what was sampled."""
    same = len(before.segments) == len(after.segments) and before.policies == after.policies
    same = same and all(
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.mask, other.mask)
        and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(before.segments, after.segments, strict=False)
    )
    if not same:
        raise DataError(f"{whose} changed tokens, masks, log-probabilities or policies; it may change rewards only")
    if len(after.rewards) != len(before.rewards) or not all(abs(reward) <= MAX_REWARD for reward in after.rewards):
        raise DataError(f"{whose} gave the rewards {after.rewards}; expected {len(before.rewards)} finite numbers")
    for segment in after.segments:
        if segment.advantages is not None and not np.isfinite(segment.advantages).all():
            raise DataError(f"{whose} gave per-token advantages that are not finite")
