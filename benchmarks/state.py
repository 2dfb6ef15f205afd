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
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis
from tinker_atropos.contract_tests.redis_server import RedisServer
from tinker_atropos.state import MemoryState, State, StoredItem
from tinker_atropos.state.codec import encode
from tinker_atropos.state.redis import RedisState

ROUNDS, LEASED, CLIENTS = 5, 8, 8
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


async def measure(server: RedisServer, label: str, size: int, count: int) -> None:
    """Print the median rates of all three, taken in turns so that each meets the same machine."""

    def items(number: int) -> list[StoredItem]:
        body = os.urandom(size)  # does not compress
        return [StoredItem(f"{number}-{place}", "bench", body) for place in range(count)]

    state = RedisState[StoredItem](server.url, f"bench {label}", 4 * LEASED)
    taken: dict[str, list[float]] = {"memory": [], "Redis": [], "SET+GET+DEL": []}
    async with Redis.from_url(server.url) as client:
        for number in range(ROUNDS + 1):
            these = items(number)
            bodies = [encode(item) for item in these]
            works = (
                through_state(MemoryState[StoredItem](4 * LEASED), these),
                through_state(state, these),
                set_and_get(client, bodies),
            )
            for name, work in zip(taken, works, strict=True):
                began = time.perf_counter()
                await work
                taken[name].append(time.perf_counter() - began)
    await state.forget()
    await state.close()
    rates = "  ".join(f"{name} {count / median(times[1:]):6.0f}/s" for name, times in taken.items())
    ratio = median(raw / ours for raw, ours in zip(taken["SET+GET+DEL"][1:], taken["Redis"][1:], strict=True))
    print(f"{label:>6}  {rates}  Redis beside its peer {ratio:.2f}", flush=True)  # the first round opens connections


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("always", "everysec"):
            with RedisServer(Path(folder) / policy, None, "--appendfsync", policy) as server:
                print(f"{server.binary.name}, appendfsync {policy}")
                for label, (size, count) in SIZES.items():
                    await measure(server, label, size, count)


if __name__ == "__main__":
    asyncio.run(main())
