"""How long `tinker-atropos --help` takes over a bare interpreter: medians of alternating runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

RUNS = 15


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    script = Path(sys.executable).with_name("tinker-atropos")
    ours, bare = [str(script), "--help"], [sys.executable, "-c", "pass"]
    for command in (ours, bare):
        seconds(command)  # warm the file cache
    pairs = [(seconds(ours), seconds(bare)) for _ in range(RUNS)]
    help_time, bare_time = median(a for a, _ in pairs), median(b for _, b in pairs)
    print(
        f"--help {help_time * 1e3:.0f} ms, python -c pass {bare_time * 1e3:.0f} ms: "
        f"{(help_time - bare_time) * 1e3:.0f} ms more (target: under 120), median of {RUNS}"
    )


if __name__ == "__main__":
    main()
