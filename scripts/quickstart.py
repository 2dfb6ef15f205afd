"""`make run`: train on small sums on this machine, then say where the time went.

Everything after `--` goes to `tinker-atropos run`. Exits with the code of that command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Train, then print the time split; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--began", type=float, default=time.time(), help="when the set-up began, seconds of the epoch")
    parser.add_argument("options", nargs="*", help="options of `tinker-atropos run`")
    arguments = parser.parse_args()

    started = time.time()
    name = time.strftime("quickstart-%Y%m%d-%H%M%S")
    program = str(Path(sys.executable).with_name("tinker-atropos"))
    command = [program, "run", "-c", "configs/quickstart.yaml", "--local"]
    # A handler, unlike SIG_IGN, is not inherited: Ctrl-C reaches the run, which saves a checkpoint, while we wait.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run([*command, "--name", name, *arguments.options], cwd=ROOT, check=False).returncode
    ended = time.time()
    if code == 0:
        if shutil.which("tinker-atropos") is None:
            print(f"these commands are in {Path(sys.executable).parent}")
        print(time_split(ROOT / "runs" / name / "metrics.jsonl", arguments.began, started, ended))
    return code


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
