"""One run: joins environment, rollout, state and trainer in this process, and keeps its folder true."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tinker_atropos.config import Config
from tinker_atropos.errors import EpisodesFailed, FilteredOut, RunError, UpdateUncertain
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry, normal
from tinker_atropos.rollout.collect import Bounds, Collector, Discarded
from tinker_atropos.rollout.evaluate import Evaluation, evaluate
from tinker_atropos.rollout.plan import (
    check_environment_splits,
    group_plan,
    least_context,
    load_tokenizer,
    make_environment,
)
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.records import group_record, trajectory_record
from tinker_atropos.rollout.schedule import TaskStream
from tinker_atropos.run_folder import Manifest, RunFolder, latest_manifest
from tinker_atropos.state import Leased, MemoryState
from tinker_atropos.step_metrics import step_metrics
from tinker_atropos.trainer import Checkpoint, RunSpec, Trainer, Update
from tinker_atropos.trajectory import Batch, Group, PolicyRef

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_REWINDS = 3
STALL_SECONDS = 30.0


class Stopped(RunError):
    """The user asked the run to stop; it did, with a checkpoint."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished run leaves: its folder, its last checkpoint, and the evaluations at its ends."""

    folder: Path
    steps: int
    checkpoint: Checkpoint
    first_evaluation: dict[str, float]
    last_evaluation: dict[str, float]


def run(
    config: Config,
    progress: Progress,
    *,
    resume: bool = False,
    registry: Registry | None = None,
    stop: asyncio.Event | None = None,
) -> Coroutine[Any, Any, Finished]:
    """Return the coroutine that trains until `env.total_steps`.

    With `resume` it continues from the newest manifest of the run's folder. When `stop` is set it saves a checkpoint
    after the step under way and raises `Stopped`. Raises a `UserError` before anything was started, a `RunError` after.
    """
    return _run(config, progress, resume, registry or Registry(), stop or asyncio.Event())


async def _run(config: Config, progress: Progress, resume: bool, registry: Registry, stop: asyncio.Event) -> Finished:
    folder = RunFolder(config.folder)
    RunFolder.check_place(config.folder)
    environment = make_environment(config)
    test_tasks = check_environment_splits(environment, config)
    if resume:
        folder.reopen(config.as_dict(), normal(config.trainer_spec.name))
    else:
        folder.create(config.as_dict())
    handler = _log_to(config.folder / "run.log")
    try:
        rewinds, last = 0, -1
        while True:
            attempt = _Attempt(config, progress, folder, environment, test_tasks, registry, stop)
            try:
                return await attempt.go()
            except UpdateUncertain as error:
                manifest = latest_manifest(folder)
                reached = manifest.step if manifest else 0
                rewinds, last = (rewinds + 1 if reached <= last else 1), reached
                if rewinds > MAX_REWINDS:
                    raise
                progress.say(f"{error}. Rewinding to step {reached}, the last manifest (rewind {rewinds})")
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await closing
        folder.close()
        logging.getLogger().removeHandler(handler)
        handler.close()


