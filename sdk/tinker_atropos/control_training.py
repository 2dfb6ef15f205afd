"""Trains on a control environment from one manifest (or the beginning) on: simulations, collection and trainer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinker_atropos.attempt import Attempt
from tinker_atropos.config import Config
from tinker_atropos.control import ControlBatch, ControlPolicy, ControlSpaces, ControlTrainer, ControlUpdate
from tinker_atropos.control_metrics import control_metrics
from tinker_atropos.control_state import ControlState, prune_states, read_state, state_file, write_state
from tinker_atropos.errors import TinkerAtroposError
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry
from tinker_atropos.rollout.control import ControlCollector
from tinker_atropos.rollout.control_plan import control_plan, with_envs
from tinker_atropos.rollout.evaluate_control import ControlEvaluation, evaluate_control
from tinker_atropos.rollout.fragments import Actor, Broken, Lane
from tinker_atropos.rollout.pictures import can_render, picture_sheet
from tinker_atropos.rollout.schedule import derive_seed
from tinker_atropos.rollout.shards import made, open_shard
from tinker_atropos.rollout.simulations import Shape, check_spaces, is_resumable
from tinker_atropos.run_folder import RunFolder, write_atomically
from tinker_atropos.supervise import Stopped
from tinker_atropos.trainer import Checkpoint

log = logging.getLogger(__name__)

PACKAGES = {"PIL": "pillow"}  # modules that are called otherwise than their package


@dataclass(frozen=True, slots=True)
class Probed:
    """What one simulation, made before anything was started, showed of its kind."""

    spaces: ControlSpaces
    resumable: bool


def probe(config: Config) -> Probed:
    """Make one simulation and look at it; raises `PluginError` for one that the rollout can't drive. Blocking."""
    name = config.environment_spec.name
    environment = made(_make(config, 1), name)
    try:
        return Probed(check_spaces(environment, name, _task(config)), is_resumable(environment))
    finally:
        environment.close()


def _make(config: Config, num_envs: int, **changes: Any) -> Callable[[], Any]:
    """Return what makes simulations; it holds the plugin's function and settings, and nothing that can't be sent."""
    make, settings = config.environment_spec.make, with_envs(config.environment, num_envs, **changes)
    return partial(make, settings)


def _task(config: Config) -> str:
    """Return what names the task: the environment, with the id where it serves several."""
    which = getattr(config.environment, "id", None)
    return config.environment_spec.name if which is None else f"{config.environment_spec.name}:{which}"


