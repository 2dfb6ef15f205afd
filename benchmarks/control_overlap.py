"""Trainer-busy share of control runs: collection goes on while the learner works.

With a simulated environment, whose step waits and computes next to nothing, and two trainers: one whose update is real
matrix work of a known amount of processor time, so that the schedule alone is measured, and torch_ppo. Busy is time in
optimisation over wall time; because contention must not pass for work, updates a second are compared with the same
updates fed from memory, with no collection beside them, before and after, since other work on this machine comes and
goes. `blocked` is the share of an update's time in which its thread neither ran nor waited for a core: it waited for
the interpreter's lock, which is what collection costs the learner however busy the machine is (Linux alone says so).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

ROOT = Path(__file__).resolve().parent.parent
BUSY, RATE = 0.95, 0.9
STEP_SECONDS = 0.0005  # 64 of them make a batch: a third of an update's time, so that overlap is needed for the target
SIMULATIONS, STEPS, WARM_UP = 16, 64, 3
SCHEDULES = (("sync", "inline", 1), ("async", "inline", 1), ("async", "thread", 2), ("async", "process", 2))


def fakes() -> Any:
    """Load the fakes of the SDK's own tests."""
    name = "fake_control"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, ROOT / "sdk" / "tests" / f"{name}.py")
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return sys.modules[name]


