"""The child process of a pool: reads one JSON value a line, calls the function, answers a line; see `pool.py`.

It is told `module:function`, processor seconds a call and bytes of address space. The kernel ends it where a call takes
more processor time, which no code inside can put off; memory beyond the limit is a `MemoryError` inside.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

FAILED = "failed"
DONE = "done"
LEAVING = "leaving"

# What a cache or a fragmented heap may keep between calls; a worker above it is replaced.
KEPT_SHARE = 0.5


def serve(
    function: Callable[[Any], Any], cpu_seconds: float, memory: int, questions: IO[str], answers: IO[str]
) -> None:
    """Answer until the questions end, or until so much memory is kept that a new process is the better one."""
    _answer(answers, DONE, os.getpid())
    for line in questions:
        question = json.loads(line)
        # Of all processor time, user and system; its signal, unhandled, ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            kind, value = DONE, function(question)
        except (Exception, RecursionError, MemoryError) as error:
            kind, value = FAILED, f"{type(error).__name__}: {str(error)[:200]}"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        leaving = resident() > KEPT_SHARE * memory
        _answer(answers, kind, value, *((LEAVING,) if leaving else ()))
        if leaving:
            return


def resident() -> int:
    """Return the bytes this process has in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _answer(answers: IO[str], *parts: Any) -> None:
    answers.write(json.dumps(parts) + "\n")
    answers.flush()


def main(target: str, cpu_seconds: str, memory: str) -> None:
    """Load the function, then serve it on the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not pass for an answer
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses; there the time limit alone decides
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(function, float(cpu_seconds), int(memory), os.fdopen(0, encoding="utf-8"), answers)


if __name__ == "__main__":
    main(*sys.argv[1:4])
