"""One foreign script as a process: started with its log, watched, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinker_atropos.errors import ConfigError, RunError

from tinker_atropos_atropos import script_guard

TAIL_BYTES = 65536
LOG_BYTES = 32 * 1024**2
"""At these a log begins anew, and the one before is kept: Atropos writes several lines ten times a second."""

GUARD_SECONDS = 10.0
"""Beyond a script's own time to end, for its guard to find the orphans."""


class ScriptProcess:
    """A running script. `close` ends it and its children; so does the end of this process, `kill -9` included."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], pipe: int, log: Path, start: int, stop: float
    ) -> None:
        self.name, self.log = name, log
        self._process, self._start, self._stop = process, start, stop
        self._pipe: int | None = pipe

    @property
    def code(self) -> int | None:
        """The script's exit code, None while it runs; 128 + the number of a signal that ended it."""
        return self._process.poll()

    def tail(self, lines: int) -> list[str]:
        """Return the last lines that it wrote since it was started."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                start = self._start if self._start <= end else 0  # it began anew
                file.seek(max(start, end - TAIL_BYTES))
                raw = file.read()
        except OSError:
            return []
        return [line.rstrip() for line in raw.decode(errors="replace").splitlines() if line.strip()][-lines:]

    async def close(self) -> None:
        """End it: SIGTERM to its group, SIGKILL after its time; closing twice is fine."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with contextlib.suppress(OSError):
                os.close(pipe)
        # Ending it goes on where this is cancelled: the guard has been told.
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        try:
            self._process.wait(self._stop + GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the script dies with its guard
            self._process.wait()


def start_script(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    stop_seconds: float,
) -> ScriptProcess:
    """Start `command` in `folder`, its output appended to `log`. Raises `ConfigError`, `RunError` if that can't be."""
    if not folder.is_dir():
        raise ConfigError(f"{name}: the folder {str(folder)!r} to run in does not exist")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    except OSError as error:
        raise RunError(f"{name}: its log {log} can't be written: {error.strerror or error}") from error
    start = output.tell()
    read_end, write_end = os.pipe()  # neither is inherited by other children: Python closes them on exec
    guard = [sys.executable, "-I", "-S", str(Path(script_guard.__file__)), str(read_end), str(stop_seconds)]
    guard += [str(log.absolute()), str(LOG_BYTES)]
    try:
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(read_end,),
            cwd=folder,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for this process, which then ends its scripts in its own time
        )
    except OSError as error:
        os.close(write_end)
        raise RunError(f"{name}: can't be started: {error.strerror or error}") from error
    finally:
        os.close(read_end)
        output.close()
    return ScriptProcess(name, process, write_end, log, start, stop_seconds)


def exit_words(code: int) -> str:
    """Return what an exit code says, for a message."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
