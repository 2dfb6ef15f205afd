"""The contract of a State: fenced, idempotent, bounded, first in first out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tinker_atropos.contract_tests.environment import ContractViolated, hold
from tinker_atropos.state.protocol import StoredItem
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
        (_bytes, 2),
        (_settling, 4),
        (_cancelling, 2),
        (_racing, 2),
        (_order, 1_000),
    )
    for part, cap in parts:
        state = await make(cap)
        try:
            async with asyncio.timeout(SECONDS):
                await part(state)
                await state.close()
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
        lambda: state.discard("a", "stale", fence=old),
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
    await state.put(make_group("d"))
    await state.rewind(fence)
    again = [lease.item.id for lease in await state.lease(3, fence)]
    hold(again == ["b", "c", "d"], f"after a second rewind the old order must hold, got {again}")
    await state.rewind(fence)
    await state.discard("b", "stale")
    again = [lease.group.id for lease in await state.lease(1, fence)]
    hold(again == ["c"], f"a discarded group must not come back, got {again}")
    await state.rewind(fence)
    asked = [[lease.item.id for lease in await state.lease(2, fence, token="asked")] for _ in range(2)]
    hold(asked == [["c", "d"]] * 2, f"a lease with the same token must give the same groups again, got {asked}")


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
    other = state.watch()
    hold(await anext(other) == refs[1], "a second watch must give the newest policy first")
    both = [asyncio.ensure_future(anext(each)) for each in (watch, other)]
    await asyncio.sleep(0.01)
    newest = PolicyRef("run", 1, 2, "test://2", expires=1.5, endpoint="test")
    await state.publish(newest)
    hold(await asyncio.wait_for(asyncio.gather(*both), 5) == [newest, newest], "each watch must give a newer policy")
    await watch.aclose()
    await other.aclose()


async def _bytes(state: Any) -> None:
    body = bytes(range(256)) * 1_000
    items = [
        StoredItem("a", "test", body, {"sizes": [1, 2.5, None], "of": {"name": "ü", "on": True}}),
        StoredItem("b", "test", b""),
    ]
    for item in items:
        hold(await state.put(item) == "accepted", "put of a new item of bytes must be 'accepted'")
    hold(await state.pending() == items, "pending must give items as they were put")
    leased = await state.lease(2, await state.fence())
    hold([lease.item for lease in leased] == items, "lease must give items as they were put")


async def _settling(state: Any) -> None:
    """What a manifest lists ends, whatever the State made of it meanwhile."""
    fence = await state.fence()
    for id in ("a", "b", "c"):
        await state.put(make_group(id))
    await state.lease(2, fence)
    hold(await state.size() == 1, "size must count what waits, without what is leased")
    pending = [item.id for item in await state.pending()]
    hold(pending == ["a", "b", "c"], f"pending must give leased items, then waiting ones, got {pending}")
    fence = await state.fence()
    await state.rewind(fence)
    await state.commit(["a", "z"], fence)
    await state.commit(["a"], fence)
    left = [lease.item.id for lease in await state.lease(2, fence)]
    hold(left == ["b", "c"], f"a commit must also end an item that waits again after a rewind, got {left}")
    hold(await state.put(make_group("z")) == "duplicate", "put of an id that a manifest consumed must be 'duplicate'")
    hold(not await state.pending() or await state.size() == 0, "a leased item must not wait as well")


async def _cancelling(state: Any) -> None:
    fence = await state.fence()
    leasing = asyncio.create_task(state.lease(1, fence))
    await asyncio.sleep(0.01)
    await state.put(make_group("a"))
    await _cancelled(leasing)
    if not leasing.cancelled():
        await state.rewind(fence)
    for wait in (0.0, 0.0005, 0.001, 0.002):
        leasing = asyncio.create_task(state.lease(1, fence))
        await asyncio.sleep(wait)
        await _cancelled(leasing)
        if not leasing.cancelled():
            await state.rewind(fence)
    again = [lease.item.id for lease in await state.lease(1, fence)]
    hold(again == ["a"], f"a cancelled lease must give back what it took, got {again}")
    await state.put(make_group("b"))
    putting = asyncio.create_task(state.put(make_group("c")))
    await asyncio.sleep(0.05)
    await _cancelled(putting)
    await state.commit(["a"], fence)
    await asyncio.sleep(0.05)
    pending = [item.id for item in await state.pending()]
    hold(pending == ["b"], f"a cancelled put that waited must add nothing later, got {pending}")


async def _racing(state: Any) -> None:
    fence = await state.fence()
    await state.put(make_group("a"))
    answers = await asyncio.gather(*(state.put(make_group(id), wait=0.05) for id in ("b", "c")))
    hold(sorted(answers) == ["accepted", "blocked"], f"of two puts for the last place one is accepted, got {answers}")
    twice = [asyncio.create_task(state.put(make_group("d"))) for _ in range(2)]
    await asyncio.sleep(0.02)
    hold(not any(put.done() for put in twice), "a put beyond the cap must wait")
    await state.discard("a", "stale")
    both = await asyncio.wait_for(asyncio.gather(*twice), 5)
    hold(sorted(both) == ["accepted", "duplicate"], f"of two waiting puts of an id one is a 'duplicate', got {both}")
    leases = [asyncio.create_task(state.lease(1, fence)) for _ in range(2)]
    ids = [lease.item.id for leased in await asyncio.gather(*leases) for lease in leased]
    hold(len(set(ids)) == 2, f"two leases must not give the same item, got {ids}")


async def _order(state: Any) -> None:
    ids = [f"{number:04d}" for number in range(1_000)]
    for id in ids:
        await state.put(make_group(id))
    fence, left = await state.fence(), list(ids)
    while left:
        leased = [lease.item.id for lease in await state.lease(50, fence)]
        hold(leased == left[:50], f"items must be leased first in, first out; got {leased[:3]}… for {left[:3]}…")
        await state.commit(leased, fence)
        del left[:50]
    hold(await state.pending() == [], "nothing may be left after all is committed")


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