class ControlTraining:
    """One attempt, with one trainer and one lineage. `step` counts the updates that its weights have taken."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        folder: RunFolder,
        probed: Probed,
        registry: Registry,
        stop: asyncio.Event,
    ) -> None:
        self.config, self.progress, self.folder = config, progress, folder
        self.plan, self.spaces = control_plan(config), probed.spaces
        self.attempt = Attempt(config, progress, folder, registry, stop, total=self.plan.total_updates)
        self.exact = probed.resumable and self.plan.schedule == "sync"
        self.env_steps = 0
        self.actor = Actor(self.spaces, threading.Lock())
        loop = asyncio.get_running_loop()
        self.say: Callable[[str], None] = lambda text: _call(loop, progress.say, text)  # from the collector's thread
        self.broken = Broken(self.say, config.rollout.max_broken_episodes, self.spaces.task)
        self.broken_before = 0
        self.line_written = time.monotonic()

    @property
    def step(self) -> int:
        """How many updates the weights have taken."""
        return self.attempt.step

    async def go(self) -> Checkpoint:
        """Train to the last update; return its checkpoint."""
        spec, manifest = self.attempt.begin(), self.attempt.manifest
        trainer: ControlTrainer = self.config.trainer_spec.make(self.config.trainer)
        collector: ControlCollector | None = None
        with self.attempt.supervisor.watching():
            try:
                starting = trainer.start(spec, self.spaces, manifest.checkpoint if manifest else None)
                first = await self.attempt.awaiting(starting, "starting the trainer")
                self.attempt.supervisor.enter("making the simulations")
                collector = await asyncio.to_thread(self._collector)
                await self._open(collector)
                return await self._updates(trainer, collector, first)
            finally:
                if collector is not None:
                    await asyncio.to_thread(collector.close)
                await trainer.close()

    def _collector(self) -> ControlCollector:
        config, plan = self.config, self.plan
        shape = Shape.of(self.spaces, plan.envs_per_shard)
        make, name = _make(config, plan.envs_per_shard), config.environment_spec.name
        patience = config.rollout.step_timeout
        lanes: list[Lane] = []
        try:
            for index in range(plan.shards):
                shard = open_shard(plan.workers, make, name, shape, answer_seconds=patience)
                lanes.append(Lane(index, shard, shape, self.actor, self.broken, plan.steps))
        except BaseException:
            for lane in lanes:
                lane.shard.close()
            raise
        return ControlCollector(
            lanes, plan.pace, seed=config.run.seed, lineage=self.attempt.lineage, first_update=self.step, say=self.say
        )

    async def _open(self, collector: ControlCollector) -> None:
        state = ControlState(0, 0, None)
        if self.attempt.manifest is not None:
            state = await asyncio.to_thread(read_state, state_file(self.folder.path, self.step))
            if state.lanes is None or not self.exact:
                why = self._not_kept() or state.missing or "the checkpoint was saved without it"
                self.progress.say(f"episodes begin anew: their state is not kept ({why})")
        self.env_steps = state.env_steps
        self.broken.count = self.broken_before = state.broken
        await asyncio.to_thread(collector.open, state.lanes if self.exact else None, state.ordinal)

    def _not_kept(self) -> str:
        """Return why this run keeps no state of its episodes; empty if it does."""
        if self.exact:
            return ""
        return "schedule=async" if self.plan.schedule != "sync" else "the environment has no snapshot()"

    async def _updates(self, trainer: ControlTrainer, collector: ControlCollector, first: ControlUpdate) -> Checkpoint:
        attempt, total = self.attempt, self.plan.total_updates
        checkpoint = self.attempt.manifest.checkpoint if self.attempt.manifest else None
        if self.step < total:
            collector.publish(first.policy)
        self.line_written = time.monotonic()
        while self.step < total:
            began = time.monotonic()
            self.attempt.supervisor.enter("waiting for steps of the simulations")
            fragments = await collector.batch(self.step)
            waited = time.monotonic() - began
            self.attempt.supervisor.enter("training")
            update = await trainer.update(ControlBatch(self.step, fragments))
            trained = time.monotonic() - began - waited
            attempt.step = update.ref.step
            self.env_steps += sum(fragment.steps for fragment in fragments)
            attempt.consumed += [fragment.id for fragment in fragments]
            last = self.step >= total
            if self.plan.schedule == "async" and not last:
                collector.publish(update.policy)
            metrics = self._metrics(collector, fragments, update, waited, trained)
            collector.release(fragments)
            if self._evaluation_due(last):
                with suppress(Stopped):  # the update itself is done, and is kept
                    metrics |= await self._evaluate(update.policy, pictures=last)
            self.folder.append_metrics(metrics)
            self.attempt.notify("on_metrics", step=self.step, metrics=metrics)
            self.progress.step(metrics, total)
            if attempt.due(last=last):
                checkpoint = await self._save(trainer, collector, final=last)
            if self.attempt.supervisor.stopping and not last:
                raise self.attempt.stopped()
            if self.plan.schedule == "sync" and not last:
                collector.publish(update.policy)
        if checkpoint is None or attempt.unfinished:
            attempt.consumed = list(attempt.manifest.consumed) if attempt.manifest else []
            checkpoint = await self._save(trainer, collector, final=True)
        return checkpoint

    def _metrics(
        self, collector: ControlCollector, fragments: Any, update: ControlUpdate, waited: float, trained: float
    ) -> dict[str, float]:
        now = time.monotonic()
        counts = collector.take_counts()
        counts.broken, self.broken_before = self.broken.count - self.broken_before, self.broken.count
        wall, self.line_written = now - self.line_written, now
        return control_metrics(
            self.step, self.env_steps, fragments, counts, update.metrics, waited=waited, trained=trained, wall=wall
        )

    def _evaluation_due(self, last: bool) -> bool:
        every = self.config.env.steps_per_eval
        return bool(every) and (last or (self.step % every == 0 and not self.attempt.supervisor.stopping))

    async def _evaluate(self, policy: ControlPolicy, *, pictures: bool) -> dict[str, float]:
        """Evaluate on simulations of its own; at the end leave pictures of an episode too."""
        episodes, began = self.config.rollout.eval_episodes, time.monotonic()
        evaluation = await self._unless_stopped(
            lambda stop: self._play(policy, episodes, stop), f"evaluating {episodes} episodes"
        )
        assert evaluation is not None, "it is None where a stop was asked for, which has raised"
        records = [
            {"episode": index, "step": self.step, "return": total, "length": length}
            for index, (total, length) in enumerate(evaluation.episodes)
        ]
        await asyncio.to_thread(self.folder.write_evaluation, self.step, records)
        if pictures:
            await self._unless_stopped(lambda stop: self._pictures(policy, stop), "drawing pictures of an episode")
        return {**evaluation.metrics(), "time/evaluation": time.monotonic() - began}

    async def _unless_stopped(self, work: Callable[[threading.Event], Any], stage: str) -> Any:
        """Run work in a thread; where the user asks the run to stop, tell it by the event."""
        stop = threading.Event()
        try:
            return await self.attempt.awaiting(asyncio.to_thread(work, stop), stage)
        finally:
            stop.set()

    def _play(self, policy: ControlPolicy, episodes: int, stop: threading.Event) -> ControlEvaluation | None:
        name, n = self.config.environment_spec.name, min(episodes, self.plan.num_envs)
        environment = made(_make(self.config, n), name)
        try:
            return evaluate_control(
                environment,
                name,
                policy,
                self.actor,
                Shape.of(self.spaces, n),
                episodes=episodes,
                seed=derive_seed(self.config.run.seed, "evaluation"),
                stop=stop,
            )
        finally:
            environment.close()

    def _pictures(self, policy: ControlPolicy, stop: threading.Event) -> None:
        """Write the sheet, or say why there is none: pictures are no reason to fail a run."""
        config, name = self.config, self.config.environment_spec.name
        if not can_render(config.environment):
            self.say(f"no picture sheet: environment {name!r} has no setting render_mode")
            return
        try:
            environment = made(_make(config, 1, render_mode="rgb_array"), name)
            try:
                sheet = picture_sheet(
                    environment,
                    self.spaces.task,
                    policy,
                    self.actor,
                    Shape.of(self.spaces, 1),
                    seed=derive_seed(config.run.seed, "evaluation"),
                    stop=stop,
                )
            finally:
                environment.close()
        except ImportError as error:
            self.say(f"no picture sheet: {error}; `pip install {PACKAGES.get(error.name or 'PIL', error.name)}`")
            return
        except TinkerAtroposError as error:
            self.say(f"no picture sheet: {error}")
            return
        except Exception as error:
            log.warning("no picture sheet", exc_info=True)
            self.say(f"no picture sheet: rendering failed: {type(error).__name__}: {error}")
            return
        path = self.folder.path / "evaluations" / f"step-{self.step:06d}.png"
        write_atomically(path, sheet)
        self.say(f"pictures of an episode: {path}")

    async def _save(self, trainer: ControlTrainer, collector: ControlCollector, *, final: bool) -> Checkpoint:
        async def beside() -> None:
            lanes, missing = None, self._not_kept()
            if not missing:
                lanes = await asyncio.to_thread(collector.snapshot)
                if lanes is None:
                    missing = "a worker process was lost when the checkpoint was saved"
                    self.progress.say(f"the checkpoint holds no episodes, as {missing}; a --resume begins them anew")
            state = ControlState(self.env_steps, collector.ordinal, lanes, missing, self.broken.count)
            await asyncio.to_thread(write_state, state_file(self.folder.path, self.step), state)

        cursor = {"next": collector.ordinal, "open": []}
        checkpoint = await self.attempt.save(trainer, cursor, final=final, beside=beside)
        try:
            await asyncio.to_thread(prune_states, self.folder)
        except OSError as error:  # the disk may fill, but what is saved is saved
            self.progress.say(f"an old state of the simulations could not be removed: {error}")
        return checkpoint


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[str], None], text: str) -> None:
    """Call a function in the loop's thread."""
    with suppress(RuntimeError):  # the loop is closed: nobody reads on
        loop.call_soon_threadsafe(function, text)
