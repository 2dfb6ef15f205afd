"""Steps an hour with a staleness of 1 over 0: sampling goes on while the trainer works.

First with the tests' fake trainer and policy, which each wait two seconds (the schedule alone, so the best case is 2),
then with the real engine on the quickstart, where both share the cores of this machine (no target).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAIT, FAKE_STEPS, REAL_STEPS = 2.0, 12, 8


def fakes() -> ModuleType:
    """Load the fakes of the SDK's own tests."""
    found = importlib.util.spec_from_file_location("sdk_test_fakes", ROOT / "sdk" / "tests" / "conftest.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def fake_rate(staleness: int, folder: Path) -> float:
    """Return steps an hour of the fake run."""
    from tinker_atropos.config import load
    from tinker_atropos.run import run

    kind: Any = fakes()
    service = kind.FakeService(sample_seconds=WAIT, update_seconds=WAIT)
    registry = kind.fake_registry(service)
    settings = {
        "run.env": "parity",
        "run.trainer": "fake",
        "run.name": f"fake-{staleness}",
        "run.output": str(folder),
        "run.previews": 0,
        "rollout.adapter": "fake_sessions",
        "rollout.max_staleness": staleness,
        "env.group_size": 4,
        "env.batch_size": 16,
        "env.total_steps": FAKE_STEPS,
        "env.steps_per_eval": 0,
        "env.ensure_scores_are_not_same": False,
    }
    config = load(None, [(key, value, key) for key, value in settings.items()], registry=registry)
    asyncio.run(run(config, kind.Notes(), registry=registry))
    return steps_an_hour(folder / f"fake-{staleness}")


def real_rate(staleness: int, folder: Path) -> float:
    """Return steps an hour of the quickstart."""
    name = f"real-{staleness}"
    command = [
        *(sys.executable, "-m", "tinker_atropos", "run", "-c", str(ROOT / "configs" / "quickstart.yaml"), "--local"),
        *("--steps", str(REAL_STEPS), "--name", name, "--output", str(folder)),
        *("--set", "env.steps_per_eval=0", "--set", "run.previews=0", "--set", f"rollout.max_staleness={staleness}"),
        *("--set", "tinker.save_checkpoint_interval=0"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return steps_an_hour(folder / name)


def steps_an_hour(run: Path) -> float:
    """By the median time of the steps after the first, which fills the pipe."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row["step"] >= 1]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return 3600 / gaps[len(gaps) // 2]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        fake = [fake_rate(staleness, folder) for staleness in (0, 1)]
        print(
            f"fake trainer and policy, {WAIT:g} s each: {fake[0]:.0f} steps/h with staleness 0, {fake[1]:.0f} with 1: "
            f"ratio {fake[1] / fake[0]:.2f} (target: 1.7 or more)",
            flush=True,
        )
        real = [real_rate(staleness, folder) for staleness in (0, 1)]
        print(
            f"real engine, quickstart: {real[0]:.0f} steps/h with staleness 0, {real[1]:.0f} with 1: ratio "
            f"{real[1] / real[0]:.2f} (no target: both share the same cores)"
        )


if __name__ == "__main__":
    main()
