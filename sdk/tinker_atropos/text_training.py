"""Trains on groups of text from one manifest (or the beginning) on: their source, the state, and the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tinker_atropos.attempt import Attempt
from tinker_atropos.config import Config
from tinker_atropos.environment_state import state_file
from tinker_atropos.errors import EpisodesFailed, FilteredOut, UpdateUncertain
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.production import Production, SourceContext
from tinker_atropos.rollout.records import discarded_record, group_record, trajectory_record
from tinker_atropos.rollout.source import Discarded, GroupSource
from tinker_atropos.run_folder import RunFolder
from tinker_atropos.state import Leased, State
from tinker_atropos.step_metrics import step_metrics
from tinker_atropos.supervise import Stopped
from tinker_atropos.trainer import Checkpoint, Trainer, Update
from tinker_atropos.trajectory import Batch, Group, PolicyRef


class TextTraining:
    """One attempt, with one trainer and one lineage."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        folder: RunFolder,
        production: Production,
        state: State[Group],
        registry: Registry,
        stop: asyncio.Event,
    ) -> None:
        self.config, self.progress, self.folder = config, progress, folder
        self.production, self.state = production, state
        self.attempt = Attempt(config, progress, folder, registry, stop, total=config.env.total_steps)
        # How many groups may be leased at a time: beyond, nothing new could be put, and the run would wait for ever.
        self.most_held = min(production.cap(), getattr(state, "cap", production.cap())) - config.env.batch_size
        self.trainer: Trainer = config.trainer_spec.make(config.trainer)
        self.pool = PolicyPool(
            lambda ref: config.trainer_spec.open_policy(ref, config.trainer),
            lambda ref: self.trainer.release(ref),
        )
        self.line_written = time.monotonic()

    @property
    def step(self) -> int:
        """How many optimiser steps the weights have taken."""
        return self.attempt.step

    async def go(self) -> Checkpoint:
        """Train to the last step; return its checkpoint."""
        attempt = self.attempt
        spec, manifest = attempt.begin(), attempt.manifest
        with attempt.supervisor.watching():
            try:
                starting = self.trainer.start(spec, manifest.checkpoint if manifest else None)
                first = await attempt.awaiting(starting, "starting the trainer")
                await attempt.awaiting(self._open(first), "opening the first policy")
                return await self._train(first)
            finally:
                attempt.supervisor.enter("closing the trainer")
                await self.trainer.close()

    async def _open(self, first: PolicyRef) -> None:
        manifest = self.attempt.manifest
        await self.production.learned.read(None if manifest is None else state_file(self.folder.path, manifest.step))
        await self.pool.adopt(first)
        await self.production.open(self.pool)

    async def _train(self, first: PolicyRef) -> Checkpoint:
        attempt = self.attempt
        fence = await attempt.awaiting(self._take_over(), "taking over the state")
        source = self.production.source(
            SourceContext(
                pool=self.pool,
                state=self.state,
                folder=self.folder.path,
                lineage=attempt.lineage,
                first_step=self.step,
                cursor=attempt.cursor,
                left=self.left,
                on_group=lambda group: attempt.notify("on_group", group=group),
                say=self.progress.say,
            )
        )
        attempt.tally = source.tally
        if attempt.manifest is None:
            metrics = await self._evaluate(previews=True)
            self.folder.append_metrics({"step": 0, "time": time.time(), **metrics})
        await self.state.publish(first)
        attempt.supervisor.depend_on(asyncio.create_task(source.run()), asyncio.create_task(self._follow(source)))
        ends = not (self.production.lasting and self.state.durable)
        try:
            return await self._steps(source, fence)
        except UpdateUncertain:
            ends = not self.production.lasting  # the next attempt has the same state
            raise
        finally:
            await attempt.supervisor.end_background()
            if ends:
                await self._leave_unfinished(source)

    async def _take_over(self) -> int:
        """Begin an epoch: what the newest manifest counts is gone, all else waits again, or is made anew."""
        fence = await self.state.fence()
        manifest = self.attempt.manifest
        if manifest is not None:
            await self.state.commit(manifest.consumed, fence)
            for id, reason in manifest.discarded.items():
                await self.state.discard(id, reason)
        await self.state.rewind(fence)
        self.left = tuple(await self.state.pending())
        if not self.production.lasting:
            for group in self.left:
                await self.state.discard(group.id, "made anew")
        return fence

    async def _follow(self, source: GroupSource) -> None:
        async for ref in self.state.watch():
            await self.pool.adopt(ref)
            source.policy_changed()

    async def _steps(self, source: GroupSource, fence: int) -> Checkpoint:
        attempt, total = self.attempt, self.attempt.total
        checkpoint = attempt.manifest.checkpoint if attempt.manifest else None
        self.line_written = time.monotonic()
        while self.step < total:
            try:
                groups, waited = await self._next_groups(source, fence)
            except (Stopped, FilteredOut, EpisodesFailed):
                if attempt.consumed or attempt.discarded:
                    await self._save(source, fence, final=False)
                raise
            await self._one_step(source, groups, waited, fence)
            last = self.step >= total
            if attempt.due(last=last):
                checkpoint = await self._save(source, fence, final=last)
            if attempt.supervisor.stopping and not last:
                raise attempt.stopped()
        if checkpoint is None or attempt.unfinished:
            attempt.consumed = list(attempt.manifest.consumed) if attempt.manifest else []
            checkpoint = await self._save(source, fence, final=True)
        return checkpoint

    async def _next_groups(self, source: GroupSource, fence: int) -> tuple[tuple[Group, ...], float]:
        began = time.monotonic()
        waiting = self._batch(source, fence)
        groups = await self.attempt.awaiting(waiting, "waiting for groups from the environment")
        return groups, time.monotonic() - began

    async def _one_step(self, source: GroupSource, groups: tuple[Group, ...], waited: float, fence: int) -> None:
        """Train on the groups of one step; write what it used, then its line of metrics."""
        config, attempt = self.config, self.attempt
        began = time.monotonic()
        attempt.supervisor.enter("training")
        update = await self.trainer.update(Batch(self.step, groups))  # never cancelled: it may have been charged for
        trained = time.monotonic() - began
        attempt.step = update.ref.step
        ordinals = [source.ordinal(group.id) for group in groups]
        for group in groups:
            source.consumed(group)
            attempt.consumed.append(group.id)
        if not self.production.lasting:
            await self.state.commit([group.id for group in groups], fence)
        discarded = source.take_discarded()
        await asyncio.to_thread(self._write_rollouts, groups, ordinals, discarded, update)
        source.recorded(discarded)
        self.production.learned.ended(_in_order(groups, ordinals, discarded))
        await self.state.publish(update.ref)
        evaluation: dict[str, float] = {}
        last = self.step >= config.env.total_steps
        due = config.env.steps_per_eval and self.step % config.env.steps_per_eval == 0
        if last or (due and not attempt.supervisor.stopping):
            try:
                evaluation = await self._evaluate(previews=last)
            except (Stopped, EpisodesFailed) as error:  # the step itself is done, and is kept
                self.progress.say(f"no evaluation at step {self.step}: {error}")
        now = time.monotonic()
        metrics = step_metrics(
            self.step,
            groups,
            discarded,
            source.take_failures(),
            {**source.take_metrics(), **update.metrics},
            waited=waited,
            trained=trained,
            took=now - self.line_written,
        )
        self.line_written = now
        metrics |= evaluation
        self.folder.append_metrics(metrics)
        attempt.notify("on_metrics", step=self.step, metrics=metrics)
        self.progress.step(metrics, config.env.total_steps)
        if config.rollout.show_every and self.step % config.rollout.show_every == 0:
            group = groups[0]
            self.progress.rollout(f"step {self.step}, task {group.task.index}", group.trajectories[0])

    async def _batch(self, source: GroupSource, fence: int) -> tuple[Group, ...]:
        """Return the groups of the next step, none staler than allowed, in the run's order."""
        groups: list[Group] = []
        while wanted := source.wanted(groups):
            await self._relieve(source, fence, len(groups))
            for leased in await self.state.lease(wanted, fence):
                reason = self._unfit(leased) or source.unfit(leased.group)
                if not reason:
                    groups.append(leased.group)
                    continue
                if self.production.lasting:
                    self.attempt.discarded[leased.group.id] = reason
                else:
                    await self.state.discard(leased.group.id, reason)
                source.discard(leased.group, reason)
        source.taken(groups)
        return tuple(sorted(groups, key=lambda group: source.ordinal(group.id)))

    async def _relieve(self, source: GroupSource, fence: int, in_hand: int) -> None:
        """Write a manifest before its time where what it would count fills the state."""
        held = len(self.attempt.consumed) + len(self.attempt.discarded)
        if self.production.lasting and held and held + in_hand >= self.most_held:
            await self._save(source, fence, final=False)

    def _unfit(self, leased: Leased[Group]) -> str:
        refs = [ref for trajectory in leased.group.trajectories for ref in trajectory.policies]
        if not all(self.attempt.alive(ref) for ref in refs):
            return "dead_policy"
        if refs and self.step - leased.group.oldest_step > self.config.max_staleness:
            return "stale"
        return ""

    async def _save(self, source: GroupSource, fence: int, *, final: bool) -> Checkpoint:
        """Save a checkpoint; then the state may forget what its manifest counts."""
        consumed, discarded = list(self.attempt.consumed), dict(self.attempt.discarded)
        learned, path = self.production.learned, state_file(self.folder.path, self.step)

        async def beside() -> None:
            await learned.write(path)

        checkpoint = await self.attempt.save(
            self.trainer, source.cursor(), final=final, beside=beside if learned.lasts else None
        )
        if self.production.lasting:
            await self.state.commit(consumed, fence)
            for id, reason in discarded.items():
                await self.state.discard(id, reason)
        return checkpoint

    def _write_rollouts(
        self, groups: Sequence[Group], ordinals: Sequence[int], discarded: Sequence[Discarded], update: Update
    ) -> None:
        trained = [
            group_record(
                group,
                outcome="trained",
                step=self.step,
                ordinal=ordinals[place],
                advantages=update.advantages[place],
            )
            for place, group in enumerate(groups)
        ]
        self.folder.write_rollouts(self.step, [*trained, *(discarded_record(ended, self.step) for ended in discarded)])

    async def _leave_unfinished(self, source: GroupSource) -> None:
        """Record what ends with the run, trained on or not; it is made anew on a resume."""
        ended = source.take_discarded()
        known = {one.id for one in ended}
        pending = [group for group in await self.state.pending() if group.id not in known]
        left = [discarded_record(one, self.step) for one in (*source.unfinished(pending), *ended)]
        if left:
            self.folder.write_unfinished(self.attempt.lineage, left)

    async def _evaluate(self, *, previews: bool) -> dict[str, float]:
        """Evaluate if evaluations are on, and show the first test tasks; returns the metrics of the evaluation."""
        config, step, test_tasks = self.config, self.step, self.production.test_tasks
        shown = min(config.run.previews, test_tasks) if previews else 0
        tasks = test_tasks if config.env.steps_per_eval else shown
        if not tasks:
            return {}
        began = time.monotonic()
        evaluating = self.production.evaluate(self.pool, tasks, step)
        evaluation = await self.attempt.awaiting(evaluating, f"evaluating {tasks} test tasks")
        for index, trajectory in enumerate(evaluation.trajectories[:shown]):
            if trajectory is not None:
                self.progress.rollout(f"test problem {index + 1}, at step {step}", trajectory)
        if not config.env.steps_per_eval:
            return {}
        records = [
            {"task": index, "split": "test", "step": step}
            | ({"failed": True} if trajectory is None else trajectory_record(trajectory))
            for index, trajectory in enumerate(evaluation.trajectories)
        ]
        await asyncio.to_thread(self.folder.write_evaluation, step, records)
        return {**evaluation.metrics(), "time/evaluation": time.monotonic() - began}


def _in_order(groups: Sequence[Group], ordinals: Sequence[int], discarded: Sequence[Discarded]) -> list[Group]:
    """Return the groups that ended with a step, trained on or not, by their place in the run's order."""
    ended = [*zip(ordinals, groups, strict=True), *((one.ordinal, one.group) for one in discarded)]
    return [group for _, group in sorted(ended, key=lambda pair: pair[0]) if group is not None]
