"""The trajectory API inside a run of ours: each posted group goes to the run's sink, and only then is acknowledged."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tinker_atropos.external import GroupSink, PolicyEndpoint
from tinker_atropos.trajectory import PolicyRef, TaskRef

from tinker_atropos_atropos.backend import Arrival, Conflict, Delivery, Full
from tinker_atropos_atropos.border import unfit
from tinker_atropos_atropos.convert import to_group
from tinker_atropos_atropos.posted import Arrived, Refused, normal_form
from tinker_atropos_atropos.repeats import WINDOW, Repeats
from tinker_atropos_atropos.roster import Environment, Load, RegisterEnv, Registration, Roster, admitted

AT_ONCE = 64
"""Posts that may wait for the sink at one time; each holds a group in memory."""


class SinkBackend:
    """Answers environments out of a run; its own trainer takes the batches."""

    def __init__(
        self,
        sink: GroupSink,
        endpoint: PolicyEndpoint,
        *,
        newest: Callable[[], PolicyRef | None] = lambda: None,
        trust_inference_logprobs: bool = False,
        images: bool = False,
        repeat_window: float = WINDOW,
    ) -> None:
        self._newest = newest  # what posted log-probabilities count as sampled from, where they are trusted
        self._sink = sink
        self._endpoint = endpoint
        self._trust = trust_inference_logprobs
        self._images = images
        self._places = asyncio.Semaphore(AT_ONCE)
        self._repeats = Repeats(repeat_window)
        self._roster = Roster()
        self._latest: Arrived | None = None
        self._arrived = 0
        self.counts: Counter[str] = Counter()
        """Groups by what became of them, and tokens as `tokens: …`."""

    async def start(self) -> None:
        """Stand in for the trainer: it is this run's."""
        info = self._sink.info
        registration = Registration(
            wandb_group=info.name,
            wandb_project="tinker-atropos",
            batch_size=info.batch_size,
            max_token_len=info.max_token_length,
            checkpoint_dir=str(info.folder.absolute()),
            save_checkpoint_interval=info.checkpoint_interval,
            starting_step=info.starting_step,
            num_steps=info.total_steps,
        )
        self._roster.register(registration)

    async def close(self) -> None:
        """Nothing is held here."""

    async def register(self, registration: Registration) -> dict[str, Any]:
        """Refuse: there is a trainer."""
        raise Conflict(f"run {self._sink.info.name!r} trains here itself; start `tinker-atropos run-api` for a trainer")

    async def register_env(self, asked: RegisterEnv) -> dict[str, Any]:
        """Admit an environment."""
        self._roster.check_fit(asked)
        assert self._roster.registration is not None
        return admitted(self._roster.admit(asked), self._roster.registration, self._sink.step)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """Note that an environment has gone."""
        environment = self._roster.find(number)
        if environment is None:
            return {"status": "failure", "error": f"env_id {number} is not registered"}
        environment.connected = False
        return {"status": "success"}

    def wandb_info(self) -> dict[str, Any]:
        """Return the run's name as the group."""
        return {"group": self._sink.info.name, "project": "tinker-atropos"}

    def info(self) -> dict[str, Any]:
        """Return the run's sizes."""
        return {"batch_size": self._sink.info.batch_size, "max_token_len": self._sink.info.max_token_length}

    def status(self) -> dict[str, Any]:
        """Return the run's step and what waits, in groups of the run's size."""
        return {"current_step": self._sink.step, "queue_size": self._sink.waiting // max(1, self._sink.info.group_size)}

    def status_env(self, number: int) -> dict[str, Any]:
        """Return what an environment steers its workers by; what waits counts as everybody's."""
        waiting = self._sink.waiting
        environment = self._known(number)
        self._roster.heard(number)
        return self._roster.status(environment, Load(waiting, {}, environment.group_size), self._sink.step)

    def details(self) -> dict[str, Any]:
        """Return what the protocol has no place for."""
        return {**self.status(), "counts": dict(self.counts)}

    @asynccontextmanager
    async def room(self, wait: float) -> AsyncIterator[None]:
        """Hold one of the places of posts that may wait for the sink."""
        try:
            async with asyncio.timeout(wait):
                await self._places.acquire()
        except TimeoutError:
            raise Full(f"{AT_ONCE} groups wait for the trainer already; post again later") from None
        try:
            yield
        finally:
            self._places.release()

    def prepare(self, arrival: Arrival) -> Arrival:
        """Return the group as it is: it is converted once a place is free."""
        return arrival

    async def put(self, prepared: Sequence[Arrival], wait: float) -> list[dict[str, Any]]:
        """Hand groups to the run; each is taken, or discarded with a reason, before its answer is given."""
        for arrival in prepared:
            self._check(arrival.group)
        deadline = time.monotonic() + wait
        return [await self._put(arrival, deadline) for arrival in prepared]

    async def _put(self, arrival: Arrival, deadline: float) -> dict[str, Any]:
        posted = arrival.group.posted
        name = "atropos"
        if posted.env_id is not None:
            name = self._known(posted.env_id).real_name
            self._roster.heard(posted.env_id)
        content = arrival.content or arrival.group.digest
        converted = to_group(
            posted,
            id=f"atropos-{self._repeats.name(content) if arrival.key is None else arrival.key}",
            task=TaskRef(split=name, index=self._arrived, seed=0),
            prove=self._endpoint.prove,
            newest=self._newest(),
            trust_inference_logprobs=self._trust,
        )
        self._arrived += 1
        self._latest = arrival.group
        if converted.discard is not None:
            self._count("discarded: " + converted.discard, converted.counts)
            await self._sink.discard(converted.group, converted.discard)
            return {"status": "received", "discarded": converted.discard}
        put = await self._sink.put(converted.group, wait=max(0.0, deadline - time.monotonic()))
        if put == "blocked":
            self._repeats.again(content)
            raise Full(f"{self._sink.waiting} trajectories wait for the trainer, and no more may; post again later")
        self._count(put, converted.counts if put == "accepted" else Counter())
        return {"status": "received"} if put == "accepted" else {"status": "received", "duplicate": True}

    def _count(self, outcome: str, tokens: Counter[str]) -> None:
        self.counts[outcome] += 1
        for name, count in tokens.items():
            self.counts[f"tokens: {name}"] += count
        shown = {f"tokens_{name}": float(self.counts[f"tokens: {name}"]) for name in ("trained", "unproven")}
        if self.counts["duplicate"]:
            shown["groups_duplicate"] = float(self.counts["duplicate"])
        for name in ("logprobs_disagree", "trusted"):
            if self.counts[f"tokens: {name}"]:
                shown[f"tokens_{name}"] = float(self.counts[f"tokens: {name}"])
        self._sink.metrics(shown)

    def _check(self, group: Arrived) -> None:
        if group.posted.env_id is not None:
            self._known(group.posted.env_id)
        context = self._endpoint.context_length
        found = unfit(group.posted, batch_size=self._sink.info.batch_size, context=context, images=self._images)
        if found is not None:
            raise Refused(found.place, found.message)

    def _known(self, number: int) -> Environment:
        environment = self._roster.find(number)
        if environment is None:
            raise Refused(("env_id",), f"{number} is not registered; POST /register-env gives a number")
        return environment

    def batch(self) -> AbstractAsyncContextManager[Delivery | dict[str, Any]]:
        """Refuse: the run's trainer takes the batches."""
        raise Conflict(f"run {self._sink.info.name!r} takes the batches itself; this API gives out none")

    def latest(self) -> bytes | None:
        """Return the group that arrived last."""
        return None if self._latest is None else normal_form(self._latest.body)

    async def reset(self) -> None:
        """Refuse: what waits belongs to the run."""
        raise Conflict(f"run {self._sink.info.name!r} owns what waits here; stop the run to be rid of it")