class Silent:
    """A Progress that shows nothing but notices."""

    def say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr)

    def step(self, metrics: Any, total: int) -> None:
        pass

    def rollout(self, title: str, trajectory: Any) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Watch:
    """What updates took: wall time, and how much of it their thread was blocked."""

    taken: list[tuple[float, float]] = field(default_factory=list)

    def watched(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the work, timed."""

        def timed(*values: Any) -> Any:
            wall, accounted = time.perf_counter(), _accounted()
            result = work(*values)
            wall, accounted = time.perf_counter() - wall, _accounted() - accounted
            self.taken.append((wall, wall - accounted))
            return result

        return timed

    def blocked(self) -> float:
        """Return the blocked share of the time that no other process had its core, and forget all."""
        (wall, blocked), self.taken = np.sum(self.taken[WARM_UP:], axis=0), []
        return float(blocked / wall)


def _accounted() -> float:
    """Return the seconds that this thread ran or waited for a core; its processor time where that is not known."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class Matrices:
    """The fake trainer: matrix work of a known amount of processor time."""

    name = "fake_control"

    def __init__(self, work: float, watch: Watch) -> None:
        self._kind = fakes()
        self._work = work
        if not hasattr(self._kind, "unwatched"):
            self._kind.unwatched = self._kind.work
        self._kind.work = watch.watched(self._kind.unwatched)

    def registry(self) -> Any:
        return self._kind.fake_control_registry(self._kind.FakeControlService(work_seconds=self._work, keep=False))

    def settings(self) -> dict[str, Any]:
        return {}

    async def from_memory(self, updates: int, folder: Path) -> list[float]:
        """Return the seconds of each update."""
        return [await seconds(asyncio.to_thread(self._kind.work, self._work)) for _ in range(updates)]


class TorchPPO:
    """The real trainer, with networks such as those of the Humanoid configuration."""

    name = "torch_ppo"

    def __init__(self, watch: Watch) -> None:
        from tinker_atropos_torch_ppo import ppo

        self._kind = fakes()
        learner: Any = ppo.Learner
        if not hasattr(learner, "unwatched"):
            learner.unwatched = learner.update
        timed = watch.watched(learner.unwatched)
        learner.update = lambda self, batch: timed(self, batch)

    def registry(self) -> Any:
        from tinker_atropos_torch_ppo import trainer_spec

        registry = self._kind.fake_control_registry(self._kind.FakeControlService())
        registry.add("trainer", trainer_spec())
        return registry

    def settings(self) -> dict[str, Any]:
        return {"trainer__epochs": 5, "trainer__minibatches": 8, "trainer__hidden_sizes": (256, 256)}

    async def from_memory(self, updates: int, folder: Path) -> list[float]:
        """Return the seconds of each update with one made-up batch, again and again."""
        from tinker_atropos.control import ControlBatch, ControlSpaces, Fragment
        from tinker_atropos.trainer import RunSpec
        from tinker_atropos_torch_ppo.config import TorchPPOConfig
        from tinker_atropos_torch_ppo.trainer import TorchPPOTrainer

        walk = self._kind.FakeWalk(self._kind.FakeWalkConfig(num_envs=SIMULATIONS))
        spaces = ControlSpaces(walk.single_observation_space, walk.single_action_space, "walk")
        settings = {key.removeprefix("trainer__"): value for key, value in self.settings().items()}
        trainer = TorchPPOTrainer(TorchPPOConfig(schedule="async", **settings))
        now = await trainer.start(RunSpec("memory", folder, None, None, 0, False, 0, print), spaces, None)
        rng = np.random.default_rng(0)
        observations = rng.normal(size=(STEPS + 1, SIMULATIONS, 3)).astype(np.float32)
        acted = [now.policy.act(rows, rng) for rows in observations[:-1]]
        none = np.zeros((STEPS, SIMULATIONS), np.bool_)
        fragment = Fragment(
            id="0",
            observations=observations,
            actions=np.stack([one.actions for one in acted]),
            logprobs=np.stack([one.logprobs for one in acted]),
            rewards=rng.normal(size=none.shape).astype(np.float32),
            terminated=none,
            truncated=none,
            finals=np.zeros((0, 3), np.float32),
            policy=now.ref,
        )
        try:
            return [await seconds(trainer.update(ControlBatch(step, (fragment,)))) for step in range(updates)]
        finally:
            await trainer.close()


async def seconds(work: Any) -> float:
    """Await work; return how long it took."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def rate_from_memory(trainer: Matrices | TorchPPO, updates: int, folder: Path) -> float:
    """Return updates a second of the trainer alone."""
    return 1 / median(asyncio.run(trainer.from_memory(updates, folder))[WARM_UP:])


def rate_of_run(
    trainer: Matrices | TorchPPO, folder: Path, updates: int, schedule: str, workers: str, shards: int
) -> tuple[float, float, float]:
    """Return busy share, updates a second and environment steps a second of a run, over all but its first updates."""
    from tinker_atropos.run import run

    registry = trainer.registry()
    config = fakes().control_config(
        registry,
        folder,
        run__env="walk",
        run__trainer=trainer.name,
        run__name=f"{trainer.name}-{schedule}-{workers}",
        env__num_envs=SIMULATIONS,
        env__horizon=1000,
        env__step_seconds=STEP_SECONDS,
        env__total_steps=updates,
        env__shards=shards,
        rollout__workers=workers,
        trainer__schedule=schedule,
        trainer__steps_per_update=STEPS,
        trainer__save_checkpoint_interval=0,
        **trainer.settings(),
    )
    asyncio.run(run(config, Silent(), registry=registry))
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return (
        sum(row["time/update"] for row in rows) / sum(row["time/step"] for row in rows),
        1 / median(row["time/step"] for row in rows),
        median(row["env_steps/per_second"] for row in rows),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=float, default=0.1, help="processor seconds of one update of the fake trainer")
    parser.add_argument("--updates", type=int, default=30)
    options = parser.parse_args()
    threadpool_limits(1, user_api="blas")  # as torch_ppo does: the cores left are collection's
    watch = Watch()
    trainers: list[Matrices | TorchPPO] = [Matrices(options.work, watch)]
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: the rows of torch_ppo are left out")
    else:
        trainers.append(TorchPPO(watch))
    print(f"an update learns from {SIMULATIONS * STEPS:,} environment steps; matrices: {options.work:g} s of work")
    print(f"targets in async: busy {BUSY:.0%}, {RATE:g} of the updates/s from memory")
    with tempfile.TemporaryDirectory() as temporary:
        folder, missed = Path(temporary), 0
        for trainer in trainers:
            for schedule, workers, shards in SCHEDULES:
                before = rate_from_memory(trainer, options.updates // 2, folder)
                watch.taken.clear()
                busy, rate, steps = rate_of_run(trainer, folder, options.updates, schedule, workers, shards)
                blocked = watch.blocked()
                alone = (before + rate_from_memory(trainer, options.updates // 2, folder)) / 2
                met = schedule != "async" or (busy >= BUSY and rate / alone >= RATE)
                missed += not met
                print(
                    f"{'matrices' if trainer.name == 'fake_control' else trainer.name:<9} {schedule:<5} {workers:<7} "
                    f"{shards} shard{'s' if shards > 1 else ' '} busy {busy:6.1%}  blocked {blocked:5.1%}  {rate:5.2f} "
                    f"updates/s, {rate / alone:.2f} of {alone:.2f} from memory  {steps:,.0f} environment steps/s"
                    + ("" if met else "  MISSED"),
                    flush=True,
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
