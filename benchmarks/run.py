"""`make bench`: every benchmark, one after the other, each beside its peer. Run it with nothing else going on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("startup", "sampling", "overlap", "state", "quickstart")


def main() -> int:
    asked = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in asked if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in asked:
        print(f"== {name}", flush=True)
        failed |= subprocess.run([sys.executable, str(HERE / f"{name}.py")]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
