r"""Compares an expression with a number by math-verify, in a child process that is killed when it takes too long.

math-verify evaluates with sympy, which some inputs keep busy without end, inside one C call that no exception and no
thread can interrupt; its own time limit is a signal, which works in a main thread only. So it runs in a child that the
kernel ends after `CPU_SECONDS` of processor time: a busy machine doesn't change a grade, and the event loop of a
rollout never waits. The child starts with the first expression (plain numbers never come here) and ends with this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from tinker_atropos.errors import RunError

CPU_SECONDS = 2.0
WALL_SECONDS = 60.0  # for platforms without processor-time limits, and a child that sleeps
MEMORY_BYTES = 2 * 1024**3
_REMEMBERED = 4096


class Verifier:
    """One child process, started on first use and again after it was killed. One question at a time."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._wall_seconds = wall_seconds
        self._process: subprocess.Popen[str] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._known: dict[tuple[str, Fraction], bool | None] = {}

    async def equal(self, expression: str, value: Fraction) -> bool | None:
        """Return whether they are equal; None if that took too long. Raises `RunError` without math-verify."""
        key = (expression, value)
        if key not in self._known:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="gsm8k-verifier")
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, expression, value)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = answer
        return self._known[key]

    async def close(self) -> None:
        """End the child; a later question starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.shutdown)
        self._end()

    def _ask(self, expression: str, value: Fraction) -> bool | None:
        reply = self._line(self._running(), json.dumps([expression, value.numerator, value.denominator]))
        if reply == "":
            self._end()
            return None
        return reply.strip() == "1"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        command = [sys.executable, "-P", "-m", "tinker_atropos_gsm8k.verifier", str(self._cpu_seconds)]
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._process = process
        if self._line(process, "") == "":
            self._end()
            raise RunError(
                f"the child process that grades with math-verify did not start (exit code {process.returncode}); run "
                f"`{sys.executable} -m tinker_atropos_gsm8k.verifier` to see why, or `pip install math-verify`"
            )
        return process

    def _line(self, process: subprocess.Popen[str], question: str) -> str:
        """Send a question and return the line that answers it, or an empty string if the child is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._wall_seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            if question:
                process.stdin.write(question + "\n")
                process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return ""
        finally:
            timer.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _serve(cpu_seconds: float) -> None:
    """Answer `[expression, numerator, denominator]` lines with 1 or 0 until the input ends."""
    import signal

    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Rational

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        expression, numerator, denominator = json.loads(line)
        _limit(cpu_seconds)
        try:
            parsed = parse(
                f"\\boxed{{{expression}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
            )
            equal = bool(parsed) and bool(verify(Rational(numerator, denominator), parsed[0], timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):
            equal = False
        _limit(0.0)
        print(int(equal), flush=True)


def _limit(cpu_seconds: float) -> None:
    """Have the kernel end this process after so much processor time from now; 0 takes the limit back."""
    import signal

    if hasattr(signal, "setitimer"):  # not on Windows, where the parent's clock alone decides
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal, unhandled, ends the process


if __name__ == "__main__":
    _serve(float(sys.argv[1]) if len(sys.argv) > 1 else CPU_SECONDS)
