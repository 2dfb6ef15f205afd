"""Runs one command in a process group of its own and ends all it started when asked, or when its parent is gone.

Started as a file by another process, with the standard library alone:
`python script_guard.py FD SECONDS LOG BYTES COMMAND…`. `FD` is the reading end of a pipe that the parent holds: end of
file there means "end it", be it that the parent closed it or was killed. What the command says goes to `LOG`; at
`BYTES` the log begins anew, and the one before is kept as `LOG.1`. Exits as the command did (128 + the number of a
signal that ended it).
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
SWEEP_SECONDS = 5.0
NO_COMMAND = 127
CHUNK = 65536


class Log:
    """What the command says, bounded. A log that can't be written is no reason to end the command."""

    def __init__(self, path: str, limit: int, source: int) -> None:
        self._path, self._limit, self.source = path, limit, source
        self.open = True
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.set_blocking(source, False)

    def take(self) -> bool:
        """Move what is there; return whether there was anything."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size + len(data) > self._limit:
                os.replace(self._path, f"{self._path}.1")
                os.close(self._file)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._file, data)
        return True


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe does."""
    pipe, grace = int(arguments[0]), float(arguments[1])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever wants an end closes the pipe
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become ours, so that they can be found and ended
    said, saying = os.pipe()
    log = Log(arguments[2], int(arguments[3]), said)
    child = _start(arguments[4:], pipe, saying)
    os.close(saying)
    code = None
    while code is None:
        wanted = _wait(log, pipe)
        code = _reap(child)
        if code is None and wanted:
            code = _end(child, grace, log)
    _sweep(child)
    while log.open and log.take():
        pass
    return code


def _start(command: list[str], pipe: int, saying: int) -> int:
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
        for stream in (1, 2):
            os.dup2(saying, stream)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"{command[0]!r} can't be started: {error}\n".encode())
    os._exit(NO_COMMAND)


def _wait(log: Log, pipe: int | None) -> bool:
    """Wait a little, moving what is said; return whether the end is wanted."""
    watched = [*([pipe] if pipe is not None else []), *([log.source] if log.open else [])]
    ready = select.select(watched, [], [], POLL_SECONDS)[0]
    if log.source in ready:
        log.take()
    return pipe in ready


def _end(child: int, grace: float, log: Log) -> int:
    """Ask the group to end, then insist."""
    _signal_group(child, signal.SIGTERM)
    deadline, insisted = time.monotonic() + grace, False
    while (code := _reap(child)) is None:
        if not insisted and time.monotonic() >= deadline:
            _signal_group(child, signal.SIGKILL)
            insisted = True
        _wait(log, None)
    return code


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
    deadline = time.monotonic() + SWEEP_SECONDS
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
