from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from tinker.types import SupportedModel
from tinker_atropos.errors import ConfigError, RunError, TrainerError
from tinker_atropos.trajectory import PolicyRef
from tinker_atropos_tinker import service
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.service import (
    Address,
    address,
    check_model,
    context_length,
    off_loop,
    open_sampler,
    refuse_unreachable,
)

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


class FakeSilentCatalogue:
    """Stands in for a REST client whose service took the question and never answers."""

    async def get_server_capabilities(self) -> None:
        await asyncio.Event().wait()


async def test_a_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(where: Address) -> FakeSilentCatalogue:
        return FakeSilentCatalogue()

    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(service, "rest_client", connected)
    with pytest.raises(TimeoutError, match=r"list of models: no answer from the service within 0\.1 s"):
        await context_length(WHERE, "acme/model")


async def test_whatever_listens_is_reachable_and_silence_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = Address(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        await refuse_unreachable(where)
    with pytest.raises(TrainerError, match="nothing answers at http"):
        await refuse_unreachable(where)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.usefixtures("no_proxy")
async def test_a_hosted_service_without_a_network_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*arguments: object, **options: object) -> list[object]:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    ways = r"https://\S+ can't be reached \(Temporary failure.*HTTPS_PROXY.*TINKER_BASE_URL.*--local"
    with pytest.raises(TrainerError, match=ways):
        await refuse_unreachable(Address(None, None))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    await refuse_unreachable(Address(None, None))


@pytest.mark.usefixtures("no_proxy")
async def test_a_name_server_that_is_silent_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait() and [])
    monkeypatch.setattr(service, "CONNECT_SECONDS", 0.1)
    try:
        with pytest.raises(TrainerError, match=r"example.org can't be reached \(no connection within 0.1 s\)"):
            await refuse_unreachable(WHERE)
    finally:
        release.set()
