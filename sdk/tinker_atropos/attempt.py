"""One attempt of a run, in one lineage: where it goes on from, its step, its checkpoints, its listeners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tinker_atropos.config import Config
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry
from tinker_atropos.run_folder import Manifest, RunFolder, latest_manifest
from tinker_atropos.supervise import Stopped, Supervisor
from tinker_atropos.terminal import resume_command
from tinker_atropos.trainer import Checkpoint, RunSpec
from tinker_atropos.trajectory import PolicyRef

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Saver(Protocol):
    """The part of every trainer that keeps its state."""

    async def save(self, name: str) -> Checkpoint: ...


class Attempt:
    """What training on text and on control have in common. `step` counts the steps that the weights have taken.

    `total` is the last step. `consumed` are the groups or fragments trained on since the last manifest, `discarded`
    those that ended untrained and can't be made again, with the reason.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        folder: RunFolder,
        registry: Registry,
        stop: asyncio.Event,
        *,
        total: int,
    ) -> None:
        self.config, self.progress, self.folder, self.registry, self.total = config, progress, folder, registry, total
        self.manifest = latest_manifest(folder, say=progress.say)
        self.lineage = folder.next_lineage(self.manifest)
        self.step = self.manifest.step if self.manifest else 0
        self.consumed: list[str] = []
        self.discarded: dict[str, str] = {}
        self._written: Manifest | None = None  # by this attempt
        self.tally: Callable[[], str] | None = None
        self.supervisor = Supervisor(stop, progress.say, self._where)

    def begin(self) -> RunSpec:
        """Put aside what belongs to dead weights; return what the trainer is told."""
        manifest = self.manifest
        self.folder.rewind(self.step if manifest else -1, self.lineage - 1)
        if manifest is not None:
            self.progress.say(f"continuing {self.config.name} from step {manifest.step}")
        return RunSpec(
            name=self.config.name,
            folder=self.folder.path,
            config=self.config.trainer,
            model=self.config.model,
            seed=self.config.run.seed,
            deterministic=self.config.run.deterministic,
            lineage=self.lineage,
            say=self.progress.say,
        )

    @property
    def cursor(self) -> dict[str, Any] | None:
        """Where the run's order goes on; None at its beginning."""
        return dict(self.manifest.cursor) if self.manifest else None

    @property
    def ancestry(self) -> tuple[tuple[int, int], ...]:
        """The lineages that the present weights come from, each with the last of its steps that they hold."""
        return () if self.manifest is None else (*self.manifest.ancestry, (self.manifest.lineage, self.manifest.step))

    def alive(self, ref: PolicyRef) -> bool:
        """Whether a policy is one that the present weights have been."""
        return ref.lineage == self.lineage or any(
            ref.lineage == lineage and ref.step <= step for lineage, step in self.ancestry
        )

    def due(self, *, last: bool) -> bool:
        """Whether a checkpoint is to be saved after the step just done."""
        interval = self.config.trainer.save_checkpoint_interval
        return last or self.supervisor.stopping or bool(interval and self.step % interval == 0)

    @property
    def unfinished(self) -> bool:
        """Whether the run is at its last step without a manifest that says so: asked to end at an older checkpoint."""
        manifest = self.manifest
        return manifest is not None and manifest.step == self.step and not manifest.finished

    async def save(
        self,
        trainer: Saver,
        cursor: Mapping[str, Any],
        *,
        final: bool,
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> Checkpoint:
        """Save the trainer's state, then what `beside` writes, then the manifest that names both.

        Where nothing was trained since the last manifest, only what was discarded is added to it.
        """
        self.supervisor.enter("saving a checkpoint")
        last = self._written
        if last is not None and last.step == self.step and not self.consumed and not final:
            await self._write(replace(last, cursor=cursor, discarded={**last.discarded, **self.discarded}))
            return last.checkpoint
        name = "final" if final else f"step-{self.step:06d}"
        if self.lineage and not final:
            name += f"-r{self.lineage}"
        checkpoint = await trainer.save(name)
        if beside is not None:
            await beside()
        manifest = Manifest(
            run=self.config.name,
            lineage=self.lineage,
            step=self.step,
            checkpoint=checkpoint,
            consumed=tuple(self.consumed),
            cursor=cursor,
            finished=final,
            ancestry=self.ancestry,
            discarded=dict(self.discarded),
        )
        await self._write(manifest)
        return checkpoint

    async def _write(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self.folder.write_manifest, manifest)
        self._written, self.consumed, self.discarded = manifest, [], {}
        self.notify("on_checkpoint", manifest=manifest.as_dict())

    def notify(self, hook: str, **values: Any) -> None:
        """Call the listeners; one that fails is named and harms nobody else."""
        try:
            getattr(self.registry.hooks, hook)(**values)
        except Exception as error:
            log.exception("a listener of %s failed", hook)
            self.progress.say(f"a plugin's {hook} failed: {type(error).__name__}: {error}")

    async def awaiting(self, work: Coroutine[Any, Any, Result], stage: str) -> Result:
        """Await work that may be given up; raises `Stopped` with the way on where the user asks for it."""
        try:
            return await self.supervisor.awaiting(work, stage)
        except Stopped:
            raise self.stopped() from None

    def stopped(self) -> Stopped:
        """Return what to raise where the user asked to stop."""
        if not self.folder.begun():
            return Stopped("stopped before anything was done, as asked; the same command begins again")
        return Stopped(
            f"stopped at step {self.step} of {self.total}, as asked; continue with `{resume_command(self.config)}`"
        )

    def _where(self) -> str:
        return f"step {self.step}" if self.tally is None else f"step {self.step}; {self.tally()}"
