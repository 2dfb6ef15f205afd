"""Trains on a text environment from one manifest (or the beginning) on: rollout, state and trainer in this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tinker_atropos.config import Config
from tinker_atropos.errors import EpisodesFailed, FilteredOut
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry
from tinker_atropos.rollout.collect import Bounds, Collector, Discarded
from tinker_atropos.rollout.evaluate import evaluate
from tinker_atropos.rollout.group import GroupPlan
from tinker_atropos.rollout.plan import group_plan, least_context
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.records import discarded_record, group_record, trajectory_record
from tinker_atropos.rollout.schedule import TaskStream
from tinker_atropos.run_folder import Manifest, RunFolder, latest_manifest
from tinker_atropos.state import Leased, MemoryState
from tinker_atropos.step_metrics import step_metrics
from tinker_atropos.supervise import Stopped, Supervisor
from tinker_atropos.terminal import resume_command
from tinker_atropos.trainer import Checkpoint, RunSpec, Trainer, Update
from tinker_atropos.trajectory import Batch, Group, PolicyRef

log = logging.getLogger(__name__)


class TextTraining:
    """One attempt, with one trainer and one lineage. `step` counts the optimiser steps that its weights have taken."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        folder: RunFolder,
        environment: Any,
        test_tasks: int,
        tokenizer: Any,
        registry: Registry,
        stop: asyncio.Event,
    ) -> None:
        self.config, self.progress, self.folder = config, progress, folder
        self.environment, self.test_tasks, self.registry = environment, test_tasks, registry
        self.tokenizer = tokenizer
        self.manifest = latest_manifest(folder, say=progress.say)
        self.lineage = folder.next_lineage(self.manifest)
        self.step = self.manifest.step if self.manifest else 0
        self.consumed: list[str] = []
        self.supervisor = Supervisor(stop, progress.say, self._where)
        self.tally: Callable[[], str] | None = None
        # What may wait: as much as staleness allows, and the batch that is being trained on.
        self.state = MemoryState[Group](cap=(config.max_staleness + 2) * config.groups_per_batch)
        self.trainer: Trainer = config.trainer_spec.make(config.trainer)
        self.pool = PolicyPool(
            lambda ref: config.trainer_spec.open_policy(ref, config.trainer),
            lambda ref: self.trainer.release(ref),
        )
        self.line_written = time.monotonic()

    async def go(self) -> Checkpoint:
        """Train to the last step; return its checkpoint."""
        self.folder.rewind(self.step if self.manifest else -1, self.lineage - 1)
        with self.supervisor.watching():
            try:
                first = await self._awaiting(self._start(), "starting the trainer")
                await self._awaiting(self._open(first), "opening the first policy")
                return await self._train(first)
            finally:
                self.supervisor.enter("closing the trainer")
                await self.trainer.close()

    async def _start(self) -> PolicyRef:
        config, manifest = self.config, self.manifest
        if manifest is not None:
            self.progress.say(f"continuing {config.name} from step {manifest.step}")
        spec = RunSpec(
            name=config.name,
            folder=self.folder.path,
            config=config.trainer,
            model=config.model,
            seed=config.run.seed,
            deterministic=config.run.deterministic,
            lineage=self.lineage,
            say=self.progress.say,
        )
        return await self.trainer.start(spec, manifest.checkpoint if manifest else None)

    async def _open(self, first: PolicyRef) -> None:
        """Open the first policy, and learn from it how groups are to be rolled out."""
        config = self.config
        await self.pool.adopt(first)
        async with self.pool.use() as policy:
            if self.tokenizer is None:
                self.tokenizer = await asyncio.to_thread(policy.tokenizer)
            context = least_context(policy.context_length, config.env.max_token_length)
        self.plan: GroupPlan = group_plan(config, self.environment, context)
        self.eval_plan: GroupPlan = group_plan(config, self.environment, context, evaluation=True)

    async def _train(self, first: PolicyRef) -> Checkpoint:
        config = self.config
        cursor = dict(self.manifest.cursor) if self.manifest else None
        stream = TaskStream("train", self.environment.tasks("train"), config.run.seed, cursor)
        collector = self._collector(stream)
        self.tally = collector.tally
        if self.manifest is None:
            metrics = await self._evaluate(previews=True)
            self.folder.append_metrics({"step": 0, "time": time.time(), **metrics})
        await self.state.publish(first)
        self.supervisor.depend_on(asyncio.create_task(collector.run()), asyncio.create_task(self._follow(collector)))
        try:
            checkpoint = await self._steps(collector, stream)
        finally:
            await self.supervisor.end_background()
            await self._leave_unfinished(collector)
        return checkpoint

    def _collector(self, stream: TaskStream) -> Collector:
        config = self.config
        bounds = Bounds(
            groups_per_batch=config.groups_per_batch,
            total_steps=config.env.total_steps,
            max_staleness=config.max_staleness,
            max_in_flight=config.env.max_num_workers if config.env.max_num_workers > 0 else None,
            filter_equal=config.env.ensure_scores_are_not_same,
            max_filtered_groups=config.rollout.max_filtered_groups,
            max_failed_groups=config.rollout.max_failed_groups,
        )
        return Collector(
            self.environment,
            self.pool,
            self.state,
            stream,
            self.plan,
            bounds,
            tokenizer=self.tokenizer,
            seed=config.run.seed,
            lineage=self.lineage,
            first_step=self.step,
            on_group=lambda group: self._notify("on_group", group=group),
        )

    async def _follow(self, collector: Collector) -> None:
        async for ref in self.state.watch():
            await self.pool.adopt(ref)
            collector.policy_changed()

    async def _steps(self, collector: Collector, stream: TaskStream) -> Checkpoint:
        config, manifest = self.config, self.manifest
        fence = await self.state.fence()
        total, interval = config.env.total_steps, config.trainer.save_checkpoint_interval
        checkpoint = manifest.checkpoint if manifest else None
        self.line_written = time.monotonic()
        while self.step < total:
            try:
                groups, waited = await self._next_groups(collector, fence)
            except (Stopped, FilteredOut, EpisodesFailed):
                if self.consumed:
                    await self._save(stream, final=False)
                raise
            await self._one_step(collector, groups, waited, fence)
            last = self.step >= total
            if last or self.supervisor.stopping or (interval and self.step % interval == 0):
                checkpoint = await self._save(stream, final=last)
            if self.supervisor.stopping and not last:
                raise self._stopped()
        if checkpoint is None or (manifest is not None and manifest.step == self.step and not manifest.finished):
            self.consumed = list(manifest.consumed) if manifest else []
            checkpoint = await self._save(stream, final=True)
        return checkpoint

    async def _next_groups(self, collector: Collector, fence: int) -> tuple[tuple[Group, ...], float]:
        began = time.monotonic()
        groups = await self._awaiting(self._batch(collector, fence), "waiting for groups from the environment")
        return groups, time.monotonic() - began

    async def _one_step(self, collector: Collector, groups: tuple[Group, ...], waited: float, fence: int) -> None:
        """Train on the groups of one step; write what it used, then its line of metrics."""
        config = self.config
        began = time.monotonic()
        self.supervisor.enter("training")
        update = await self.trainer.update(Batch(self.step, groups))  # never cancelled: it may have been charged for
        trained = time.monotonic() - began
        self.step = update.ref.step
        for group in groups:
            collector.consumed(group)
            self.consumed.append(group.id)
        await self.state.commit([group.id for group in groups], fence)
        discarded = collector.take_discarded()
        await asyncio.to_thread(self._write_rollouts, groups, discarded, update)
        collector.recorded(discarded)
        await self.state.publish(update.ref)
        evaluation: dict[str, float] = {}
        last = self.step >= config.env.total_steps
        due = config.env.steps_per_eval and self.step % config.env.steps_per_eval == 0
        if last or (due and not self.supervisor.stopping):
            try:
                evaluation = await self._evaluate(previews=last)
            except (Stopped, EpisodesFailed) as error:  # the step itself is done, and is kept
                self.progress.say(f"no evaluation at step {self.step}: {error}")
        now = time.monotonic()
        metrics = step_metrics(
            self.step,
            groups,
            discarded,
            collector.take_failures(),
            update.metrics,
            waited=waited,
            trained=trained,
            took=now - self.line_written,
        )
        self.line_written = now
        metrics |= evaluation
        self.folder.append_metrics(metrics)
        self._notify("on_metrics", step=self.step, metrics=metrics)
        self.progress.step(metrics, config.env.total_steps)
        if config.rollout.show_every and self.step % config.rollout.show_every == 0:
            group = groups[0]
            self.progress.rollout(f"step {self.step}, task {group.task.index}", group.trajectories[0])

    async def _batch(self, collector: Collector, fence: int) -> tuple[Group, ...]:
        """Return the groups of the next step, none staler than allowed, in the order of their tasks."""
        wanted, groups = self.config.groups_per_batch, list[Group]()
        while len(groups) < wanted:
            for leased in await self.state.lease(wanted - len(groups), fence):
                reason = self._unfit(leased)
                if reason:
                    await self.state.discard(leased.group.id, reason)
                    collector.discard(leased.group, reason)
                else:
                    groups.append(leased.group)
        collector.taken(len(groups))
        return tuple(sorted(groups, key=lambda group: collector.ordinals[group.id]))

    def _unfit(self, leased: Leased[Group]) -> str:
        if self.step - leased.group.oldest_step > self.config.max_staleness:
            return "stale"
        refs = [ref for trajectory in leased.group.trajectories for ref in trajectory.policies]
        if any(ref.lineage != self.lineage for ref in refs):
            return "dead_policy"
        return ""

    def _write_rollouts(self, groups: Sequence[Group], discarded: Sequence[Discarded], update: Update) -> None:
        trained = [
            group_record(group, outcome="trained", step=self.step, advantages=update.advantages[place])
            for place, group in enumerate(groups)
        ]
        self.folder.write_rollouts(self.step, [*trained, *(discarded_record(ended, self.step) for ended in discarded)])

    async def _leave_unfinished(self, collector: Collector) -> None:
        """Record what ended after the last step, trained on or not; these tasks are given out again on a resume."""
        left = [
            group_record(group, outcome="discarded", step=self.step, reason="stopped")
            for group in await self.state.pending()
            if group.id in collector.ordinals
        ]
        left += [discarded_record(ended, self.step) for ended in collector.take_discarded()]
        if left:
            self.folder.write_unfinished(self.lineage, left)

    async def _evaluate(self, *, previews: bool) -> dict[str, float]:
        """Evaluate if evaluations are on, and show the first test tasks; returns the metrics of the evaluation."""
        config, step = self.config, self.step
        shown = min(config.run.previews, self.test_tasks) if previews else 0
        tasks = self.test_tasks if config.env.steps_per_eval else shown
        if not tasks:
            return {}
        began = time.monotonic()

        async def work() -> Any:
            async with self.pool.use(step) as policy:
                return await evaluate(
                    self.environment,
                    policy,
                    self.tokenizer,
                    self.eval_plan,
                    tasks=tasks,
                    in_flight=config.openai.num_requests_for_eval or max(16, config.env.batch_size),
                    seed=config.run.seed,
                )

        evaluation = await self._awaiting(work(), f"evaluating {tasks} test tasks")
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

    async def _save(self, stream: TaskStream, *, final: bool) -> Checkpoint:
        self.supervisor.enter("saving a checkpoint")
        name = "final" if final else f"step-{self.step:06d}"
        if self.lineage and not final:
            name += f"-r{self.lineage}"
        checkpoint = await self.trainer.save(name)
        manifest = Manifest(
            run=self.config.name,
            lineage=self.lineage,
            step=self.step,
            checkpoint=checkpoint,
            consumed=tuple(self.consumed),
            cursor=stream.cursor(),
            finished=final,
        )
        await asyncio.to_thread(self.folder.write_manifest, manifest)
        self.consumed = []
        self._notify("on_checkpoint", manifest=manifest.as_dict())
        return checkpoint

    def _notify(self, hook: str, **values: Any) -> None:
        """Call the listeners; one that fails is named and harms nobody else."""
        try:
            getattr(self.registry.hooks, hook)(**values)
        except Exception as error:
            log.exception("a listener of %s failed", hook)
            self.progress.say(f"a plugin's {hook} failed: {type(error).__name__}: {error}")

    async def _awaiting(self, work: Any, stage: str) -> Any:
        try:
            return await self.supervisor.awaiting(work, stage)
        except Stopped:
            raise self._stopped() from None

    def _where(self) -> str:
        return f"step {self.step}" if self.tally is None else f"step {self.step}; {self.tally()}"

    def _stopped(self) -> Stopped:
        if not self.folder.begun():
            return Stopped("stopped before anything was done, as asked; the same command begins again")
        return Stopped(
            f"stopped at step {self.step} of {self.config.env.total_steps}, as asked; continue with "
            f"`{resume_command(self.config)}`"
        )
