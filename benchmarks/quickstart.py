"""What a newcomer waits for: `make run` in a fresh clone of HEAD and a new environment, split into its parts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # The model's cache is new too; pip's own cache and settings stay.
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "project"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment["TINKER_ATROPOS_CACHE"] = str(Path(temporary) / "cache")
        done = subprocess.run(["make", "run"], cwd=clone, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("time:", "evaluation reward"))]
    print("\n".join(lines) if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
