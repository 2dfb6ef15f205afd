"""The State behind a trajectory API elsewhere, as a run has it: groups posted there, leased, converted, committed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

import aiohttp
import msgspec
from tinker_atropos.errors import ConfigError, PluginError, RunError, TransientError
from tinker_atropos.external import PolicyEndpoint, RunInfo
from tinker_atropos.rollout.external import REFUSED, check_group
from tinker_atropos.state import FencedOut, Leased, Put, StateError, StoredItem
from tinker_atropos.trajectory import Group, PolicyRef, TaskRef

from tinker_atropos_atropos.api_state import ApiState
from tinker_atropos_atropos.border import unfit
from tinker_atropos_atropos.convert import Converted, to_group
from tinker_atropos_atropos.posted import Posted, path_text, read_group
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_watch import Seen
from tinker_atropos_atropos.stored import json_of, meta_of

log = logging.getLogger(__name__)

Result = TypeVar("Result")

GONE_SECONDS = 300.0
"""Seconds for which an API that does not answer is asked again."""


STUCK_LOOKS = 3
"""Looks in a row that find the API full, and the trainer waiting, before that is an error."""


class Status(msgspec.Struct):
    """What the API says of itself. `held`: groups that neither a commit nor a discard has ended; `cap` of them fit."""

    held: int
    cap: int
    waiting_sequences: int
    environments: int = 1
    counts: dict[str, int] = {}


def held_at_most(info: RunInfo) -> int:
    """Return how many groups a run may hold in the API: those of the steps between two checkpoints, and those ahead.

    Groups count as of the run's `group_size`; a trained group leaves the API with the checkpoint that counts it.
    """
    left = max(1, info.total_steps - info.starting_step)
    steps = min(info.checkpoint_interval or left, left)
    return (steps + info.max_staleness + 1) * -(-info.batch_size // info.group_size)


def check_cap(cap: int, info: RunInfo) -> None:
    """Raise `ConfigError` where an API of that cap would fill up before the run's next checkpoint empties it."""
    needed = held_at_most(info)
    if needed <= cap:
        return
    of_a_step = -(-info.batch_size // info.group_size)
    fewer = cap // of_a_step - info.max_staleness - 1
    every = f"at most {fewer}" if fewer > 0 else f"1, with an env.batch_size of fewer than {of_a_step} groups"
    now = f"of {info.checkpoint_interval}" if info.checkpoint_interval else "of 0, at the end alone,"
    raise ConfigError(
        f"the trajectory API holds {cap} groups, and this run needs room for {needed}: trained groups leave it with a "
        f"checkpoint, and a save_checkpoint_interval {now} is {needed // of_a_step - info.max_staleness - 1} steps of "
        f"{of_a_step} groups, beside {info.max_staleness + 1} batches ahead. Start the API with "
        f"`tinker-atropos run-api --cap {2 * needed}`, or set save_checkpoint_interval to {every}"
    )


class PatientApi(ApiState):
    """Gives up on an answer after `GONE_SECONDS`, and knows when the last one came."""

    answered = -float("inf")
    """Time of the last answer, in seconds of the event loop's clock."""

    async def _post(self, name: str, body: dict[str, Any]) -> bytes:
        try:
            async with asyncio.timeout(GONE_SECONDS):
                content = await super()._post(name, body)
        except TimeoutError:
            raise TransientError(f"{self._url} did not answer {name} in {GONE_SECONDS:g} s") from None
        self.answered = asyncio.get_running_loop().time()
        return content


class RemoteGroups:
    """A `State` of groups whose items wait in an API elsewhere. It outlives this process: what no manifest counts is
    leased again.

    Call `begin` before the first `fence`. A lease waits for `join`: what was posted is proven by the endpoint.
    """

    durable = True

    cap = 0
    """How many groups the API holds at most; known once it is registered with."""

    def __init__(self, config: AtroposConfig, token: str | None) -> None:
        assert config.api_url is not None
        self.url, self._config, self._token = config.api_url, config, token
        self._api = PatientApi(config.api_url, token=token)
        self._open, self._fence = False, 0
        self._wanted = self._stuck = 0  # groups that a lease waits for; looks at which the API was full meanwhile
        self._info: RunInfo | None = None
        self._endpoint: PolicyEndpoint | None = None
        self._joined = asyncio.Event()
        self._held: dict[str, Group] = {}
        self._ref: PolicyRef | None = None
        self._changed = asyncio.Condition()
        self._leased_ever = 0

    def begin(self, info: RunInfo) -> None:
        """Take the sizes that the API is told."""
        self._info = info

    async def join(self, endpoint: PolicyEndpoint) -> None:
        """From now on posted groups are proven by `endpoint`."""
        await endpoint.ready()
        self._endpoint = endpoint
        self._joined.set()

    async def fence(self) -> int:
        """Register as the trainer, which readmits environments, then begin an epoch of leases."""
        if not self._open:
            await self._api.__aenter__()
            self._open = True
        self._held = {}
        await self._patiently(self._register)
        self._fence = await self._patiently(self._api.fence)
        return self._fence

    async def put(self, item: Group, /, *, wait: float | None = None) -> Put:
        """Groups are posted to the API, not put here."""
        raise StateError(f"group {item.id!r} can't be put: groups of this run come from {self.url}")

    async def size(self) -> int:
        """Return how many groups wait in the API, or are on their way into it."""
        status = await self._patiently(self._status)
        return max(0, status.held - len(self._held))

    async def set_note(self, name: str, note: bytes) -> None:
        """The API keeps no notes of a trainer's."""
        raise StateError(f"the note {name!r} can't be kept: {self.url} keeps groups alone")

    async def note(self, name: str) -> bytes | None:
        """None can have been kept."""
        return None

    async def lease(self, n: int, fence: int, *, token: str | None = None) -> list[Leased[Group]]:
        """Take the `n` oldest groups; one that can't be trained on carries the reason. `token` is the API client's."""
        await self._joined.wait()
        self._wanted = n
        try:
            leased = await self._patiently(lambda: self._api.lease(n, fence))
        finally:
            self._wanted = 0
        groups = [await asyncio.to_thread(self._convert, entry.item) for entry in leased]
        self._held.update({group.id: group for group in groups})
        return [Leased(group, fence) for group in groups]

    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        """End a group without training on it. With a `fence` of an older epoch: `FencedOut`."""
        if fence is not None and fence != self._fence:
            raise FencedOut(f"epoch {fence} is over; this is {self._fence}")
        await self._patiently(lambda: self._api.discard(id, reason))
        self._held.pop(id, None)

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget groups that a manifest lists as consumed."""
        if consumed:
            await self._patiently(lambda: self._api.commit(consumed, fence))
        for id in consumed:
            self._held.pop(id, None)

    async def rewind(self, fence: int) -> list[Group]:
        """Return all leased groups to the API's queue."""
        await self._patiently(lambda: self._api.rewind(fence))
        returned, self._held = list(self._held.values()), {}
        return returned

    async def pending(self) -> list[Group]:
        """Return the groups that are leased; those that wait are the API's."""
        return list(self._held.values())

    async def publish(self, ref: PolicyRef) -> None:
        """Make a policy the newest, here; let environments see how many steps are done."""
        await self._patiently(lambda: self._api.publish(ref))
        async with self._changed:
            self._ref = ref
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[PolicyRef]:
        """Yield the newest policy, then each newer one."""
        seen = await self._newer_than(None)
        while True:
            yield seen
            seen = await self._newer_than(seen)

    async def observe(self) -> tuple[Seen, int]:
        """Return what was seen of the environments together, and how many trajectories wait there.

        Raises `RunError` where the trainer waits for groups that the API has no room for: that would last for ever.
        """
        status = await self._status()
        full = status.held >= status.cap and status.held - len(self._held) < self._wanted
        self._stuck = self._stuck + 1 if full else 0
        if self._stuck >= STUCK_LOOKS:
            raise RunError(
                f"the trajectory API at {self.url} is full: of the {status.cap} groups that it holds {len(self._held)} "
                "were trained on or discarded since the last checkpoint, and the trainer waits for more. Set a "
                "smaller save_checkpoint_interval, or start the API with a larger --cap (in memory it forgets what it "
                "holds), then continue this run with --resume"
            )
        ended = (count for name, count in status.counts.items() if name == "committed" or name.startswith("discarded"))
        return Seen(registered=status.environments > 0, posted=status.held + sum(ended)), status.waiting_sequences

    async def close(self) -> None:
        """Let go of the connection; what is leased and in no manifest comes again."""
        if self._open:
            self._open = False
            await self._api.__aexit__(None, None, None)

    async def _newer_than(self, seen: PolicyRef | None) -> PolicyRef:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ref is not None and self._ref != seen)
            assert self._ref is not None
            return self._ref

    def _convert(self, item: StoredItem) -> Group:
        """Return the group as the trainer takes it; what it could not take carries the reason, as at a run's sink."""
        assert self._endpoint is not None
        assert self._info is not None
        arrived = read_group(json_of(item))
        environment = meta_of(item).env
        converted = to_group(
            arrived.posted,
            id=item.id,
            task=TaskRef("atropos" if environment is None else f"environment {environment}", self._leased_ever, 0),
            prove=self._endpoint.prove,
        )
        self._leased_ever += 1
        reason = self._refusal(arrived.posted, converted)
        if reason is None:
            return converted.group
        overrides = {**converted.group.overrides, REFUSED: reason}
        return Group(item.id, converted.group.task, converted.group.trajectories, overrides)

    def _refusal(self, posted: Posted, converted: Converted) -> str | None:
        assert self._endpoint is not None
        assert self._info is not None
        found = unfit(posted, batch_size=self._info.batch_size, context=self._endpoint.context_length)
        if found is not None:
            log.warning("group %s: %s: %s", converted.group.id, path_text(found.place), found.message)
            return found.reason
        if converted.discard is not None:
            return converted.discard
        try:
            check_group(converted.group)
        except PluginError as error:
            log.warning("%s", error)
            return "no trainer can take it"
        return None

    async def _register(self) -> None:
        assert self._info is not None, "begin() comes first"
        info = self._info
        self.cap = (await self._status()).cap
        check_cap(self.cap, info)
        body = {
            "wandb_group": self._config.wandb_group or info.name,
            "wandb_project": self._config.wandb_project,
            "batch_size": info.batch_size,
            "max_token_len": info.max_token_length + 1,  # environments drop sequences of this length as well
            "checkpoint_dir": str((self._config.checkpoint_dir or info.folder).expanduser().absolute()),
            "save_checkpoint_interval": info.checkpoint_interval,
            "starting_step": info.starting_step,
            "num_steps": info.total_steps,
        }
        await self._call("POST", "register", body)

    async def _status(self) -> Status:
        try:
            return msgspec.convert(await self._call("GET", "tinker-atropos/status", None), Status)
        except msgspec.ValidationError as error:
            raise RunError(f"{self.url} has no groups to lease: a run may train there itself ({error})") from error

    async def _call(self, method: str, path: str, body: object) -> dict[str, object]:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as session:
                data = None if body is None else msgspec.json.encode(body)
                timeout = aiohttp.ClientTimeout(total=min(60.0, GONE_SECONDS))
                async with session.request(method, f"{self.url}/{path}", data=data, timeout=timeout) as answer:
                    content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        if answer.status >= 500:
            raise TransientError(f"{answer.status} {content.decode(errors='replace')[:200]}")
        if answer.status != 200:
            raise RunError(
                f"the trajectory API at {self.url} refused {path}: {answer.status} "
                f"{content.decode(errors='replace')[:500]}"
            )
        try:
            found: dict[str, object] = msgspec.json.decode(content, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise RunError(f"{self.url} is no trajectory API: {path} answered {content[:80]!r}") from error
        return found

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Call until the API answers; raises `RunError` when it has been gone for long."""
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), 0.2
        while True:
            try:
                return await call()
            except FencedOut as error:
                raise FencedOut(
                    f"{error}. Either another trainer has registered at {self.url}, or the API was started anew "
                    "without what it held; continue with --resume"
                ) from error
            except TransientError as error:
                gone = loop.time() - max(began, self._api.answered)  # a lease may wait for hours, and be answered
                if gone >= GONE_SECONDS:
                    raise RunError(
                        f"the trajectory API at {self.url} has not answered for {gone:.0f} s: {error}. Start it with "
                        "`tinker-atropos run-api`, then continue this run with --resume"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)
