"""check_state passes the memory State and catches each broken one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
from tinker_atropos.contract_tests import state as contract
from tinker_atropos.state import MemoryState
from tinker_atropos.testing import ContractViolated, check_state
from tinker_atropos.trajectory import Group, PolicyRef


async def made(kind: type[MemoryState], cap: int) -> MemoryState:
    return kind(cap)


async def test_the_memory_state_passes() -> None:
    await check_state(lambda cap: made(MemoryState, cap))


class TakesDoubles(MemoryState):
    def _known(self, id: str) -> bool:
        return id in self._waiting


class ForgetsTheDiscarded(MemoryState):
    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        await super().discard(id, reason, fence=fence)
        self._ended.pop(id)


class NewestFirst(MemoryState):
    async def lease(self, n: int, fence: int, *, token: str | None = None) -> Any:
        self._waiting = dict(reversed(self._waiting.items()))
        return await super().lease(n, fence)


class LeasesWhatThereIs(MemoryState):
    async def lease(self, n: int, fence: int, *, token: str | None = None) -> Any:
        return await super().lease(min(n, len(self._waiting)), fence)


class NeverFenced(MemoryState):
    def _check(self, fence: int) -> None:
        pass


class CommitsForAnybody(MemoryState):
    async def commit(self, consumed: Collection[str], fence: int) -> None:
        await super().commit(consumed, self._fence)


class LosesLeases(MemoryState):
    async def rewind(self, fence: int) -> list[Group]:
        returned = list(self._leased.values())
        self._leased.clear()
        await super().rewind(fence)
        return returned


class RewindsToTheEnd(MemoryState):
    async def rewind(self, fence: int) -> list[Group]:
        waiting = list(self._waiting)
        returned = await super().rewind(fence)
        for id in waiting:
            self._waiting[id] = self._waiting.pop(id)
        self._waiting = dict(reversed(self._waiting.items()))
        return returned


class GrowsWithoutBound(MemoryState):
    def __init__(self, cap: int) -> None:
        super().__init__(1_000)


class FreesAtTheLease(MemoryState):
    async def lease(self, n: int, fence: int, *, token: str | None = None) -> Any:
        self.cap += n
        async with self._changed:
            self._changed.notify_all()
        return await super().lease(n, fence)


class SilentCommit(MemoryState):
    """Never tells a blocked producer that there is room."""

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        for id in consumed:
            self._leased.pop(id, None)
            self._ended[id] = "trained"
        self._check(fence)


class WatchesOnlyNews(MemoryState):
    def watch(self) -> Any:
        return self._news()

    async def _news(self) -> Any:
        seen = self._ref
        while True:
            async with self._changed:
                while self._ref == seen:
                    await self._changed.wait()
                seen = self._ref
            yield seen


class RepeatsPolicies(MemoryState):
    def watch(self) -> Any:
        return self._again()

    async def _again(self) -> Any:
        while True:
            await asyncio.sleep(0)
            if self._ref is not None:
                yield self._ref


class HandsBackADiscarded(MemoryState):
    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        group = self._waiting.get(id)
        await super().discard(id, reason, fence=fence)
        if group is not None:
            self._waiting[id] = group


class CommitsOnlyWhatIsLeased(MemoryState):
    async def commit(self, consumed: Collection[str], fence: int) -> None:
        waiting = {id: self._waiting[id] for id in consumed if id in self._waiting}
        await super().commit(consumed, fence)
        self._waiting |= waiting


class AnybodyDiscards(MemoryState):
    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        await super().discard(id, reason)


class PutsAfterAll(MemoryState):
    """A put that was cancelled goes on."""

    async def put(self, item: Any, /, *, wait: float | None = None) -> Any:
        return await asyncio.shield(super().put(item, wait=wait))


class KeepsWhatACancelledLeaseTook(MemoryState):
    async def lease(self, n: int, fence: int, *, token: str | None = None) -> Any:
        leased = await super().lease(n, fence)
        await asyncio.sleep(0.02)
        return leased


class CountsLeasedAsWaiting(MemoryState):
    async def size(self) -> int:
        return len(self._waiting) + len(self._leased)


class WatchedByOne(MemoryState):
    """A policy is news to one of those who watch."""

    async def watch(self) -> Any:
        async for ref in super().watch():
            if ref.step < 2 or getattr(self, "_told", None) != ref:
                self._told = ref
                yield ref


class DamagesBytes(MemoryState):
    async def put(self, item: Any, /, *, wait: float | None = None) -> Any:
        if hasattr(item, "body"):
            item = dataclasses.replace(item, body=item.body[:1_000])
        return await super().put(item, wait=wait)


BROKEN = [
    CommitsOnlyWhatIsLeased,
    AnybodyDiscards,
    PutsAfterAll,
    KeepsWhatACancelledLeaseTook,
    CountsLeasedAsWaiting,
    WatchedByOne,
    DamagesBytes,
    TakesDoubles,
    ForgetsTheDiscarded,
    NewestFirst,
    LeasesWhatThereIs,
    NeverFenced,
    CommitsForAnybody,
    LosesLeases,
    RewindsToTheEnd,
    GrowsWithoutBound,
    FreesAtTheLease,
    SilentCommit,
    WatchesOnlyNews,
    RepeatsPolicies,
    HandsBackADiscarded,
]


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
async def test_a_broken_state_fails(kind: type[MemoryState], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SECONDS", 1.0)
    with pytest.raises(ContractViolated):
        await check_state(lambda cap: made(kind, cap))


async def test_a_policy_may_be_published_before_anybody_watches() -> None:
    state = MemoryState[Group](1)
    await state.publish(PolicyRef("run", 0, 0, "test://0"))
    assert (await anext(state.watch())).step == 0
