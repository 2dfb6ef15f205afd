"""Trainer-busy share of control runs: collection goes on while the learner works.

With a simulated environment, whose step waits and computes next to nothing, and a trainer whose update is real matrix
work of a known amount of processor time, so that the schedule alone is measured. Busy is time in optimisation over wall
time; because contention must not pass for work, updates a second are compared with the same updates fed from memory,
with no collection beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import cloudpickle

ROOT = Path(__file__).resolve().parent.parent
BUSY, RATE = 0.95, 0.9
STEP_SECONDS = 0.0005  # 64 of them make a batch: a third of an update's time, so that overlap is needed for the target


def fakes() -> ModuleType:
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


def from_memory(work: float, updates: int) -> float:
    """Return updates a second of the trainer alone."""
    kind: Any = fakes()

    async def go() -> float:
        took = []
        for _ in range(updates):
            began = time.perf_counter()
            await asyncio.to_thread(kind.work, work)
            took.append(time.perf_counter() - began)
        return 1 / median(took)

    return asyncio.run(go())


def run_rate(folder: Path, work: float, updates: int, **changes: Any) -> tuple[float, float, float]:
    """Return busy share, updates a second and environment steps a second of a run, over all but its first updates."""
    from tinker_atropos.run import run

    kind: Any = fakes()
    service = kind.FakeControlService(work_seconds=work, keep=False)
    registry = kind.fake_control_registry(service)
    config = kind.control_config(
        registry,
        folder,
        **{
            "run__env": "walk",
            "run__name": "-".join(str(value) for value in changes.values()),
            "env__num_envs": 16,
            "env__horizon": 1000,
            "env__step_seconds": STEP_SECONDS,
            "env__total_steps": updates,
            "trainer__steps_per_update": 64,
            "trainer__save_checkpoint_interval": 0,
            **changes,
        },
    )
    asyncio.run(run(config, Silent(), registry=registry))
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()][3:]
    return (
        sum(row["time/update"] for row in rows) / sum(row["time/step"] for row in rows),
        1 / median(row["time/step"] for row in rows),
        median(row["env_steps/per_second"] for row in rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=float, default=0.1, help="processor seconds of one update")
    parser.add_argument("--updates", type=int, default=30)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = [
        {"trainer__schedule": "sync", "rollout__workers": "inline", "env__shards": 1},
        {"trainer__schedule": "async", "rollout__workers": "inline", "env__shards": 1},
        {"trainer__schedule": "async", "rollout__workers": "thread", "env__shards": 2},
        {"trainer__schedule": "async", "rollout__workers": "process", "env__shards": 2},
    ]
    print(f"an update is {options.work:g} s of processor time and learns from 1,024 environment steps")
    with tempfile.TemporaryDirectory() as temporary:
        for changes in runs:
            # Before and after, since other work on this machine comes and goes.
            before = from_memory(options.work, options.updates // 2)
            busy, rate, steps = run_rate(Path(temporary), options.work, options.updates, **changes)
            alone = (before + from_memory(options.work, options.updates // 2)) / 2
            schedule, workers, shards = changes.values()
            met = "" if schedule == "sync" else f" (targets {BUSY:.0%} and {RATE:g})"
            print(
                f"{schedule:<5} {workers:<7} {shards} shard{'s' * (shards > 1)}: trainer busy {busy:.1%}, {rate:.2f} "
                f"updates/s, {rate / alone:.2f} of the {alone:.2f} fed from memory{met}; {steps:,.0f} environment "
                "steps/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
