from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tinker.types import SupportedModel
from tinker_atropos.errors import ConfigError, RunError
from tinker_atropos.trajectory import PolicyRef
from tinker_atropos_tinker import service
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.service import Address, address, check_model, context_length, off_loop, open_sampler

WHERE = Address("https://example.org", None)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, SupportedModel]:
    """What a service is taken to have said of its models."""
    known = {"Qwen/Qwen3-8B": SupportedModel(model_name="Qwen/Qwen3-8B", max_context_length=32768)}
    monkeypatch.setitem(service._models, WHERE, known)
    return known


async def test_the_context_of_a_model_is_the_service_s(offered: dict[str, SupportedModel]) -> None:
    assert await context_length(WHERE, "Qwen/Qwen3-8B") == 32768
    assert await context_length(WHERE, "/models/of/a/server/with/one") == 32768
    offered["acme/other"] = SupportedModel(model_name="acme/other")
    assert await context_length(WHERE, "acme/other") is None
    assert await context_length(WHERE, "/models/unknown") is None


async def test_a_model_that_can_not_be_trained_is_refused_with_the_near_one(offered: dict[str, SupportedModel]) -> None:
    await check_model(WHERE, "Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="Did you mean 'Qwen/Qwen3-8B'"):
        await check_model(WHERE, "Qwen/Qwen3-8b")
    offered["Qwen/Qwen3-8B"] = SupportedModel(model_name="Qwen/Qwen3-8B", trainable=False)
    with pytest.raises(ConfigError, match="It trains: none"):
        await check_model(WHERE, "Qwen/Qwen3-8B")


def test_a_local_server_never_sees_the_user_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker_atropos_local_tinker")
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    local = address(TinkerConfig(local=True), "http://127.0.0.1:5")
    assert local.url == "http://127.0.0.1:5"
    assert local.key not in (None, "tml-secret")
    assert address(TinkerConfig()) == Address(None, None)


async def test_a_policy_of_another_trainer_is_refused() -> None:
    with pytest.raises(RunError, match="none of the Tinker trainer"):
        await open_sampler(PolicyRef("run", 0, 0, "file:///weights"), WHERE)


async def test_a_call_off_the_loop_brings_its_answer_or_its_error() -> None:
    def fail() -> None:
        raise KeyError("x")

    assert await off_loop(lambda: 3) == 3
    with pytest.raises(KeyError):
        await off_loop(fail)
    waiting = asyncio.create_task(off_loop(lambda: Path.cwd()))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
