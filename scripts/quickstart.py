"""`make run`: train on small sums on this machine, then say where the time went.

Everything after `--` goes to `tinker-atropos run`. Exits with the code of that command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Train, then print the time split; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--began", type=float, default=time.time(), help="when the set-up began, seconds of the epoch")
    parser.add_argument("options", nargs="*", help="options of `tinker-atropos run`")
    arguments = parser.parse_args()

    started = time.time()
    options, metrics = plan(arguments.options)
    program = str(Path(sys.executable).with_name("tinker-atropos"))
    command = [program, "run", "-c", "configs/quickstart.yaml", "--local", *options]
    # A handler, unlike SIG_IGN, is not inherited: Ctrl-C reaches the run, which saves a checkpoint, while we wait.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    ended = time.time()
    if code == 0 and metrics is not None and metrics.is_file():
        print(time_split(metrics, arguments.began, started, ended))
    return code


def plan(options: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the options with a name for the run, and where its metrics will be; None where it does not begin one."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--name")
    known.add_argument("--output")
    known.add_argument("--set", action="append", default=[])
    known.add_argument("--dry-run", action="store_true")
    known.add_argument("--resume", action="store_true")
    asked, _ = known.parse_known_args([*options])
    settings = dict(text.partition("=")[::2] for text in asked.set)
    name = asked.name or settings.get("run.name")
    named = [*options]
    if name is None and not asked.resume:
        name = f"{time.strftime('quickstart-%Y%m%d-%H%M%S')}-{os.getpid()}"
        named += ["--name", name]
    if name is None or asked.dry_run or asked.resume:
        return named, None
    output = asked.output or settings.get("run.output") or "runs"
    return named, ROOT / Path(output).expanduser() / name / "metrics.jsonl"


def time_split(metrics: Path, began: float, started: float, ended: float) -> str:
    """Return the seconds of each part in words; `metrics` is a run's own file."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    before, last = rows[0], rows[-1]
    sampling = before["time"] - before.get("time/evaluation", 0.0)
    parts = {
        "set-up": started - began,
        "to the first sample asked for": sampling - started,
        "evaluation before training": before["time"] - sampling,
        f"training, {last['step']:.0f} steps": last["time"] - before["time"],
        "last checkpoint": ended - last["time"],
    }
    split = "; ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    return f"time: {split}; {ended - began:.0f} s in all"


if __name__ == "__main__":
    sys.exit(main())
