"""Fakes around real script processes: a fake sink, a fake endpoint, a fake trajectory API over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tinker_atropos.external import RunInfo
from tinker_atropos.trajectory import Group, Segment, TaskRef, Trajectory
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_run import ScriptEnvironment
from tinker_atropos_atropos.script_watch import Seen


def group(scores: list[float], id: str = "g", advantages: bool = False) -> Group:
    tokens = np.arange(4, dtype=np.int32)
    own = np.ones(4, np.float32) if advantages else None
    segment = Segment(tokens, np.zeros(4, np.float32), np.array([False, False, True, True]), own)
    trajectories = tuple(Trajectory((segment,), (score,), ("stop",), (), ()) for score in scores)
    return Group(id, TaskRef("train", 0, 0), trajectories)


@pytest.fixture(scope="session")
def make_group() -> Any:
    return group


class FakeSink:
    """Keeps what arrives. `step` is set by the test."""

    def __init__(self, info: RunInfo) -> None:
        self.info, self.step, self.waiting = info, 0, 0
        self.groups: list[Group] = []
        self.discarded: list[tuple[Group, str]] = []
        self.lines: list[str] = []

    async def put(self, group: Group, *, wait: float | None = None) -> Any:
        self.groups.append(group)
        self.waiting += len(group.trajectories)
        return "accepted"

    async def discard(self, group: Group, reason: str) -> None:
        self.discarded.append((group, reason))

    def metrics(self, values: Any) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


class FakeEndpoint:
    """An address that nobody serves."""

    url = "http://127.0.0.1:9/v1"
    token: str | None = "secret"
    model = "tiny"
    tokenizer = "/models/tiny"
    context_length: int | None = 512

    def seen(self) -> dict[str, int]:
        return {}

    async def ready(self) -> None:
        pass

    def prove(self, tokens: Any, logprobs: Any = None) -> Any:
        raise NotImplementedError


@pytest.fixture
def endpoint() -> FakeEndpoint:
    return FakeEndpoint()


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(
        name="run",
        folder=tmp_path / "run",
        seed=0,
        starting_step=0,
        total_steps=2,
        batch_size=8,
        group_size=4,
        max_token_length=256,
        checkpoint_interval=10,
        steps_per_eval=25,
        filter_equal=True,
        max_staleness=1,
    )


@pytest.fixture
def sink(info: RunInfo) -> FakeSink:
    return FakeSink(info)


class FakeApi:
    """As much of the trajectory API as a script's first steps need, over a real socket; every post is taken."""

    def __init__(self, sink: Any) -> None:
        self.sink, self.url = sink, ""
        self.seen_of: dict[str, Seen] = {}

    def seen(self) -> dict[str, Seen]:
        return self.seen_of

    async def register(self, request: web.Request) -> web.Response:
        name = (await request.json())["desired_name"]
        self.seen_of[name] = Seen(registered=True)
        return web.json_response({"status": "success", "env_id": len(self.seen_of) - 1, "wandb_name": f"{name}_0"})

    async def post(self, request: web.Request) -> web.Response:
        posted = await request.json()
        name = list(self.seen_of)[posted["env_id"]]
        before = self.seen_of[name]
        self.seen_of[name] = Seen(True, before.posted + 1)
        await self.sink.put(group(posted["scores"], f"{name}-{before.posted}"))
        return web.json_response({"status": "received"})


@contextlib.asynccontextmanager
async def start_fake_api(endpoint: Any, sink: Any, *, host: str, port: int) -> AsyncIterator[FakeApi]:
    api = FakeApi(sink)
    application = web.Application()
    application.router.add_post("/register-env", api.register)
    application.router.add_post("/scored_data", api.post)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    address = runner.addresses[0]
    api.url = f"http://{address[0]}:{address[1]}"
    try:
        yield api
    finally:
        await runner.cleanup()


CLIENT = """
import json, os, subprocess, sys, time, urllib.request, yaml
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
url = config["env"]["rollout_server_url"]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def post(path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(opener.open(request))

def register():
    return post("/register-env", {"desired_name": config["env"]["wandb_name"]})["env_id"]
"""


@pytest.fixture
def write_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a script that talks to the API as an Atropos script does; a stand-in `atroposlib` is importable."""
    (tmp_path / "lib" / "atroposlib").mkdir(parents=True)
    (tmp_path / "lib" / "atroposlib" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "lib"), *sys.path]))

    def write(body: str, name: str = "some_env.py") -> Path:
        path = tmp_path / name
        path.write_text(CLIENT + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def make_environment() -> Callable[..., ScriptEnvironment]:
    def make(*paths: Path, **settings: Any) -> ScriptEnvironment:
        content = {"scripts": [{"path": str(path)} for path in paths], "stop_timeout": 2.0, **settings}
        return ScriptEnvironment(AtroposConfig.model_validate_json(json.dumps(content)), start_fake_api)

    return make


@pytest.fixture
def until() -> Any:
    async def wait(true: Callable[[], Any], running: asyncio.Task[Any] | None = None) -> Any:
        for _ in range(3000):
            if running is not None and running.done():
                running.result()
            if value := true():
                return value
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come true")

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    def check(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    return check
