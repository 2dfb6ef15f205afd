"""Lost requests and lost replies between the real SDK and a real server: nothing trained twice, nothing silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos.trainer import RunSpec
from tinker_atropos.trajectory import Batch, Group, SamplingParams, Segment, TaskRef, Trajectory
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.policy import open_policy
from tinker_atropos_tinker.trainer import TinkerTrainer

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("tinker_atropos_local_tinker")

PROMPT = np.arange(40, 52, dtype=np.int32)


class FakeFlakyNetwork:
    """A proxy that loses messages: `requests` never arrive, `replies` are lost once the work is done."""

    def __init__(self, target: str, *, requests: Counter[str], replies: Counter[str]) -> None:
        self.target, self.requests, self.replies = target, requests, replies
        self.url = ""

    async def handle(self, request: Any) -> Any:
        verb = request.path.rsplit("/", 1)[-1]
        body = await request.read()
        if self.requests[verb] > 0:
            self.requests[verb] -= 1
            return aiohttp.web.Response(status=503)
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in ("host", "content-length")
        }
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(request.method, self.target + request.path_qs, data=body, headers=headers) as answer,
        ):
            content = await answer.read()
        if self.replies[verb] > 0:
            self.replies[verb] -= 1
            request.transport.abort()
        kept = ("content-type", "content-encoding")
        passed = {key: value for key, value in answer.headers.items() if key.lower() in kept}
        return aiohttp.web.Response(status=answer.status, body=content, headers=passed)


@asynccontextmanager
async def flaky(target: str, **lost: Counter[str]) -> AsyncIterator[FakeFlakyNetwork]:
    import aiohttp.web

    network = FakeFlakyNetwork(target, **lost)
    app = aiohttp.web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", network.handle)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    network.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield network
    finally:
        await runner.cleanup()


async def two_steps(url: str, model: Path, folder: Path, said: list[str]) -> list[list[float]]:
    """Train two steps; return the log-probabilities of what was sampled, before and after."""
    made = TinkerConfig(base_url=url, lora_rank=4, learning_rate=1e-2)
    trainer = TinkerTrainer(made)
    rows = []
    try:
        ref = await trainer.start(RunSpec("run", folder, made, str(model), 0, True, 0, said.append), None)
        for step in range(2):
            samples = await (await open_policy(ref, made)).sample(PROMPT, SamplingParams(6, seed=step, stop=[]), 2)
            rows += [sample.logprobs.tolist() for sample in samples]
            trajectories = []
            for sample, reward in zip(samples, (1.0, 0.0), strict=True):
                tokens = np.concatenate([PROMPT, sample.tokens])
                logprobs = np.concatenate([np.zeros(len(PROMPT), dtype=np.float32), sample.logprobs])
                segment = Segment(tokens, logprobs, np.arange(len(tokens)) >= len(PROMPT))
                trajectories.append(Trajectory((segment,), (reward,), ("length",), (ref,), ()))
            group = Group(f"g{step}", TaskRef("train", step, 0), tuple(trajectories))
            ref = (await trainer.update(Batch(step, (group,)))).ref
        samples = await (await open_policy(ref, made)).sample(PROMPT, SamplingParams(6, seed=9, stop=[]), 2)
        rows += [sample.logprobs.tolist() for sample in samples]
    finally:
        await trainer.close()
    return rows


async def test_lost_messages_change_nothing_and_are_shown(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    undisturbed = await two_steps(server.url, tiny_model, tmp_path, [])
    said: list[str] = []
    verbs = ("forward_backward", "optim_step", "asample", "save_weights_for_sampler")
    async with flaky(server.url, requests=Counter(verbs), replies=Counter(verbs)) as network:
        disturbed = await two_steps(network.url, tiny_model, tmp_path, said)
        assert not +network.requests
        assert not +network.replies
    assert disturbed == undisturbed
    assert any("trying again" in line for line in said)
