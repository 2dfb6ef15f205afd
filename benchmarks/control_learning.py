"""`make bench-control-learning`: how much does a control run learn, and how long does it take beside CleanRL's PPO?

Runs a control file with some seeds, one after the other, then, where `--cleanrl` names a checkout of CleanRL, its
`ppo_continuous_action.py` for a part of the steps, scaled to all of them. Prints for each seed the mean return of the
last 100 training episodes (`--last`), so of the policy that explores, as CleanRL and Sample Factory publish it.
Humanoid's is given in v5's reward, which the run learns from, and in v4's (recorded_humanoid.py), as CleanRL's is.

    python benchmarks/control_learning.py configs/humanoid.yaml --seeds 1 2 3 \\
        --cleanrl ../cleanrl --cleanrl-python ../cleanrl/.venv/bin/python

Both sides get the same numbers of BLAS threads, which are printed. Exits with 1 if a target is missed. CleanRL needs
packages of its own: Python 3.11 with gymnasium 0.29.1, mujoco 2.3.3, numpy 1.26.4, torch, tyro 0.9.2, tensorboard.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "recorded_humanoid.py"
PUBLISHED_STEPS = 1_000_000
CLEANRL_PUBLISHED = 716.11  # Humanoid-v4, 1 M steps, ± 49.08: docs/benchmark/ppo_continuous_action.md of CleanRL
# For both sides. More threads of BLAS than one only wait for each other at these sizes; what you set yourself holds.
THREADS = {name: os.environ.get(name, "1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True)
class Learned:
    """One seed. `env_steps [K]` and `returns [K]`: where each episode ended, in the order of time, and its return."""

    seed: int
    wall: float
    total_env_steps: int
    env_steps: list[float]
    returns: list[float]
    returns_v4: list[float] | None

    def score(self, last: int) -> float:
        """Return the mean return of the `last` training episodes."""
        return mean(self.returns[-last:])


def train(config: Path, seed: int, extra: Sequence[str], output: Path) -> Learned:
    """Run the control file as a user would; wall time is that of the whole command, its start included."""
    name = f"{config.stem}-seed{seed}"
    humanoid = yaml.safe_load(config.read_text())["run"]["env"] == "humanoid"
    episodes = output / f"{name}-episodes"
    episodes.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "tinker_atropos", "run", "-c", str(config), "--seed", str(seed)),
        *("--name", name, "--output", str(output), *(("--env", f"{RECORDED}:env") if humanoid else ()), *extra),
    ]
    began = time.monotonic()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **THREADS, "TINKER_ATROPOS_EPISODES": str(episodes)},
    )
    wall = time.monotonic() - began
    return read(seed, wall, output / name, episodes)


def read(seed: int, wall: float, run: Path, episodes: Path) -> Learned:
    """Return what a run's files hold: each episode where they were recorded, else the means that each update logs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    total = int(rows[-1]["env_steps"])
    recorded = sorted(episodes.glob("episodes-*.csv"), key=lambda file: file.stat().st_size)
    if recorded:  # the largest is that of the training; the others are of evaluations
        with recorded[-1].open() as file:
            table = [[float(value) for value in row] for row in list(csv.reader(file))[1:]]
        steps, v5, v4, _ = (list(column) for column in zip(*table, strict=True))
        return Learned(seed, wall, total, steps, v5, v4)
    counted = [(row["env_steps"], row["episode/return"], row["episode/count"]) for row in rows if row["episode/count"]]
    steps, returns = ([value for row in counted for value in [row[column]] * int(row[2])] for column in (0, 1))
    return Learned(seed, wall, total, steps, returns, None)


@dataclass(frozen=True)
class CleanRL:
    """A part of CleanRL's run: `steps` of them took `wall` seconds, at `rate` steps/s once it had started."""

    steps: int
    wall: float
    rate: float
    last: float

    def scaled(self, steps: int) -> float:
        """Return the seconds of a run of `steps`: the start once, and the rest at the rate that was measured."""
        return self.wall + (steps - self.steps) / self.rate


