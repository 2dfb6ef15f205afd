"""Starts the server as a child process that ends with its parent, `kill -9` included."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tinker_atropos.errors import ConfigError, PluginError, TinkerAtroposError, TrainerError

from tinker_atropos_local_tinker.serving import QUIET_THREADS

READY = "listening on "
POLL_SECONDS = 0.05
STOP_SECONDS = 15.0


class LocalServer:
    """A running server: `url` for the SDK's `base_url`, `pid`, `store` and `log`. A context manager that closes it."""

    def __init__(self, process: subprocess.Popen[str], pipe: int, url: str, store: Path, log: Path) -> None:
        self._process = process
        self._pipe: int | None = pipe
        self.url = url
        self.pid = process.pid
        self.store = store
        self.log = log

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the server and wait until it has ended; closing twice is fine."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            _stop(self._process, pipe)

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_local_server(
    store: Path,
    *,
    model: str,
    port: int = 0,
    deterministic: bool = False,
    threads: int | None = None,
    device: str = "auto",
    log: Path,
    say: Callable[[str], None] | None = None,
    timeout: float = 1800.0,
) -> LocalServer:
    """Start the server on a loopback port, a free one by default, and return once it answers.

    `say` gets the child's log lines while it starts (fetching a model can take minutes). Raises `ConfigError` where the
    child refuses its settings, `TrainerError` where it dies or isn't ready in `timeout` seconds; both quote the log.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log_file = log.open("ab")
    except OSError as error:
        raise ConfigError(f"log {log}: {error.strerror or error}; give a path that can be written") from error
    start = log_file.tell()
    read_end, write_end = os.pipe()  # neither is inherited by other children: Python closes them on exec
    command = [sys.executable, "-m", "tinker_atropos_local_tinker", "--store", str(store), "--model", model]
    command += ["--port", str(port), "--device", device, "--parent-pipe", str(read_end)]
    command += ["--deterministic"] if deterministic else []
    command += ["--threads", str(threads)] if threads is not None else []
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            pass_fds=(read_end,),
            env={**QUIET_THREADS, **os.environ},
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the server in its own time
        )
    finally:
        os.close(read_end)
        log_file.close()
    try:
        url = _wait_until_ready(process, log, start, say, timeout)
    except BaseException:
        _stop(process, write_end)
        raise
    return LocalServer(process, write_end, url, store, log)


def _wait_until_ready(
    process: subprocess.Popen[str], log: Path, start: int, say: Callable[[str], None] | None, timeout: float
) -> str:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_drain, args=(process.stdout, lines), daemon=True).start()
    deadline = time.monotonic() + timeout
    said = start
    while True:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=POLL_SECONDS)
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
        fresh, said = _read_lines(log, said)
        for line in fresh if say is not None else ():
            say(line)  # type: ignore[misc]
        code = process.poll()
        if code is not None:
            raise _death(code, log, start)
        if time.monotonic() > deadline:
            raise TrainerError(f"the local Tinker server was not ready after {timeout:.0f} s:\n{_tail(log, start)}")


def _drain(stream: object, lines: queue.Queue[str]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.put(line)


def _read_lines(log: Path, start: int) -> tuple[list[str], int]:
    """Return the whole lines after byte `start`, and where they end."""
    with log.open("rb") as file:
        file.seek(start)
        raw = file.read()
    whole = raw[: raw.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), start + len(whole)


def _tail(log: Path, start: int, count: int = 12) -> str:
    lines, _ = _read_lines(log, start)
    return "\n".join([*lines[-count:], f"(all of it: {log})"])


def _death(code: int, log: Path, start: int) -> TinkerAtroposError:
    lines, _ = _read_lines(log, start)
    refusal = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code == 2 and refusal:
        return ConfigError(refusal[-1])
    if any("No module named" in line for line in lines):
        return PluginError(f"the local Tinker server lacks a package:\n{_tail(log, start)}")
    return TrainerError(f"the local Tinker server ended with code {code} before it was ready:\n{_tail(log, start)}")


def _stop(process: subprocess.Popen[str], pipe: int) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(OSError):
        os.close(pipe)
