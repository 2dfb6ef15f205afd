"""Items a second through a State: put, leased in eights and committed, in memory and in Redis, beside SET and GET.

The peer is the same client with one SET and one GET of the same bytes for each item, on the same server in the same
run: what Redis takes for carrying them at all. The server writes each change to disk before it answers (`appendfsync
always`), as a run that must lose nothing wants it; `everysec` is measured too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis
from tinker_atropos.contract_tests.redis_server import RedisServer
from tinker_atropos.state import MemoryState, State, StoredItem
from tinker_atropos.state.codec import encode
from tinker_atropos.state.redis import RedisState

ROUNDS, LEASED, CLIENTS = 3, 8, 8
SIZES = {"64 kB": (64 << 10, 400), "1 MB": (1 << 20, 64)}


async def through_state(state: State[Any], items: list[StoredItem]) -> None:
    """Put by several clients at once while one trainer leases and commits."""
    fence = await state.fence()

    async def put(mine: list[StoredItem]) -> None:
        for item in mine:
            assert await state.put(item) == "accepted"

    async def train() -> None:
        for _ in range(len(items) // LEASED):
            leased = await state.lease(LEASED, fence)
            await state.commit([one.item.id for one in leased], fence)

    await asyncio.gather(train(), *(put(items[client::CLIENTS]) for client in range(CLIENTS)))


async def set_and_get(client: Redis, bodies: list[bytes]) -> None:
    """Move the same bytes without a State: each client sets a key, gets it and deletes it."""

    async def move(number: int) -> None:
        for body in bodies[number::CLIENTS]:
            await client.set(f"raw-{number}", body)
            await client.get(f"raw-{number}")
            await client.delete(f"raw-{number}")

    await asyncio.gather(*(move(number) for number in range(CLIENTS)))


async def seconds(work: Callable[[int], Awaitable[None]]) -> float:
    taken = []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        await work(number)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])  # the first one opens connections


async def measure(server: RedisServer, label: str, size: int, count: int) -> None:
    def items(number: int) -> list[StoredItem]:
        body = os.urandom(size)  # does not compress
        return [StoredItem(f"{number}-{place}", "bench", body) for place in range(count)]

    async def in_memory(number: int) -> None:
        await through_state(MemoryState[StoredItem](4 * LEASED), items(number))

    state = RedisState[StoredItem](server.url, f"bench {label}", 4 * LEASED)
    bodies = [encode(item) for item in items(0)]
    async with Redis.from_url(server.url) as client:
        memory = await seconds(in_memory)
        redis = await seconds(lambda number: through_state(state, items(number)))
        raw = await seconds(lambda number: set_and_get(client, bodies))
    await state.forget()
    await state.close()
    rates = [f"{count / taken:8.0f}" for taken in (memory, redis, raw)]
    print(f"{label:>6}  memory {rates[0]}/s  Redis {rates[1]}/s  SET+GET+DEL {rates[2]}/s  ratio {raw / redis:.2f}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("always", "everysec"):
            with RedisServer(Path(folder) / policy, None, "--appendfsync", policy) as server:
                print(f"{server.binary.name}, appendfsync {policy}")
                for label, (size, count) in SIZES.items():
                    await measure(server, label, size, count)


if __name__ == "__main__":
    asyncio.run(main())