def cleanrl(options: argparse.Namespace) -> CleanRL:
    script = options.cleanrl.resolve() / "cleanrl" / "ppo_continuous_action.py"
    command = [
        *(options.cleanrl_python, str(script), "--env-id", options.cleanrl_env, "--no-cuda"),
        *("--total-timesteps", str(options.cleanrl_steps), "--seed", "1"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = subprocess.run(
            command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, **THREADS}
        )
        wall = time.monotonic() - began
    rates = re.findall(r"^SPS: (\d+)", done.stdout, re.MULTILINE)
    returns = re.findall(r"episodic_return=\[?([-\d.e+]+)", done.stdout)
    if not rates or not returns:
        raise SystemExit(f"{script} printed no SPS or no episodic_return: it needs gymnasium 0.29.1")
    return CleanRL(
        options.cleanrl_steps, wall, float(rates[-1]), mean(float(value) for value in returns[-options.last :])
    )


def curve(learned: Learned, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and the mean return of the `last` episodes up to them, at most 400 points."""
    width = min(last, len(learned.returns))
    means = np.convolve(learned.returns, np.full(width, 1 / width), mode="valid")
    steps = np.asarray(learned.env_steps[width - 1 :])
    chosen = np.unique(np.linspace(0, len(means) - 1, 400).astype(int))
    return steps[chosen], means[chosen]


def draw(title: str, runs: Sequence[Learned], last: int, to: Path) -> None:
    """Write a small picture of the curves of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=90)
    for learned in runs:
        steps, means = curve(learned, last)
        axes.plot(steps, means, linewidth=1.2, label=f"seed {learned.seed}: {learned.score(last):,.0f}")
    axes.set(xlabel="environment steps", ylabel=f"mean return of {last} training episodes", title=title)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.tight_layout()
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to)
    pyplot.close(figure)
    print(f"curves: {to}")


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def report(learned: Learned, last: int) -> str:
    v4 = "" if learned.returns_v4 is None else f" ({mean(learned.returns_v4[-last:]):,.0f} in v4's reward)"
    return (
        f"  seed {learned.seed}: return {learned.score(last):,.0f}{v4} over the last {min(last, len(learned.returns))} "
        f"training episodes, {learned.total_env_steps:,} environment steps in {learned.wall:,.0f} s, {load()}"
    )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "configs" / "humanoid.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--env-steps", type=int, help="of each run; unset: what the file says")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as tinker-atropos run's"
    )
    parser.add_argument("--last", type=int, default=100, help="training episodes in a mean")
    parser.add_argument("--cleanrl", type=Path, help="checkout of CleanRL to run as well")
    parser.add_argument("--cleanrl-python", default=sys.executable, help="interpreter with CleanRL's own packages")
    parser.add_argument("--cleanrl-steps", type=int, default=100_000)
    parser.add_argument("--cleanrl-env", default="Humanoid-v4")
    parser.add_argument("--curves", type=Path, help="PNG to write; default: CONFIG.png in the folder of --keep")
    parser.add_argument("--keep", type=Path, help="folder for the run folders, which are deleted otherwise")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    extra = [part for setting in options.set for part in ("--set", setting)]
    if options.env_steps is not None:
        extra += ["--env-steps", str(options.env_steps)]
    runs: list[Learned] = []
    print(f"{options.config.name}, {load()}; {' '.join(f'{k}={v}' for k, v in THREADS.items())}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        output = (options.keep or Path(temporary)).resolve()
        for seed in options.seeds:
            runs.append(train(options.config, seed, extra, output))
            print(report(runs[-1], options.last), flush=True)
    curves = options.curves
    if curves is None and options.keep is not None:
        curves = options.keep / f"{options.config.stem}.png"
    if curves is not None:
        draw(options.config.stem, runs, options.last, curves)
    checks = returns_reached(runs, options.last)
    if options.cleanrl is not None:
        checks |= beside_cleanrl(runs, options)
    for name, held in checks.items():
        print(f"{'ok    ' if held else 'MISSED'} {name}")
    return 0 if all(checks.values()) else 1


def returns_reached(runs: Sequence[Learned], last: int) -> dict[str, bool]:
    """Return whether Humanoid's target is met, by its name; nothing for another task or a shorter run."""
    if any(learned.returns_v4 is None or learned.total_env_steps < PUBLISHED_STEPS for learned in runs):
        return {}
    met = all(learned.score(last) > CLEANRL_PUBLISHED for learned in runs)
    return {f"above CleanRL's published {CLEANRL_PUBLISHED:.0f} in v5's reward, each seed": met}


def beside_cleanrl(runs: Sequence[Learned], options: argparse.Namespace) -> dict[str, bool]:
    """Run CleanRL's script; return whether the target of wall time is met, by its name."""
    peer, steps, ours = cleanrl(options), runs[0].total_env_steps, mean(learned.wall for learned in runs)
    theirs = peer.scaled(steps)
    print(
        f"CleanRL {options.cleanrl_env}: {peer.steps:,} steps in {peer.wall:,.0f} s (return {peer.last:,.0f}), "
        f"{peer.rate:,.0f} steps/s, so {steps:,} in {theirs:,.0f} s; {load()}\n"
        f"ours took {ours:,.0f} s, {ours / theirs:.3f} of that"
    )
    return {"wall time at most 1/5 of CleanRL's": ours <= theirs / 5}


if __name__ == "__main__":
    sys.exit(main())
