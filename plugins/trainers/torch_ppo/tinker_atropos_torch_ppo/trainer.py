"""The trainer: one PPO run on this machine. Its learner works in a thread of its own, so collection can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits
from tinker_atropos.control import ControlBatch, ControlSpaces, ControlUpdate
from tinker_atropos.errors import CheckpointError, ConfigError, TrainerError
from tinker_atropos.trainer import Checkpoint, RunSpec
from tinker_atropos.trajectory import PolicyRef

from tinker_atropos_torch_ppo import checkpoints
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.export import export
from tinker_atropos_torch_ppo.inference import NumpyPolicy, Snapshot, local_path, open_snapshot
from tinker_atropos_torch_ppo.ppo import Learner
from tinker_atropos_torch_ppo.spaces import read_spaces
from tinker_atropos_torch_ppo.stored import FOLDER, prune

T = TypeVar("T")


@dataclass(slots=True)
class _Running:
    """What exists between `start` and `close`. `doubt` says why the weights may be those of half an update."""

    spec: RunSpec
    learner: Learner
    saved: dict[int, Checkpoint]
    doubt: str | None = None


class TorchPPOTrainer:
    """A control trainer: PPO in plain torch.

    Calls are worked off one after the other in one thread. After an update that failed, every call raises
    `TrainerError` until `start` goes back to a checkpoint.
    """

    def __init__(self, config: TorchPPOConfig) -> None:
        self.config = config
        self._now: _Running | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def start(self, spec: RunSpec, spaces: ControlSpaces, resume: Checkpoint | None) -> ControlUpdate:
        """Create the networks, or load a checkpoint exactly; return the first policy.

        May be called again, to go back to a checkpoint with the next lineage. Raises `ConfigError` for spaces or a
        device that can't be had, `CheckpointError` for a checkpoint that is missing, damaged or of another task.
        """
        self._now = None
        shape = read_spaces(spaces)

        def make() -> tuple[Learner, list[str]]:
            torch.set_num_threads(self.config.threads)
            # NumPy acts beside the learner, on matrices so small that its further threads do nothing but spin.
            threadpool_limits(self.config.threads, user_api="blas")
            learner = Learner(shape, self.config, spec.seed, choose_device(self.config.device))
            return learner, [] if resume is None else checkpoints.load(learner, resume)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch_ppo")
        learner, changed = await self._work(make)
        for line in changed:
            spec.say(line)
        self._now = _Running(spec, learner, {} if resume is None else {resume.step: resume})
        about = {"threads": float(self.config.threads)}
        return await self._work(lambda: _published(spec, learner, about))

    async def update(self, batch: ControlBatch) -> ControlUpdate:
        """Learn from a batch; the event loop, and acting under earlier policies, go on meanwhile.

        Raises `TrainerError` for a batch that can't be learned from and for a loss that is not finite.
        """
        now = self._running()

        def learn() -> ControlUpdate:
            now.learner.check(batch)
            now.doubt = f"the update of step {now.learner.step} was not finished"
            metrics = now.learner.update(batch)
            now.doubt = None
            return _published(now.spec, now.learner, metrics)

        return await self._work(learn)

    async def save(self, name: str) -> Checkpoint:
        """Write a checkpoint into the run's folder, under `checkpoints/`; remove those that are too many."""
        now = self._running()

        def save() -> Checkpoint:
            saved = checkpoints.save(now.learner, name, now.spec.folder / FOLDER)
            now.saved[saved.step] = saved
            self._prune(now)
            return saved

        return await self._work(save)

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        """Write a policy into the folder `to`, for use without this project (see `export`); return it.

        The newest policy, those of this run's checkpoints, and any `file://…/policy.npz` can be exported; raises
        `CheckpointError` for another.
        """
        snapshot = await self._work(lambda: self._kept(ref))
        await asyncio.to_thread(lambda: export(snapshot, to))
        return to

    async def close(self) -> None:
        """End the learner's thread, after what it is doing."""
        self._now = None
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)

    def _prune(self, now: _Running) -> None:
        if not self.config.keep_checkpoints:
            return
        try:
            prune(now.spec.folder, self.config.keep_checkpoints)
        except OSError as error:  # the disk may fill, but what is saved is saved
            now.spec.say(f"an old checkpoint could not be removed: {error}")
        now.saved = {step: kept for step, kept in now.saved.items() if local_path(kept.state).exists()}

    def _kept(self, ref: PolicyRef) -> Snapshot:
        if ref.uri.startswith("file:"):
            return open_snapshot(ref.uri)
        now = self._running()
        if (ref.run, ref.lineage) == (now.spec.name, now.spec.lineage):
            if ref.step == now.learner.step:
                return now.learner.snapshot()
            if ref.step in now.saved:
                return open_snapshot(now.saved[ref.step].weights)
        raise CheckpointError(
            f"the policy of step {ref.step} (run {ref.run!r}, lineage {ref.lineage}) was not kept; that of the newest "
            f"step ({now.learner.step}) and of the checkpoints at steps {sorted(now.saved)} can be exported"
        )

    def _running(self) -> _Running:
        if self._now is None:
            raise TrainerError("the trainer was not started; await start(spec, spaces, resume) first")
        if self._now.doubt is not None:
            raise TrainerError(f"{self._now.doubt}, so its weights can't be trusted; go back to the last checkpoint")
        return self._now

    async def _work(self, job: Callable[[], T]) -> T:
        if self._thread is None:
            raise TrainerError("the trainer is not running; await start(spec, spaces, resume) first")
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)


def choose_device(wanted: str) -> torch.device:
    """Return the device; `auto` takes CUDA where there is one. Raises `ConfigError` for one that is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"torch_ppo.device={wanted!r} is not on this machine (torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices); choose auto or cpu"
        )
    return device


def _published(spec: RunSpec, learner: Learner, metrics: dict[str, float]) -> ControlUpdate:
    ref = PolicyRef(spec.name, spec.lineage, learner.step, f"memory://{spec.name}/{spec.lineage}/{learner.step}")
    return ControlUpdate(ref, NumpyPolicy(ref, learner.snapshot()), metrics)
