"""One run, from a configuration to its last checkpoint; keeps the run's folder true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_atropos.closing import close_environment
from tinker_atropos.config import Config
from tinker_atropos.control_training import ControlTraining, probe
from tinker_atropos.errors import ConfigError, UpdateUncertain
from tinker_atropos.progress import Progress
from tinker_atropos.registry import Registry, normal
from tinker_atropos.rollout.control_plan import is_control
from tinker_atropos.rollout.external import ExternalProduction
from tinker_atropos.rollout.plan import check_environment_splits, load_tokenizer, make_environment
from tinker_atropos.rollout.production import EpisodeProduction, Production
from tinker_atropos.run_folder import RunFolder, latest_manifest
from tinker_atropos.state import MemoryState, State, open_state
from tinker_atropos.supervise import Stopped
from tinker_atropos.text_training import TextTraining
from tinker_atropos.trainer import Checkpoint
from tinker_atropos.trajectory import Group

__all__ = ["Finished", "Stopped", "run"]

log = logging.getLogger(__name__)

MAX_REWINDS = 3


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished run leaves: its folder, its last checkpoint, and the evaluations at its ends."""

    folder: Path
    steps: int
    checkpoint: Checkpoint
    first_evaluation: dict[str, float]
    last_evaluation: dict[str, float]


async def run(
    config: Config,
    progress: Progress,
    *,
    resume: bool = False,
    registry: Registry | None = None,
    stop: asyncio.Event | None = None,
    environment: Any = None,
) -> Finished:
    """Train until `env.total_steps`.

    With `resume` it continues from the newest manifest of the run's folder. When `stop` is set it saves a checkpoint
    after the step under way and raises `Stopped`. `environment` is the configured one, where it is made already. Raises
    a `UserError` before anything was started, a `RunError` after.
    """
    registry, stop = registry or Registry(), stop or asyncio.Event()
    folder = RunFolder(config.folder)
    check_folder(config, resume=resume)
    manifest = latest_manifest(folder) if resume else None
    if manifest is not None and manifest.finished and manifest.step == config.env.total_steps:
        progress.say(f"{config.name} is at its last step already; ask for more with --steps")
        return Finished(folder.path, manifest.step, manifest.checkpoint, *_evaluations(folder, _measure(config)))
    if is_control(config):
        probed = await asyncio.to_thread(probe, config)
        with _held(folder, config, resume=resume):
            return await _attempts(
                progress,
                folder,
                lambda: ControlTraining(config, progress, folder, probed, registry, stop),
                _measure(config),
            )
    environment = make_environment(config) if environment is None else environment
    try:
        production = await _production(config, environment)
        async with _state(config, production, progress, fresh=not resume) as kept:

            def begin() -> TextTraining:
                state: State[Group] = MemoryState(production.cap()) if kept is None else kept
                return TextTraining(config, progress, folder, production, state, registry, stop)

            with _held(folder, config, resume=resume):
                return await _attempts(progress, folder, begin, _measure(config))
    finally:
        await close_environment(environment)


async def _production(config: Config, environment: Any) -> Production:
    if config.environment_spec.kind == "external":
        return ExternalProduction(config, environment)
    test_tasks = check_environment_splits(environment, config)
    return EpisodeProduction(config, environment, test_tasks, await asyncio.to_thread(load_tokenizer, config))


@asynccontextmanager
async def _state(
    config: Config, production: Production, progress: Progress, *, fresh: bool
) -> AsyncIterator[State[Group] | None]:
    """Yield the state that all attempts share; None: each has one of its own, in memory, as groups can be made anew."""
    kept = production.state()
    if kept is not None and config.run.state != "memory":
        raise ConfigError(
            f"run.state: {config.run.state} has no effect: the groups of this run wait where its environment says; "
            "leave it out"
        )
    if kept is None and (production.lasting or config.run.state != "memory"):
        kept = await open_state(config.run.state, config.name, production.cap(), say=progress.say)
        left = len(await kept.pending()) if fresh and kept.durable else 0
        if left:
            await kept.close()
            raise ConfigError(
                f"run.state: {config.run.state} holds {left} groups of a run called {config.name!r} already; continue "
                "that with --resume, or choose another --name"
            )
    try:
        yield kept
    finally:
        if kept is not None:
            await kept.close()


def _sections(config: Config) -> tuple[str, str]:
    """Return the names of the trainer's and the environment's section."""
    return normal(config.trainer_spec.name), normal(config.environment_spec.name)


def check_folder(config: Config, *, resume: bool) -> None:
    """Raise `ConfigError` if the run's folder can't be made, holds another run, or one of another configuration."""
    RunFolder.check_place(config.folder)
    folder = RunFolder(config.folder)
    if not resume:
        folder.refuse_old()
        return
    folder.refuse_other(config.as_dict(), *_sections(config))
    manifest = latest_manifest(folder)
    if manifest is not None and config.env.total_steps < manifest.step:
        raise ConfigError(
            f"env.total_steps: {config.env.total_steps} is less than the {manifest.step} steps that the run in "
            f"{str(config.folder)!r} has done; ask for more to continue it"
        )


@contextmanager
def _held(folder: RunFolder, config: Config, *, resume: bool) -> Iterator[None]:
    """Make or reopen the folder, and hold it, with its log, until the block ends."""
    if resume:
        folder.reopen(config.as_dict(), *_sections(config))
    else:
        folder.create(config.as_dict())
    try:
        with logging_to(config.folder / "run.log"):
            yield
    finally:
        folder.close()


async def _attempts(
    progress: Progress, folder: RunFolder, begin: Callable[[], TextTraining | ControlTraining], measure: str
) -> Finished:
    """Train; where a reply was lost, go back to the newest manifest and train again."""
    rewinds, last = 0, -1
    while True:
        training = begin()
        try:
            checkpoint = await training.go()
        except UpdateUncertain as error:
            manifest = latest_manifest(folder)
            reached = manifest.step if manifest else 0
            rewinds, last = (rewinds + 1 if reached <= last else 1), reached
            if rewinds > MAX_REWINDS:
                raise
            log.warning("rewinding to step %d: %s", reached, error)
            progress.say(f"{error}. Rewinding to step {reached}, the last manifest (rewind {rewinds})")
        except BaseException as error:
            log.error("the run ended: %s: %s", type(error).__name__, error, exc_info=error)
            if not folder.begun():
                folder.abandon()  # so that the same command, put right, may use the name
            raise
        else:
            first, newest = _evaluations(folder, measure)
            return Finished(folder.path, training.step, checkpoint, first, newest)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Within the block our own logs from INFO and everybody's from WARNING go to a file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: record.name.startswith("tinker_atropos") or record.levelno >= logging.WARNING)
    logging.getLogger().addHandler(handler)
    logging.getLogger("tinker_atropos").setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _measure(config: Config) -> str:
    """Return the metric that every evaluation has."""
    return "eval/return" if is_control(config) else "eval/reward"


def _evaluations(folder: RunFolder, measure: str) -> tuple[dict[str, float], dict[str, float]]:
    rows = [
        {key: value for key, value in row.items() if key.startswith("eval/")}
        for row in folder.read_metrics()
        if measure in row
    ]
    return (rows[0], rows[-1]) if rows else ({}, {})
