"""The trajectory API over a State: groups wait, go out in batches, and end with the client's next call."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
from tinker_atropos.state import FencedOut, Leased, State, StoredItem

from tinker_atropos_atropos.backend import Arrival, Delivery, Full
from tinker_atropos_atropos.line import Line, Waiting
from tinker_atropos_atropos.posted import Refused, normal_form
from tinker_atropos_atropos.repeats import WINDOW, Repeats
from tinker_atropos_atropos.roster import SILENCE, Environment, RegisterEnv, Registration, Roster, admitted
from tinker_atropos_atropos.selection import possible
from tinker_atropos_atropos.stored import is_keyed, json_of, meta_of, store

log = logging.getLogger(__name__)

CAP_BYTES = 2 * 1024**3
PATIENCE = 120.0
"""Seconds for which a batch waits for an environment's minimum after that environment's last group."""
BLOCKED = 64
"""Posts that may wait for room with their bodies read: what is posted again must not wait behind what is new."""
DOUBTFUL = 1000
LEASE_SECONDS = 10.0
CHECK_SECONDS = 1.0
"""Seconds after which a post asks again whether another API has taken over the same run."""
NOTE = "atropos"
TOO_LARGE = "larger than the batch"

NOT_REGISTERED = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
WAIT_FOR_TRAINER = {"status": "wait for trainer to start"}


class Notes(msgspec.Struct):
    """What must outlive a process, beside the groups. `committing`: a commit that may not have happened yet.

    `leasing` is the key of a remote trainer's newest lease: its answer may not have arrived.
    """

    registration: Registration | None = None
    environments: list[Environment] = []
    step: int = 0
    epoch: int = 0
    remote: bool = False
    started: bool = False
    generation: int = 0
    committing: list[str] = []
    leasing: str = ""


class StateBackend:
    """Batches over a State, for trainers that GET /batch and for our own that commits with its checkpoint.

    All changes of State and line happen under one lock, so that both tell of the same groups in the same order.
    """

    def __init__(
        self,
        state: State[StoredItem],
        *,
        cap_bytes: int = CAP_BYTES,
        patience: float = PATIENCE,
        repeat_window: float = WINDOW,
        silence: float = SILENCE,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._cap_bytes = cap_bytes
        self._patience = patience
        self._clock = clock
        self._repeats = Repeats(repeat_window, clock=clock, wall=wall)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._roster = Roster(silence, clock)
        self._line = Line()
        self._notes = Notes()
        self._leased: dict[str, StoredItem] = {}  # by this API, for batches
        self._remote: dict[str, Waiting] = {}  # by a trainer that leases over HTTP
        self._outstanding: list[Delivery] = []
        self._known: dict[str, Waiting] = {}  # groups of outstanding batches
        self._arrivals = 0
        self._posts = 0  # that have a place, with their bodies read or not
        self._putting: Counter[str] = Counter()
        self._early: set[str] = set()  # of those, leased before their put had come back
        self._doubtful: set[str] = set()  # put without a clear answer
        self._latest: StoredItem | None = None
        self._heard: dict[int, float] = {}
        self._last_lease: tuple[str, list[Leased[StoredItem]]] | None = None
        self._over = False  # another API has taken over the run
        self._checked = -math.inf
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Continue with what the State and its notes hold."""
        saved = await self._state.note(NOTE)
        if saved is not None:
            self._notes = msgspec.json.decode(saved, type=Notes)
            self._roster.restore(self._notes.registration, self._notes.environments)
        if self._notes.remote:
            try:
                await self._state.commit([], self._notes.epoch)
            except FencedOut:  # an earlier process ended between a new epoch and its note: nobody holds that epoch
                self._notes.epoch = await self._state.fence()
                await self._save()
        else:
            # Always a new epoch, so that no other API of the same run gives out the same groups.
            self._notes.epoch = await self._state.fence()
            await self._state.commit(self._notes.committing, self._notes.epoch)
            self._notes.committing = []
            await self._state.rewind(self._notes.epoch)
            await self._save()
        await self._look()
        now = self._clock()
        self._heard = {environment.number: now for environment in self._roster.environments}
        if len(self._line):
            log.info("%d groups wait from before", len(self._line))

    async def close(self) -> None:
        """Close the State."""
        await self._state.close()

    # Who takes part.

    async def register(self, registration: Registration) -> dict[str, Any]:
        """Let a trainer take over: by a new epoch, with every batch that no later GET has acknowledged."""
        async with self._lock:
            await self._take_over(remote=False)
            number = self._roster.register(registration)
            self._notes.registration = registration
            self._notes.step = registration.starting_step
            self._notes.started = False
            self._line.changed()
            await self._save()
            for id in self._line.beyond(registration.batch_size):
                await self._discard(id, TOO_LARGE)
        await self._tell()
        return {"uuid": number, **self._misfits(registration)}

    async def register_env(self, asked: RegisterEnv) -> dict[str, Any]:
        """Admit an environment once a trainer has asked for data; raises `Refused` if its groups can never fit."""
        async with self._lock:
            registration = self._roster.registration
            if registration is None or not self._notes.started:
                return WAIT_FOR_TRAINER
            self._roster.check_fit(asked)
            needed = -(-registration.batch_size // asked.group_size)
            if needed > self._state.cap:
                raise Refused(
                    ("group_size",),
                    f"a batch of {registration.batch_size} takes {needed} groups of {asked.group_size}, and the API "
                    f"holds {self._state.cap}; start it with --cap {2 * needed} or more",
                )
            environment = self._roster.admit(asked)
            self._heard[environment.number] = self._clock()
            self._line.changed()
            await self._save()
            return admitted(environment, registration, self._step)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """Note that an environment has gone; what it posted stays."""
        async with self._lock:
            environment = self._roster.find(number)
            if environment is None:
                return {"status": "failure", "error": f"env_id {number} is not registered"}
            environment.connected = False
            self._line.changed()
            await self._save()
            return {"status": "success"}

    def wandb_info(self) -> dict[str, Any]:
        """Return the trainer's names for its run."""
        registration = self._roster.registration
        if registration is None:
            return {"group": None, "project": None}
        return {"group": registration.wandb_group, "project": registration.wandb_project}

    def info(self) -> dict[str, Any]:
        """Return the sizes that environments ask for."""
        registration = self._roster.registration
        if registration is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}

    # What is polled: counters only.

    def status(self) -> dict[str, Any]:
        """Return steps given out and groups waiting."""
        return {"current_step": self._step, "queue_size": len(self._line)}

    def status_env(self, number: int) -> dict[str, Any]:
        """Return what an environment steers its workers by."""
        environment = self._known_env(number, ("env_id",))
        self._roster.heard(number)
        return self._roster.status(environment, self._line.load(number), self._step)

    def details(self) -> dict[str, Any]:
        """Return what the protocol has no place for."""
        return {
            **self.status(),
            "held": self._held,
            "cap": self._state.cap,
            "waiting_sequences": self._line.sequences,
            "waiting_bytes": self._line.bytes,
            "outstanding_batches": len(self._outstanding),
            "environments": len(self._roster.live()),
            "epoch": self._notes.epoch,
            "counts": dict(self.counts),
        }

    # What comes in.

    @asynccontextmanager
    async def room(self, wait: float) -> AsyncIterator[None]:
        """Hold a place for a post: where a group would be taken, or may wait with its body read."""
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(self._has_place)
                self._posts += 1
        except TimeoutError:
            raise self._full() from None
        try:
            yield
        finally:
            self._posts -= 1
            await self._tell()

    def prepare(self, arrival: Arrival) -> StoredItem:
        """Return a group as it is kept."""
        return store(arrival.group, arrival.compressed, arrival.key, arrival.content)

    async def put(self, prepared: Sequence[StoredItem], wait: float) -> list[dict[str, Any]]:
        """Take groups; each is in the State before its answer is given."""
        for item in prepared:
            self._check(item)
        if self._over or self._clock() - self._checked > CHECK_SECONDS:
            await self._check_epoch()
        deadline = self._clock() + wait
        return [await self._put(item, deadline) for item in prepared]

    def latest(self) -> bytes | None:
        """Return the group that arrived last."""
        return None if self._latest is None else normal_form(json_of(self._latest))

    def _check(self, item: StoredItem) -> None:
        registration, meta = self._roster.registration, meta_of(item)
        if meta.env is not None:
            self._known_env(meta.env, ("env_id",))
        if registration is not None and meta.sequences > registration.batch_size:
            raise Refused(
                ("tokens",), f"a group of {meta.sequences} sequences never fits a batch of {registration.batch_size}"
            )

    async def _put(self, item: StoredItem, deadline: float) -> dict[str, Any]:
        # After a reset the same content is another group.
        content = None if is_keyed(item) else f"{self._notes.generation}-{item.id}"
        id = f"{self._notes.generation}-{item.id}" if content is None else self._repeats.name(content)
        item = replace(item, id=id)
        if not self._is_held(item.id):
            await self._wait_for(self._has_bytes, deadline - self._clock())
        self._putting[item.id] += 1
        try:
            put = await self._state.put(item, wait=max(0.0, deadline - self._clock()))
            if put == "blocked":
                if content is not None:
                    self._repeats.again(content)
                self._doubtful.add(item.id)  # Redis may have it all the same, if it did not answer in time
                raise self._full()
            if put == "accepted" and item.id not in self._early and not self._is_held(item.id):
                self._line.add(self._waiting(item))
                self._latest = item
                await self._discard_misfit(item)
        finally:
            self._putting[item.id] -= 1
            if not self._putting[item.id]:
                del self._putting[item.id]
                self._early.discard(item.id)
        if put == "duplicate":
            self.counts["duplicates"] += 1
            if item.id in self._doubtful:
                await self._look()
        if len(self._doubtful) > DOUBTFUL:
            await self._look()
        await self._tell()
        meta = meta_of(item)
        environment = None if meta.env is None else self._roster.find(meta.env)
        if environment is None:
            return {"status": "received"}
        self._heard[environment.number] = self._clock()
        self._roster.heard(environment.number)
        if meta.sequences == environment.group_size:
            return {"status": "received"}
        return {"status": "buffered", "buffer_size": self._line.odd(environment.number, environment.group_size)}

    async def _discard_misfit(self, item: StoredItem) -> None:
        """End a group that fitted when it was checked, if a trainer with smaller batches has come since."""
        registration = self._roster.registration
        if registration is not None and meta_of(item).sequences > registration.batch_size:
            async with self._lock:
                await self._discard(item.id, TOO_LARGE)

    async def _look(self) -> None:
        """Put into line what waits in the State and is not in it yet."""
        async with self._lock:
            self._doubtful.clear()
            waiting = await self._state.size()
            pending = await self._state.pending() if waiting else []
            for item in pending[max(0, len(pending) - waiting) :]:
                if not self._is_held(item.id) and item.id not in self._putting:
                    self._line.add(self._waiting(item))

    def _is_held(self, id: str) -> bool:
        return id in self._line or id in self._known or id in self._remote

    async def _wait_for(self, condition: Callable[[], bool], wait: float) -> None:
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise self._full() from None

    # What goes out.

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Delivery | dict[str, Any]]:
        """Hold the next batch. A call commits every batch that was given whole before it."""
        async with self._lock:
            found = await self._next()
        await self._tell()
        try:
            yield found
        finally:
            if isinstance(found, Delivery) and not found.given:
                self.counts["undelivered"] += 1
                self._undelivered(found)

    async def _next(self) -> Delivery | dict[str, Any]:
        registration = self._roster.registration
        if registration is None:
            return NOT_REGISTERED
        if self._notes.remote:
            raise FencedOut(
                f"a trainer of epoch {self._notes.epoch} leases from this API; POST /register to take its place"
            )
        await self._check_epoch()
        if not self._notes.started:
            self._notes.started = True
            await self._save()
        await self._commit_given()
        owed = self._roster.owed()
        if owed and self._waits_for_minimum(owed):
            return {"batch": None}
        ids = self._line.batch(registration.batch_size, owed)
        if ids is None:
            return {"batch": None}
        missing = self._line.to_lease(ids)
        while missing:
            for leased in await self._state.lease(missing, self._notes.epoch):
                self._leased[leased.item.id] = leased.item
                self._arrive(leased.item)
                self._line.mark_leased(leased.item.id)
            missing = self._line.to_lease(ids)
        delivery = Delivery([self._leased.pop(id) for id in ids])
        for id in ids:
            group = self._line.remove(id)
            assert group is not None
            self._known[id] = group
        self._outstanding.append(delivery)
        return delivery

    def _arrive(self, item: StoredItem) -> None:
        """Put into line what was leased while its put is still on its way back."""
        if item.id not in self._line:
            self._line.add(self._waiting(item))
            if item.id in self._putting:
                self._early.add(item.id)

    def _waits_for_minimum(self, owed: dict[int, int]) -> bool:
        """Return whether a batch waits for an environment that is short of its minimum.

        It waits for none that has been silent for long, and for none at all once nothing more can come in.
        """
        now = self._clock()
        return self._has_room() and any(
            self._line.waiting_of(env) < count and now - self._heard.get(env, 0.0) < self._patience
            for env, count in owed.items()
        )

    def _undelivered(self, delivery: Delivery) -> None:
        if delivery not in self._outstanding:  # a newer trainer has taken it back already
            return
        self._outstanding.remove(delivery)
        for item in delivery.items:
            self._leased[item.id] = item
        groups = [self._known.pop(item.id) for item in delivery.items]
        self._line.put_back(groups)
        for id in self._leased:
            self._line.mark_leased(id)

    async def _commit_given(self) -> None:
        given = [delivery for delivery in self._outstanding if delivery.given]
        if not given:
            return
        ids = [item.id for delivery in given for item in delivery.items]
        await self._check_epoch()
        # Written first: a process that dies in between finishes the commit when it starts again.
        after = msgspec.structs.replace(self._notes, step=self._notes.step + len(given), committing=ids)
        await self._state.set_note(NOTE, msgspec.json.encode(after))
        await self._state.commit(ids, self._notes.epoch)
        self._notes = msgspec.structs.replace(after, committing=[])
        self._outstanding = [delivery for delivery in self._outstanding if not delivery.given]
        for id in ids:
            self._known.pop(id, None)
        self.counts["committed"] += len(ids)

    async def reset(self) -> None:
        """Discard every group and forget who took part."""
        async with self._lock:
            await self._take_over(remote=False)
            for id in self._line.ids():
                await self._discard(id, "reset")
            self._roster.reset()
            self._latest = None
            self._heard = {}
            self._notes = Notes(generation=self._notes.generation + 1, epoch=self._notes.epoch)
            await self._save()
        await self._tell()

    # The consumer's half of the State, for a trainer that commits with its checkpoint.

    async def fence(self) -> int:
        """Begin a trainer's epoch; a trainer that GETs batches is refused from now on."""
        async with self._lock:
            await self._take_over(remote=True)
            self._notes.started = True
            await self._save()
        await self._tell()
        return self._notes.epoch

    async def lease(self, n: int, fence: int, wait: float, key: str) -> list[Leased[StoredItem]]:
        """Take the `n` oldest groups; an empty list once `wait` seconds have passed without that many.

        The same `key` again gives the same groups again, for the client whose answer was lost.
        """
        if n > self._state.cap:
            raise Refused(("n",), f"a lease of {n} groups can never be had: the API holds {self._state.cap} at most")
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(
                    lambda: len(self._line) >= n or self._fenced_out(fence) or self._leased_before(key)
                )
        except TimeoutError:
            if await self._state.size() > len(self._line):
                await self._look()
            return []
        async with self._lock:
            self._check_fence(fence)
            if self._last_lease is not None and self._last_lease[0] == key:
                return self._last_lease[1]
            if len(self._line) < n and not self._leased_before(key):
                return []
            if key != self._notes.leasing:
                # Written first: a process that dies in between gives the same groups when it is asked again.
                self._notes.leasing = key
                await self._save()
            try:
                # As many wait, or the State holds them for this key: only a discard in between makes it wait.
                async with asyncio.timeout(LEASE_SECONDS):
                    leased = await self._state.lease(n, fence, token=key)
            except TimeoutError:
                self._forget_lease()
                return []
            for entry in leased:
                self._arrive(entry.item)
                group = self._line.remove(entry.item.id)
                if group is not None:
                    self._remote[entry.item.id] = group
            self._last_lease = (key, leased)
            return leased

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """End groups that a checkpoint lists as consumed."""
        async with self._lock:
            await self._state.commit(consumed, fence)
            for id in consumed:
                self._remote.pop(id, None)
                self._line.remove(id)
            self._forget_lease()
            self.counts["committed"] += len(consumed)
        await self._tell()

    async def discard(self, ids: Collection[str], reason: str, fence: int | None = None) -> None:
        """End groups without training on them; with a `fence` only by the trainer of that epoch."""
        async with self._lock:
            if fence is not None:
                self._check_fence(fence)
            for id in ids:
                await self._discard(id, reason, fence)
        await self._tell()

    async def rewind(self, fence: int) -> list[StoredItem]:
        """Return all leased groups to the line, in their old order."""
        async with self._lock:
            self._check_fence(fence)
            returned = await self._rewind(fence)
        await self._tell()
        return returned

    async def publish(self, step: int, fence: int) -> None:
        """Note how many steps the trainer has done, for environments to see."""
        async with self._lock:
            self._check_fence(fence)
            self._notes.step = step
            await self._save()

    # Inside.

    @property
    def _step(self) -> int:
        return self._notes.step + len(self._outstanding)

    @property
    def _held(self) -> int:
        return len(self._line) + len(self._known) + len(self._remote)

    def _has_place(self) -> bool:
        return self._posts < BLOCKED or (self._held + self._posts < self._state.cap and self._has_bytes())

    def _has_room(self) -> bool:
        return self._held < self._state.cap and self._has_bytes()

    def _has_bytes(self) -> bool:
        return self._line.bytes < self._cap_bytes or not len(self._line)

    def _full(self) -> Full:
        return Full(
            f"{self._held} groups are held and {self._state.cap} may be ({self._line.bytes} bytes wait, "
            f"{self._cap_bytes} may): the trainer has fallen behind; post again later"
        )

    def _known_env(self, number: int, place: tuple[str | int, ...]) -> Environment:
        environment = self._roster.find(number)
        if environment is None:
            raise Refused(place, f"{number} is not registered; POST /register-env gives a number")
        return environment

    def _waiting(self, item: StoredItem) -> Waiting:
        self._arrivals += 1
        meta = meta_of(item)
        return Waiting(item.id, meta.sequences, meta.env, len(item.body), self._arrivals)

    def _misfits(self, registration: Registration) -> dict[str, Any]:
        """Say which environments that are there already can't fill a batch of the new size."""
        live = self._roster.live()
        sizes = [environment.group_size for environment in live]
        wrong = [
            f"{environment.real_name} posts groups of {environment.group_size}, which never sum to a batch of "
            f"{registration.batch_size}"
            for environment in live
            if not possible(sizes, registration.batch_size, using=environment.group_size)
        ]
        for line in wrong:
            log.warning("%s", line)
        return {"warnings": wrong} if wrong else {}

    async def _take_over(self, *, remote: bool) -> None:
        """Begin an epoch. Batches on their way or not acknowledged are no longer anybody's."""
        # A trainer that leases and follows another of its kind commits what its checkpoint lists before it rewinds.
        leaves_to_trainer = remote and self._notes.remote
        await self._check_epoch()
        self._notes.epoch = await self._state.fence()
        self._outstanding = []
        self._forget_lease()
        if not leaves_to_trainer:
            await self._rewind(self._notes.epoch)
        self._notes.remote = remote

    async def _rewind(self, fence: int) -> list[StoredItem]:
        self._forget_lease()
        items = await self._state.rewind(fence)
        known = {**self._known, **self._remote}
        back = []
        for place, item in enumerate(items):
            if item.id not in self._line:
                group = known.get(item.id) or self._waiting(item)
                if item.id not in known:  # from before this process: ahead of all that it has seen
                    group.arrival = place - len(items)
                back.append(group)
        self._leased, self._known, self._remote = {}, {}, {}
        self._line.put_back(back)
        return items

    async def _discard(self, id: str, reason: str, fence: int | None = None) -> None:
        await self._state.discard(id, reason, fence=fence)
        self._line.remove(id)
        self._remote.pop(id, None)
        self._leased.pop(id, None)
        self.counts[f"discarded: {reason}"] += 1

    def _leased_before(self, key: str) -> bool:
        return key == self._notes.leasing

    def _forget_lease(self) -> None:
        self._last_lease, self._notes.leasing = None, ""

    def _fenced_out(self, fence: int) -> bool:
        return fence != self._notes.epoch or not self._notes.remote

    def _check_fence(self, fence: int) -> None:
        if self._fenced_out(fence):
            raise FencedOut(f"the trainer's epoch {fence} is over: epoch {self._notes.epoch} has taken its place")

    async def _check_epoch(self) -> None:
        """Raise `FencedOut` for ever once another API has begun an epoch of its own over the same run."""
        if not self._over:
            try:
                await self._state.commit([], self._notes.epoch)
            except FencedOut:
                self._over = True
                log.error("another API has taken over this run; this one answers no more")
            self._checked = self._clock()
        if self._over:
            raise FencedOut(
                "another API has taken over this run's state; use that one, and give this one another --run name"
            )

    async def _save(self) -> None:
        await self._check_epoch()
        self._notes.environments = self._roster.environments
        await self._state.set_note(NOTE, msgspec.json.encode(self._notes))

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
