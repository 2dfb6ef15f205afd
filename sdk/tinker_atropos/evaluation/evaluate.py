"""One evaluation, from what was typed to its report: opens the model, plays what is missing, keeps the folder true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_atropos.closing import close_environment
from tinker_atropos.errors import ConfigError, EpisodesFailed
from tinker_atropos.evaluation.endpoint import EndpointClient
from tinker_atropos.evaluation.endpoint_session import stop_fields
from tinker_atropos.evaluation.episodes import Outcome, Plan, play_missing
from tinker_atropos.evaluation.folder import EvaluationFolder, Record
from tinker_atropos.evaluation.meter import Meter
from tinker_atropos.evaluation.players import EndpointPlayer, Player, PolicyPlayer, Sampling
from tinker_atropos.evaluation.report import summary
from tinker_atropos.evaluation.settings import (
    Posed,
    fingerprint,
    identity,
    make_environment,
    most_tokens,
    pass_threshold,
    split_size,
    stops,
)
from tinker_atropos.evaluation.subject import EndpointSubject, PolicySubject, Subject
from tinker_atropos.registry import normal
from tinker_atropos.rollout.episode import EpisodeLimits
from tinker_atropos.rollout.plan import least_context, named_tokenizer
from tinker_atropos.trainer import StoredPolicy
from tinker_atropos.validation import validate

log = logging.getLogger(__name__)

DEFAULT_TASKS = 50


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants: how much, where it is kept, and how it is gone about.

    `tasks` None: fifty, or as many as there are. `extra` goes into each request to an endpoint.
    """

    split: str
    tasks: int | None
    samples: int
    seed: int
    output: Path
    name: str | None
    concurrency: int
    retries: int
    threshold: float | None
    key_variable: str | None
    deterministic: bool
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation gave. `report` None: not one episode is there. `halted`: the user stopped it."""

    report: dict[str, Any] | None
    folder: Path
    outcome: Outcome
    halted: bool


class Evaluator:
    """Holds what an evaluation is made of. The environment is made here, the model is opened by `run`."""

    def __init__(self, posed: Posed, subject: Subject, asked: Asked, say: Callable[[str], None]) -> None:
        self.posed, self.subject, self.asked, self._say = posed, subject, asked, say
        _refuse_idle(posed, subject, asked)
        self.environment = make_environment(posed)
        size = split_size(self.environment, posed, asked.split)
        self.tasks = asked.tasks or DEFAULT_TASKS
        if size is not None and self.tasks > size:
            if asked.tasks is not None:
                say(f"note: split {asked.split!r} has {size} tasks; {size} are asked, not {asked.tasks}")
            self.tasks = size
        if isinstance(subject, EndpointSubject):
            stop_fields(stops(self.environment, posed))  # refuses what it has no form for
        self.threshold = pass_threshold(self.environment, asked.threshold)
        if getattr(self.environment, "score_group", None) is not None:
            say(
                "note: this environment also compares the answers to one task with each other (score_group); here each "
                "is scored by itself"
            )

    @property
    def episodes(self) -> int:
        """How many there are in all."""
        return self.tasks * self.asked.samples

    @property
    def max_tokens(self) -> int | None:
        """Most new tokens of a turn; None: whatever room the model has."""
        return most_tokens(self.environment, self.posed)

    def settings(self) -> dict[str, Any]:
        """Return all that decides what is asked and how."""
        asked, posed = self.asked, self.posed
        settings = identity(
            self.environment,
            posed,
            self.subject.identity(),
            split=asked.split,
            tasks=self.tasks,
            samples=asked.samples,
            seed=asked.seed,
        )
        # Beside the model, since the kinds of models have these each for itself, and a comparison is of models.
        if isinstance(self.subject, EndpointSubject):
            settings["model"]["extra"] = dict(asked.extra)
        else:
            settings["model"] |= {
                "context_overflow": posed.rollout.context_overflow,
                "deterministic": asked.deterministic,
                "max_token_length": posed.env.max_token_length,
                "rendering": self._rendering(),
                "tokenizer": posed.env.tokenizer_name,
            }
        return settings

    def folder(self) -> EvaluationFolder:
        """Return where it is kept: under its name, or one made of its settings, which finds the same ones again."""
        name = self.asked.name
        if name is None:
            label = "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in self.subject.label)
            name = f"{self.posed.spec.name}-{label.strip('-.')[:60]}-{fingerprint(self.settings())}"
        return EvaluationFolder(self.asked.output / name)

    async def first_prompts(self, number: int) -> list[Any]:
        """Return what the first tasks show."""
        plan, shown = self._plan(), []
        for index in range(min(number, self.tasks)):
            episode = await self.environment.episode(plan.task(index))
            try:
                shown.append((await episode.reset()).observation)
            finally:
                await episode.close()
        return shown

    async def run(self, stop: asyncio.Event, meter: Callable[[int, int, float], Meter]) -> Evaluated:
        """Play what is missing and report on all there is. `meter(total, done, rewards)` shows how far it is."""
        try:
            settings, folder = self.settings(), self.folder()
            folder.open(settings)
            try:
                with _logging_to(folder.path / "eval.log"):
                    return await self._in(folder, settings, stop, meter)
            finally:
                folder.close()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the environment, if it can be; a failure of that hides no other."""
        await close_environment(self.environment)

    async def _in(
        self,
        folder: EvaluationFolder,
        settings: Mapping[str, Any],
        stop: asyncio.Event,
        meter: Callable[[int, int, float], Meter],
    ) -> Evaluated:
        known = folder.read_episodes(self._say)
        whole = {key: record for key, record in known.items() if not record.get("failed")}
        outcome = Outcome(whole)
        if len(whole) == self.episodes:
            self._say(f"all {self.episodes} episodes are there already; nothing is asked")
        else:
            if whole:
                self._say(f"continuing: {len(whole)} of {self.episodes} episodes are there already")
            shown = meter(self.episodes, len(whole), sum(record["reward"] for record in whole.values()))
            try:
                outcome = await self._play(folder, known, stop, shown)
            finally:
                shown.close()
        if outcome.records:
            report = summary(
                settings,
                outcome.records.values(),
                threshold=self.threshold,
                failed=outcome.failed,
                given=self.asked.threshold is not None or hasattr(self.environment, "pass_threshold"),
            )
            folder.write_report(report)
            if len(outcome.records) == self.episodes:
                folder.forget_answers()
            return Evaluated(report, folder.path, outcome, outcome.halted)
        if not outcome.halted:
            raise EpisodesFailed(f"all {self.episodes} episodes failed; the last cause: {outcome.last_error}")
        return Evaluated(None, folder.path, outcome, True)

    async def _play(
        self, folder: EvaluationFolder, known: Mapping[tuple[int, int], Record], stop: asyncio.Event, meter: Meter
    ) -> Outcome:
        async with self._player(folder.path, meter.say) as player:
            meter.begin()
            return await play_missing(
                self.environment,
                player,
                self._plan(),
                folder,
                known,
                stop=stop,
                say=meter.say,
                on_record=meter.count,
            )

    def _plan(self) -> Plan:
        rollout = self.posed.rollout
        return Plan(
            split=self.asked.split,
            tasks=self.tasks,
            samples=self.asked.samples,
            seed=self.asked.seed,
            concurrency=min(self.asked.concurrency, self.episodes),
            timeout=rollout.episode_timeout,
            retries=rollout.episode_retries,
        )

    def _sampling(self, context: int | None) -> Sampling:
        rollout = self.posed.rollout
        return Sampling(
            temperature=self.posed.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=stops(self.environment, self.posed),
            limits=EpisodeLimits(
                max_tokens=self.max_tokens,
                max_turns=rollout.max_turns,
                context_length=context,
                context_overflow=rollout.context_overflow,
            ),
            retries=self.asked.retries,
        )

    @asynccontextmanager
    async def _player(self, folder: Path, say: Callable[[str], None]) -> AsyncIterator[Player]:
        if isinstance(self.subject, EndpointSubject):
            async with EndpointClient(
                self.subject,
                key_variable=self.asked.key_variable,
                retries=self.asked.retries,
                timeout=self.posed.rollout.episode_timeout,
                say=say,
            ) as client:
                await client.look()
                yield EndpointPlayer(client, self._sampling(None), self.asked.extra)
            return
        subject, posed = self.subject, self.posed
        wanted = StoredPolicy(
            uri=subject.uri,
            model=subject.model,
            folder=folder / "server" if subject.run is None else subject.run,
            run=subject.label,
            step=subject.step,
            deterministic=self.asked.deterministic,
            say=say,
        )
        async with subject.spec.stored(subject.config, wanted) as policy:
            name = posed.env.tokenizer_name
            tokenizer = await asyncio.to_thread(policy.tokenizer if name is None else lambda: named_tokenizer(name))
            sessions = posed.adapter_spec.make(self._adapter(subject))
            sampling = self._sampling(least_context(policy.context_length, posed.env.max_token_length))
            yield PolicyPlayer(policy, tokenizer, sessions, sampling, say)

    def _adapter(self, subject: PolicySubject) -> Any:
        """Return the adapter's configuration: a run's policy is rendered as the run did, but for what was typed."""
        spec = self.posed.adapter_spec
        values = {**subject.adapter.get(normal(spec.name), {}), **self.posed.adapter}
        return validate(spec.config, values, path=normal(spec.name))

    def _rendering(self) -> dict[str, Any]:
        assert isinstance(self.subject, PolicySubject)
        rendering: dict[str, Any] = self._adapter(self.subject).model_dump(mode="json")
        return rendering


def _refuse_idle(posed: Posed, subject: Subject, asked: Asked) -> None:
    """Raise `ConfigError` for what was typed and has no effect with this kind of model."""
    if not isinstance(subject, EndpointSubject):
        for option, given in (("--key-env", asked.key_variable), ("--body", asked.extra)):
            if given:
                raise ConfigError(f"{option}: is for endpoints, and -m names none; leave it out")
        if asked.deterministic and not getattr(subject.config, "local", False):
            raise ConfigError("--deterministic: the service decides what it samples together; leave it out")
        return
    if asked.deterministic:
        raise ConfigError("--deterministic: an endpoint decides what it samples together; leave it out")
    idle = {f"{normal(posed.adapter_spec.name)}.{key}" for key in posed.adapter}
    idle |= {f"env.{key}" for key in posed.env.model_fields_set}
    if idle:
        raise ConfigError(
            f"--set {', '.join(sorted(idle))}: no effect on an endpoint, which renders prompts itself; leave it out "
            "(--body KEY=VALUE goes into each request)"
        )


def _logging_to(path: Path) -> Any:
    from tinker_atropos.run import logging_to

    return logging_to(path)
