"""Runs one command in a process group of its own and ends all it started when asked, or when its parent is gone.

Started as a file by another process, with the standard library alone: `python script_guard.py FD SECONDS COMMAND…`.
`FD` is the reading end of a pipe that the parent holds: end of file there means "end it", be it that the parent closed
it or was killed. Exits as the command did (128 + the number of a signal that ended it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
NO_COMMAND = 127


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe does."""
    pipe, grace, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever wants an end closes the pipe
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become ours, so that they can be found and ended
    child = _start(command, pipe)
    code = None
    while code is None:
        code = _reap(child)
        if code is None and select.select([pipe], [], [], POLL_SECONDS)[0]:
            code = _end(child, grace)
    _sweep(child)
    return code


def _start(command: list[str], pipe: int) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
        if os.getppid() != guard:
            os._exit(1)
        os.close(pipe)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"{command[0]!r} can't be started: {error}\n".encode())
    os._exit(NO_COMMAND)


def _end(child: int, grace: float) -> int:
    """Ask the group to end, then insist."""
    _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        code = _reap(child)
        if code is not None:
            return code
        time.sleep(POLL_SECONDS)
    _signal_group(child, signal.SIGKILL)
    while True:
        code = _reap(child)
        if code is not None:
            return code
        time.sleep(POLL_SECONDS)


def _reap(child: int) -> int | None:
    """Reap whatever ended; return the command's exit code once it has."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1  # cannot be: the command is reaped only here
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _sweep(child: int) -> None:
    """End what the command left: the rest of its group, and every orphan, also one that left the group."""
    _signal_group(child, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except (OSError, ValueError):  # not Linux
        return []


def _signal_group(child: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child, number)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the pipe and the group alone must do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
