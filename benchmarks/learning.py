"""`make bench-quickstart`: does the quickstart learn, and does nothing happen at a learning rate of 0?

Three seeds of configs/quickstart.yaml, each with its learning rate and with 0. Prints, per run, the mean reward of the
first and last eight steps and the greedy accuracy on the 200 held-out problems before and after, then the verdicts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EDGE = 8  # steps averaged at each end


class Outcome(NamedTuple):
    first: float
    last: float
    greedy_before: float
    greedy_after: float

    @property
    def gain(self) -> float:
        return self.last - self.first

    @property
    def greedy_gain(self) -> float:
        return self.greedy_after - self.greedy_before


def train(seed: int, learning_rate: float | None, output: Path) -> Outcome:
    name = f"seed{seed}-{'own' if learning_rate is None else learning_rate:}"
    rate = [] if learning_rate is None else ["--learning-rate", str(learning_rate)]
    command = [
        *(sys.executable, "-m", "tinker_atropos", "run", "-c", str(ROOT / "configs" / "quickstart.yaml"), "--local"),
        *("--seed", str(seed), "--name", name, "--output", str(output)),
        *("--set", "env.steps_per_eval=32", "--set", "rollout.eval_tasks=200", *rate),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    greedy = [row["eval/reward"] for row in rows if "eval/reward" in row]
    return Outcome(mean(rewards[:EDGE]), mean(rewards[-EDGE:]), greedy[0], greedy[-1])


def report(title: str, outcomes: list[Outcome]) -> None:
    print(title)
    for seed, outcome in enumerate(outcomes):
        print(
            f"  seed {seed}: reward {outcome.first:.3f} -> {outcome.last:.3f} ({outcome.gain:+.3f}), greedy accuracy "
            f"{outcome.greedy_before:.3f} -> {outcome.greedy_after:.3f} ({outcome.greedy_gain:+.3f})",
            flush=True,
        )


def main() -> int:
    seeds = range(3)
    with tempfile.TemporaryDirectory() as folder:
        learned = [train(seed, None, Path(folder)) for seed in seeds]
        report("learning rate of configs/quickstart.yaml", learned)
        idle = [train(seed, 0.0, Path(folder)) for seed in seeds]
        report("learning rate 0", idle)
    checks = {
        "reward gain >= 0.08 in each": min(o.gain for o in learned) >= 0.08,
        "reward gain >= 0.12 on average": mean(o.gain for o in learned) >= 0.12,
        "greedy gain >= 0.05 on average": mean(o.greedy_gain for o in learned) >= 0.05,
        "at rate 0 the reward stays within 0.08": all(abs(o.gain) <= 0.08 for o in idle),
        "at rate 0 greedy accuracy is unchanged": all(o.greedy_gain == 0 for o in idle),
    }
    for name, held in checks.items():
        print(f"{'ok  ' if held else 'MISS'} {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
