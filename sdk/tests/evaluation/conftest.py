"""A fake OpenAI-compatible endpoint that counts what it answered, and a file environment to ask it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = """
from tinker_atropos import Task, single_turn

env = single_turn(
    "count",
    tasks=lambda split: [Task(f"How many? {number}", number) for number in range(12 if split == "test" else 0)],
    reward={
        "right": lambda completion, task: completion.text.strip() == str(task.answer),
        "short": lambda completion, task: len(completion.text) < 3,
    },
    weights={"right": 1.0, "short": 0.0},
)
"""


@dataclass
class FakeEndpoint:
    """What the fake server does and saw. `say(path, body)` gives the text of an answer, `refuse(body)` a reason
    to refuse with HTTP 400.

    `script` holds what the next requests meet instead, one each: a status, `drop` (the connection ends without a word)
    or `garbage`. After `hold_after` answers all further requests wait until `released`.
    """

    url: str = ""
    say: Callable[[str, dict[str, Any]], str] = lambda path, body: "7"
    finish: str = "stop"
    refuse: Callable[[dict[str, Any]], str] = lambda body: ""
    script: list[int | str] = field(default_factory=list)
    always: int | None = None
    hold_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    key: str | None = None
    models: list[str] | None = field(default_factory=lambda: ["fake-1"])
    usage: bool = True
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeEndpoint

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.headers.append(dict(self.headers))
        if self._refused():
            return
        if self.fake.models is None:
            self._send(404, {"error": {"message": "not here"}})
        else:
            self._send(200, {"data": [{"id": name} for name in self.fake.models]})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.requests.append((self.path, body))
            fake.headers.append(dict(self.headers))
            trouble = fake.script.pop(0) if fake.script else fake.always
            held = fake.hold_after is not None and sum(fake.answered.values()) >= fake.hold_after
            if trouble is None and not held:
                fake.answered[question(self.path, body)] += 1
        if held and not fake.released.wait(60):
            return
        if held:
            with fake.lock:
                fake.answered[question(self.path, body)] += 1
        if self._refused():
            return
        if trouble == "drop":
            self.close_connection = True
            return
        if trouble == "garbage":
            self._send(200, {"hello": "from a proxy"})
            return
        if isinstance(trouble, int):
            self._send(trouble, {"error": {"message": "planned trouble"}})
            return
        if said := fake.refuse(body):
            self._send(400, {"error": {"message": said}})
            return
        text = fake.say(self.path, body)
        choice: dict[str, Any] = {"index": 0, "finish_reason": fake.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if "chat" in self.path else {"text": text}
        usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 2}} if fake.usage else {}
        self._send(200, {"choices": [choice], **usage})

    def _refused(self) -> bool:
        if self.fake.key is None or self.headers.get("Authorization") == f"Bearer {self.fake.key}":
            return False
        self._send(401, {"error": {"message": "no such key"}})
        return True

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client was killed
            self.close_connection = True


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def question(path: str, body: dict[str, Any]) -> str:
    return json.dumps([path, body], sort_keys=True)


@pytest.fixture
def fake_endpoint() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    server = QuietServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield fake
    fake.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment_file(tmp_path: Path) -> Path:
    path = tmp_path / "count_env.py"
    path.write_text(ENVIRONMENT)
    return path


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("OPENAI_API_KEY", "TINKER_API_KEY")}


@pytest.fixture
def start_eval(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `tinker-atropos eval …` as a process in a folder of its own."""

    def start(*arguments: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tinker_atropos", "eval", *map(str, arguments)]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `tinker-atropos eval …` in this process; returns its code, stdout and stderr."""
    from tinker_atropos.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tinker_atropos.evaluation.endpoint.FIRST_PAUSE", 0.001)

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["eval", *map(str, arguments)])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, shown.out, shown.err

    return call


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    def wait(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not true():
            assert time.monotonic() < deadline, "never came true"
            time.sleep(0.02)

    return wait
