"""The trajectory API and the trainer are killed at random moments; every acknowledged group ends exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.contract_tests.redis_server import RedisServer, find_servers
from tinker_atropos.rollout.records import read_records
from tinker_atropos.state import open_state
from tinker_atropos.testing import check_ledger

from .conftest import quiet_environment

pytest.importorskip("tinker_atropos_atropos")

STEPS = 12
GROUP = 4
BATCH = 8
DEATHS = int(os.environ.get("TINKER_ATROPOS_DEATHS", "4"))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def ask(url: str, body: Any = None, timeout: float = 60.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


class Client(threading.Thread):
    """Samples at the trainer's endpoint and posts groups, repeating each until the API acknowledges it."""

    def __init__(self, number: int, api: str, inference: str, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._rng, self._api, self._inference, self._over = random.Random(number), api, inference, over
        self.acknowledged: list[tuple[int, ...]] = []
        self.refused: list[str] = []

    def run(self) -> None:
        while not self._over.is_set():
            prompt = [self._rng.randrange(3, 60) for _ in range(12)]
            try:
                body = self._group(prompt)
            except (OSError, ValueError):  # the trainer is dead just now
                time.sleep(0.2)
                continue
            while not self._over.is_set():
                try:
                    if ask(f"{self._api}/scored_data", body)["status"] in ("received", "buffered"):
                        self.acknowledged.append(tuple(body["tokens"][0]))
                        break
                except urllib.error.HTTPError as error:
                    if error.code < 500:
                        self.refused.append(error.read().decode())
                        break
                except (OSError, ValueError):  # the API is dead just now
                    pass
                time.sleep(0.2)

    def _group(self, prompt: list[int]) -> dict[str, Any]:
        parameters = {"n": GROUP, "max_new_tokens": 6, "temperature": 1.0}
        answers = ask(
            f"{self._inference}/generate",
            {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True},
        )
        sampled = [[token for _, token, *_ in a["meta_info"]["output_token_logprobs"]] for a in answers]
        return {
            "tokens": [prompt + tokens for tokens in sampled],
            "masks": [[-100] * len(prompt) + tokens for tokens in sampled],
            "scores": [float(place % 2) for place in range(len(sampled))],
        }


class Service:
    """A command that is started again when it was killed."""

    def __init__(self, log: Path, first: list[str], again: list[str], cwd: Path) -> None:
        self._log, self._commands, self._cwd = log, (first, again), cwd
        self.starts = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tinker_atropos", *self._commands[min(self.starts, 1)]]
        self.starts += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(command, cwd=self._cwd, env=quiet_environment(), stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._start()


def test_every_acknowledged_group_ends_exactly_once(tiny_model: Path, tmp_path: Path) -> None:
    if not find_servers():
        pytest.skip("no Redis server is installed")
    with RedisServer(tmp_path / "redis") as redis:
        _survive(redis, tiny_model, tmp_path)


def _survive(redis: RedisServer, tiny_model: Path, tmp_path: Path) -> None:
    api_port, endpoint_port = free_port(), free_port()
    api, inference = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{endpoint_port}"
    serve = ["run-api", "--port", str(api_port), "--state", redis.url, "--run", "crash"]
    train = ["run", "--env", "atropos", "--trainer", "tinker", "--local", "--model", str(tiny_model)]
    settings = {
        "env.api_url": api,
        "env.endpoint_port": endpoint_port,
        "env.ensure_scores_are_not_same": "false",
        "env.steps_per_eval": 0,
        "rollout.max_staleness": 6,
        "trainer.save_checkpoint_interval": 2,
        "trainer.learning_rate": 1e-3,
    }
    for path, value in settings.items():
        train += ["--set", f"{path}={value}"]
    sizes = ["--steps", str(STEPS), "--group-size", str(GROUP), "--batch-size", str(BATCH), "--name", "crash"]
    run = tmp_path / "runs" / "crash"
    over = threading.Event()
    clients = [Client(number, api, inference, over) for number in range(2)]
    services: list[Service] = []
    try:
        services.append(Service(tmp_path / "api.log", serve, serve, tmp_path))
        services.append(
            Service(tmp_path / "run.log", [*train, *sizes], ["run", "--resume", "--name", "crash"], tmp_path)
        )
        for client in clients:
            client.start()
        _disturb(services, run, tmp_path)
    finally:
        over.set()
        for service in services:
            service.process.kill()
            service.process.wait()
    for client in clients:
        client.join(30)

    assert not [answer for client in clients for answer in client.refused]
    check_ledger(run / "tinker" / "journal.jsonl", run)
    ended = Counter(_key(record) for path in run.glob("rollouts/step-*.gz") for record in read_records(path))
    assert max(ended.values()) == 1, "a group ended twice"
    waiting = _waiting(redis.url)
    acknowledged = [key for client in clients for key in client.acknowledged]
    assert len(acknowledged) > STEPS * BATCH // GROUP // 2
    lost = [key for key in acknowledged if key not in ended and key not in waiting]
    assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged groups are gone"
    assert not [key for key in acknowledged if key in ended and key in waiting]


def _disturb(services: list[Service], run: Path, folder: Path) -> None:
    """Kill one of the services at random moments of its work; return when the run has ended by itself."""
    rng, deadline = random.Random(5), time.monotonic() + 900
    killed, last = 0, 0
    while time.monotonic() < deadline:
        api, trainer = services
        assert api.process.poll() is None, (folder / "api.log").read_text()[-3000:]
        code = trainer.process.poll()
        if code is not None:
            assert code == 0, (folder / "run.log").read_text()[-3000:]
            assert killed == DEATHS, "the run ended before it was disturbed"
            return
        steps = _steps(run)
        if killed < DEATHS and steps > last:
            time.sleep(rng.random() * 1.5)
            services[killed % 2].kill()
            killed, last = killed + 1, max(_steps(run) - 1, last)
        time.sleep(0.1)
    raise AssertionError(f"no end within 900 s: {(folder / 'run.log').read_text()[-3000:]}")


def _steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def _key(record: dict[str, Any]) -> tuple[int, ...]:
    return tuple(record["trajectories"][0]["segments"][0]["tokens"])


def _waiting(url: str) -> set[tuple[int, ...]]:
    import asyncio

    from tinker_atropos_atropos.stored import json_of

    async def read() -> set[tuple[int, ...]]:
        state = await open_state(url, "crash", 100_000)
        try:
            return {tuple(json.loads(json_of(item))["tokens"][0]) for item in await state.pending()}
        finally:
            await state.close()

    return asyncio.run(read())
