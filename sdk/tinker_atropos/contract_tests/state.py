"""The contract of a State: fenced, idempotent, bounded, first in first out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tinker_atropos.contract_tests.environment import ContractViolated, hold
from tinker_atropos.trajectory import Group, PolicyRef, TaskRef

SECONDS = 20.0  # for each part; none waits for anything but the state itself


def make_group(id: str) -> Group:
    """Return an empty group of that id."""
    return Group(id=id, task=TaskRef("train", 0, 0), trajectories=())


async def check_state(make: Callable[[int], Awaitable[Any]]) -> None:
    """Raise `ContractViolated` if a State breaks its contract. `make(cap)` returns a new, empty one."""
    parts: tuple[tuple[Callable[[Any], Awaitable[None]], int], ...] = (
        (_queue, 4),
        (_fencing, 4),
        (_rewinding, 4),
        (_bound, 2),
        (_publishing, 2),
    )
    for part, cap in parts:
        try:
            async with asyncio.timeout(SECONDS):
                await part(await make(cap))
        except TimeoutError:
            raise ContractViolated(
                f"{part.__name__.strip('_')}: a call did not return that had all it waits for"
            ) from None


async def _queue(state: Any) -> None:
    fence = await state.fence()
    for id in ("a", "b", "c"):
        hold(await state.put(make_group(id)) == "accepted", f"put({id!r}) of a new group must be 'accepted'")
    hold(await state.put(make_group("a")) == "duplicate", "put of a known id must be 'duplicate'")
    leased = [lease.group.id for lease in await state.lease(2, fence)]
    hold(leased == ["a", "b"], f"lease(2) must give the oldest first, got {leased}")
    hold(await state.put(make_group("a")) == "duplicate", "put of a leased id must be 'duplicate'")
    await state.commit(leased, fence)
    hold(await state.put(make_group("a")) == "duplicate", "put of a consumed id must be 'duplicate'")
    await state.discard("c", "stale")
    hold(await state.put(make_group("c")) == "duplicate", "put of a discarded id must be 'duplicate'")
    waiting = asyncio.create_task(state.lease(1, fence))
    await asyncio.sleep(0.01)
    hold(not waiting.done(), "lease must wait while there are too few groups")
    await state.put(make_group("d"))
    hold([lease.group.id for lease in await asyncio.wait_for(waiting, 5)] == ["d"], "a put must wake a waiting lease")


async def _fencing(state: Any) -> None:
    from tinker_atropos.state import FencedOut

    old = await state.fence()
    await state.put(make_group("a"))
    waiting = asyncio.create_task(state.lease(2, old))
    await asyncio.sleep(0.01)
    new = await state.fence()
    hold(new > old, "a newer epoch must have a higher fence")
    calls: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: waiting,
        lambda: state.lease(1, old),
        lambda: state.commit(["a"], old),
        lambda: state.rewind(old),
    )
    for call in calls:
        try:
            await asyncio.wait_for(call(), 5)
        except FencedOut:
            continue
        hold(False, "an older epoch must be refused with FencedOut, also where it was waiting")
    hold(
        [lease.group.id for lease in await state.lease(1, new)] == ["a"], "the newer epoch must get what the older left"
    )


async def _rewinding(state: Any) -> None:
    fence = await state.fence()
    for id in ("a", "b", "c"):
        await state.put(make_group(id))
    await state.lease(1, fence)
    await state.commit(["a"], fence)
    await state.lease(1, fence)
    returned = [group.id for group in await state.rewind(fence)]
    hold(returned == ["b"], f"rewind must return what was leased and not committed, got {returned}")
    again = [lease.group.id for lease in await state.lease(2, fence)]
    hold(again == ["b", "c"], f"after a rewind the old order must hold, got {again}")
    hold(await state.put(make_group("b")) == "duplicate", "put of an id that a rewind gave back must be 'duplicate'")
    await state.rewind(fence)
    await state.discard("b", "stale")
    again = [lease.group.id for lease in await state.lease(1, fence)]
    hold(again == ["c"], f"a discarded group must not come back, got {again}")


async def _bound(state: Any) -> None:
    fence = await state.fence()
    await state.put(make_group("a"))
    await state.put(make_group("b"))
    hold(await state.put(make_group("c"), wait=0.01) == "blocked", "put beyond the cap must be 'blocked'")
    waiting = asyncio.create_task(state.put(make_group("c")))
    await state.lease(1, fence)
    await asyncio.sleep(0.01)
    hold(not waiting.done(), "a lease frees no room before its commit: the group may come back")
    await state.commit(["a"], fence)
    hold(await asyncio.wait_for(waiting, 5) == "accepted", "a commit must let a blocked put go on")
    waiting = asyncio.create_task(state.put(make_group("d")))
    await asyncio.sleep(0.01)
    hold(not waiting.done(), "a put beyond the cap must wait")
    await state.discard("b", "stale")
    hold(await asyncio.wait_for(waiting, 5) == "accepted", "a discard must let a blocked put go on")


async def _publishing(state: Any) -> None:
    refs = [PolicyRef("run", 0, step, f"test://{step}") for step in range(2)]
    await state.publish(refs[0])
    watch = state.watch()
    hold(await anext(watch) == refs[0], "watch must give the newest policy first")
    following = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.01)
    hold(not following.done(), "watch must wait for a newer policy")
    await state.publish(refs[1])
    hold(await asyncio.wait_for(following, 5) == refs[1], "watch must give each newer policy")
    await watch.aclose()