def _log_to(path: Path) -> logging.Handler:
    """Send our own logs from INFO and everybody's from WARNING to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: record.name.startswith("tinker_atropos") or record.levelno >= logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("tinker_atropos").setLevel(logging.INFO)
    return handler


class _Attempt:
    """The run from one manifest (or the beginning) on, with one trainer and one lineage."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        folder: RunFolder,
        environment: Any,
        test_tasks: int,
        registry: Registry,
        stop: asyncio.Event,
    ) -> None:
        self.config, self.progress, self.folder = config, progress, folder
        self.environment, self.test_tasks, self.registry, self.stop = environment, test_tasks, registry, stop
        self.manifest = latest_manifest(folder)
        self.lineage = folder.next_lineage()
        self.step = self.manifest.step if self.manifest else 0
        self.consumed: list[str] = []
        self.stage = "starting the trainer"
        self.last_progress = time.monotonic()
        self.evaluations: dict[int, dict[str, float]] = {}
        # More than a checkpoint interval's worth, so that a rewind finds all that it gives back.
        interval = config.trainer.save_checkpoint_interval or config.env.total_steps
        self.state = MemoryState(cap=(interval + config.max_staleness + 2) * config.groups_per_batch)

    async def go(self) -> Finished:
        config = self.config
        self.folder.rewind(self.step, self.lineage - 1)
        trainer: Trainer = config.trainer_spec.make(config.trainer)
        watcher = asyncio.create_task(self._watch())
        try:
            first = await self._unless_stopped(self._start(trainer), "starting the trainer")
            return await self._train(trainer, first)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            await trainer.close()

    async def _start(self, trainer: Trainer) -> PolicyRef:
        config, manifest = self.config, self.manifest
        if manifest is not None:
            self.progress.say(f"continuing {config.name} from step {manifest.step}")
        return await trainer.start(
            RunSpec(
                name=config.name,
                folder=self.folder.path,
                config=config.trainer,
                model=config.model,
                seed=config.run.seed,
                deterministic=config.run.deterministic,
                lineage=self.lineage,
                say=self.progress.say,
            ),
            manifest.checkpoint if manifest else None,
        )

    async def _train(self, trainer: Trainer, first: PolicyRef) -> Finished:
        config = self.config
        pool = PolicyPool(
            lambda ref: config.trainer_spec.open_policy(ref, config.trainer),
            trainer.release,
        )
        await pool.adopt(first)
        async with pool.use() as policy:
            tokenizer = await asyncio.to_thread(load_tokenizer, config, policy.tokenizer)
            context = least_context(policy.context_length, config.env.max_token_length)
        plan = group_plan(config, self.environment, context)
        self.eval_plan = group_plan(config, self.environment, context, evaluation=True)
        stream = TaskStream(
            "train",
            self.environment.tasks("train"),
            config.run.seed,
            dict(self.manifest.cursor) if self.manifest else None,
        )
        collector = Collector(
            self.environment,
            pool,
            self.state,
            stream,
            plan,
            Bounds(
                groups_per_batch=config.groups_per_batch,
                total_steps=config.env.total_steps,
                max_staleness=config.max_staleness,
                max_in_flight=config.env.max_num_workers if config.env.max_num_workers > 0 else None,
                filter_equal=config.env.ensure_scores_are_not_same,
                max_filtered_groups=config.rollout.max_filtered_groups,
                max_failed_groups=config.rollout.max_failed_groups,
            ),
            tokenizer=tokenizer,
            seed=config.run.seed,
            lineage=self.lineage,
            first_step=self.step,
            on_group=lambda group: self._notify("on_group", group=group),
        )
        if self.manifest is None:
            metrics = await self._evaluate(pool, tokenizer, 0, previews=True)
            self.folder.append_metrics({"step": 0, "time": time.time(), **metrics})
        await self.state.publish(first)
        follower = asyncio.create_task(self._follow(pool, collector))
        producer = asyncio.create_task(collector.run())
        self._background = (producer, follower)
        try:
            checkpoint = await self._steps(trainer, pool, collector, stream, tokenizer)
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._leave_unfinished(collector)
        return Finished(
            folder=self.folder.path,
            steps=self.step,
            checkpoint=checkpoint,
            first_evaluation=_evaluations(self.folder)[0],
            last_evaluation=_evaluations(self.folder)[1],
        )

    async def _follow(self, pool: PolicyPool, collector: Collector) -> None:
        async for ref in self.state.watch():
            await pool.adopt(ref)
            collector.policy_changed()

    async def _steps(
        self, trainer: Trainer, pool: PolicyPool, collector: Collector, stream: TaskStream, tokenizer: Any
    ) -> Checkpoint:
        config = self.config
        fence = await self.state.fence()
        total = config.env.total_steps
        interval = config.trainer.save_checkpoint_interval
        checkpoint: Checkpoint | None = self.manifest.checkpoint if self.manifest else None
        while self.step < total:
            began = time.monotonic()
            try:
                groups = await self._unless_stopped(
                    self._batch(collector, fence), "waiting for groups from the environment"
                )
            except (Stopped, FilteredOut, EpisodesFailed):
                if self.consumed:
                    await self._save(trainer, stream, fence, final=False)
                raise
            waited = time.monotonic() - began
            self._enter("training")
            update = await trainer.update(Batch(self.step, groups))  # never cancelled: it may have been charged for
            trained = time.monotonic() - began - waited
            self.step = update.ref.step
            for group in groups:
                collector.consumed(group)
                self.consumed.append(group.id)
            discarded = collector.take_discarded()
            metrics = step_metrics(
                self.step, groups, discarded, collector.take_counts(), update.metrics, waited=waited, trained=trained
            )
            await asyncio.to_thread(self._write_rollouts, groups, discarded, update)
            collector.recorded(discarded)
            await self.state.publish(update.ref)
            last = self.step >= total
            due = config.env.steps_per_eval and self.step % config.env.steps_per_eval == 0
            if last or (due and not self.stop.is_set()):
                with suppress(Stopped):  # the step itself is done, and is kept
                    metrics |= await self._evaluate(pool, tokenizer, self.step, previews=last)
            self.folder.append_metrics(metrics)
            self._notify("on_metrics", step=self.step, metrics=metrics)
            self.progress.step(metrics, total)
            if config.rollout.show_every and self.step % config.rollout.show_every == 0:
                group = groups[0]
                self.progress.rollout(f"step {self.step}, task {group.task.index}", group.trajectories[0])
            if last or self.stop.is_set() or (interval and self.step % interval == 0):
                checkpoint = await self._save(trainer, stream, fence, final=last)
            if self.stop.is_set() and not last:
                raise self._stopped()
        if checkpoint is None or not (self.manifest and self.manifest.finished):
            checkpoint = checkpoint or await self._save(trainer, stream, fence, final=True)
        return checkpoint

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

    def _unfit(self, leased: Leased) -> str:
        if self.step - leased.group.oldest_step > self.config.max_staleness:
            return "stale"
        refs = [ref for trajectory in leased.group.trajectories for ref in trajectory.policies]
        if any(ref.lineage != self.lineage for ref in refs):
            return "dead_policy"
        return ""

    def _write_rollouts(self, groups: Sequence[Group], discarded: Sequence[Discarded], update: Update) -> None:
        ordinal = {group.id: int(group.id.partition("-")[2]) for group in groups}
        records = [
            group_record(
                group, ordinal=ordinal[group.id], outcome="trained", step=self.step, advantages=update.advantages[place]
            )
            for place, group in enumerate(groups)
        ]
        for ended in discarded:
            records.append(
                {"group": ended.id, "ordinal": ended.ordinal, "outcome": "discarded", "reason": ended.reason}
                | {"step": self.step, "trajectories": []}
                if ended.group is None
                else group_record(
                    ended.group, ordinal=ended.ordinal, outcome="discarded", step=self.step, reason=ended.reason
                )
            )
        self.folder.write_rollouts(self.step, records)

    def _leave_unfinished(self, collector: Collector) -> None:
        """Record the groups that were whole but not trained on; their tasks are given out again on a resume."""
        left = [group for group in self.state.pending() if group.id in collector.ordinals]
        if left:
            self.folder.write_unfinished(
                self.lineage,
                [
                    group_record(
                        group,
                        ordinal=collector.ordinals[group.id],
                        outcome="discarded",
                        step=self.step,
                        reason="stopped",
                    )
                    for group in left
                ],
            )

    async def _evaluate(self, pool: PolicyPool, tokenizer: Any, step: int, *, previews: bool) -> dict[str, float]:
        """Evaluate if evaluations are on, and show the first test tasks; returns the metrics of the evaluation."""
        config = self.config
        shown = min(config.run.previews, self.test_tasks) if previews else 0
        tasks = self.test_tasks if config.env.steps_per_eval else shown
        if not tasks:
            return {}
        began = time.monotonic()
        async with pool.use(step) as policy:
            evaluation: Evaluation = await self._unless_stopped(
                evaluate(
                    self.environment,
                    policy,
                    tokenizer,
                    self.eval_plan,
                    tasks=tasks,
                    in_flight=config.openai.num_requests_for_eval or max(16, config.env.batch_size),
                    seed=config.run.seed,
                ),
                f"evaluating {tasks} test tasks",
            )
        for index, trajectory in enumerate(evaluation.trajectories[:shown]):
            if trajectory is not None:
                self.progress.rollout(f"test problem {index + 1}, at step {step}", trajectory)
        if not config.env.steps_per_eval:
            return {}
        await asyncio.to_thread(
            self.folder.write_evaluation,
            step,
            [
                {"task": index, "split": "test", "step": step}
                | ({"failed": True} if trajectory is None else trajectory_record(trajectory))
                for index, trajectory in enumerate(evaluation.trajectories)
            ],
        )
        return {**evaluation.metrics(), "time/evaluation": time.monotonic() - began}

    async def _save(self, trainer: Trainer, stream: TaskStream, fence: int, *, final: bool) -> Checkpoint:
        self._enter("saving a checkpoint")
        name = "final" if final else f"step-{self.step:06d}"
        if self.lineage and not final:
            name += f"-r{self.lineage}"
        checkpoint = await trainer.save(name)
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
        await self.state.commit(self.consumed, fence)
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

    def _stopped(self) -> Stopped:
        return Stopped(
            f"stopped at step {self.step} of {self.config.env.total_steps}, as asked; continue with "
            f"`tinker-atropos run --resume --name {self.config.name}`"
        )

    def _enter(self, stage: str) -> None:
        self.stage, self.last_progress = stage, time.monotonic()

    async def _guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work; a failure of the producer or the follower ends it."""
        task = asyncio.create_task(work)
        background = getattr(self, "_background", ())
        try:
            await asyncio.wait({task, *background}, return_when=asyncio.FIRST_COMPLETED)
            for other in background:
                if other.done() and not task.done():
                    other.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Result], stage: str) -> Result:
        """Await work that may be given up when the user asks the run to stop."""
        self._enter(stage)
        asked = asyncio.create_task(self.stop.wait())
        task = asyncio.create_task(self._guarded(work))
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise self._stopped()
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def _watch(self) -> None:
        """Name the stage that a silent run is in."""
        told = STALL_SECONDS
        while True:
            await asyncio.sleep(1.0)
            silent = time.monotonic() - self.last_progress
            if silent < STALL_SECONDS:
                told = STALL_SECONDS
            elif silent >= told:
                self.progress.say(f"still {self.stage}, for {silent:.0f} s (step {self.step})")
                told = max(told * 2, STALL_SECONDS)


def _evaluations(folder: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
    rows = [
        {key: value for key, value in row.items() if key.startswith("eval/")}
        for row in folder.read_metrics()
        if "eval/reward" in row
    ]
    return (rows[0], rows[-1]) if rows else ({}, {})
