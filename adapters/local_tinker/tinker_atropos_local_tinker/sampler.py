"""Schedules sampling requests on a thread of its own: who is decoded together, under which weights, in what order.

First come, first served: a request that does not fit holds back every later one, so none starves. Requests for one
snapshot share a batch, joining it while it runs. In deterministic mode each request is a batch of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.base_model import BaseModel
from tinker_atropos_local_tinker.decode import Decoding, Row, Sampled, SampleParams, Scores
from tinker_atropos_local_tinker.merged import KEPT, MergedModels, Snapshot

log = logging.getLogger(__name__)

MAX_ROWS = 64  # sequences decoded together
KV_BUDGET_BYTES = 3 << 30
MAX_ACTIVE = 4  # batches that take turns
SLICE = 4  # tokens that a batch decodes in its turn
QUIET_SECONDS, GATHER_SECONDS = 0.004, 0.03  # how long a first request waits for others


@dataclass(slots=True, eq=False)
class SampleResult:
    """What a request gets: its sequences in order, and its prompt's scores where it asked for them."""

    sequences: list[Sampled]
    scores: Scores | None


Done = Callable[[SampleResult | BaseException], None]


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `admitted` and `finished` count its samples."""

    params: SampleParams
    snapshot: Snapshot
    done: Done
    sequences: list[Sampled | None]
    scores: Scores | None = None
    admitted: int = 0
    finished: int = 0
    cancelled: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Active:
    decoding: Decoding
    snapshot: Snapshot
    owners: dict[int, Request] = field(default_factory=dict)  # by id(row)
    reserved: int = 0  # bytes of cache in the worst case


class Sampler:
    """The sampling side of the server. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        base: BaseModel,
        *,
        deterministic: bool = False,
        max_rows: int = MAX_ROWS,
        kv_budget_bytes: int = KV_BUDGET_BYTES,
    ) -> None:
        self._base = base
        self._deterministic = deterministic
        self._max_rows = max_rows
        self._budget = kv_budget_bytes
        self._pending: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._active: OrderedDict[Any, _Active] = OrderedDict()
        self._models = MergedModels(base)
        self._numbers = itertools.count()
        self._last_arrival = 0.0
        self._thread = threading.Thread(target=self._work, name="sampling", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return how many requests have not begun."""
        return len(self._pending)

    def submit(self, params: SampleParams, snapshot: Snapshot, done: Done) -> Request:
        """Queue a request; `done` is called once, on the sampling thread, with its result or its failure."""
        request = Request(params, snapshot, done, [None] * params.samples)
        with self._changed:
            self._pending.append(request)
            self._last_arrival = time.monotonic()
            self._changed.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Stop working on a request; it ends with a `UserError` unless it has ended already."""
        request.cancelled = True
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its present step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=30)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._pending or self._active or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                self._gather()
            try:
                self._drop_cancelled()
                self._admit()
                for key in list(self._active):
                    self._turn(key)
            except Exception as error:  # the scheduler itself must outlive any request
                log.exception("sampling failed")
                for key in list(self._active):
                    self._fail(key, error)
                if self._pending:  # whatever it was, it must not come again for ever
                    self._close_request(self._pending.popleft(), error)

    def _gather(self) -> None:
        """Wait a moment for the requests that come with the first one."""
        if self._active or self._deterministic:
            return
        end = time.monotonic() + GATHER_SECONDS
        while time.monotonic() < end and time.monotonic() - self._last_arrival < QUIET_SECONDS:
            self._changed.wait(QUIET_SECONDS)

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._pending if r.cancelled]:
            self._pending.remove(request)
            self._close_request(request, UserError("the request was cancelled"))
        for key, active in list(self._active.items()):
            rows = [row for row in active.decoding.rows if active.owners[id(row)].cancelled]
            if not rows:
                continue
            owners = {id(active.owners[id(row)]): active.owners.pop(id(row)) for row in rows}
            active.decoding.drop(rows)
            active.reserved -= sum(self._row_bytes(row.params) for row in rows)
            for request in owners.values():
                self._close_request(request, UserError("the request was cancelled"))
            if not active.decoding.rows:
                del self._active[key]

    def _admit(self) -> None:
        """Begin requests in the order they came, as long as there is room."""
        fresh: dict[Any, list[tuple[Request, list[Row]]]] = {}
        while self._pending:
            request = self._pending[0]
            key = next(self._numbers) if self._deterministic else request.snapshot.key
            rows = self._room(key, request)
            if rows == 0:
                break
            if key not in self._active:
                try:
                    in_use = {a.snapshot.key for a in self._active.values()}
                    model = self._models.get(request.snapshot, in_use)
                except Exception as error:
                    log.exception("weights could not be prepared")
                    self._pending.popleft()
                    self._close_request(request, error)
                    continue
                self._active[key] = _Active(Decoding(self._base, model), request.snapshot)
            active = self._active[key]
            batch = [Row(request.params, request.admitted + i, self._base) for i in range(rows)]
            request.admitted += rows
            active.reserved += rows * self._row_bytes(request.params)
            active.owners.update({id(row): request for row in batch})
            fresh.setdefault(key, []).append((request, batch))
            if request.admitted == request.params.samples:
                self._pending.popleft()
        for key, groups in fresh.items():
            try:
                found = self._active[key].decoding.add([(r.params, rows) for r, rows in groups])
            except Exception as error:
                log.exception("a prompt could not be run")
                self._fail(key, error)
                continue
            for (request, _), scores in zip(groups, found, strict=True):
                request.scores = scores if request.scores is None else request.scores

    def _room(self, key: Any, request: Request) -> int:
        """Return how many of the request's samples can begin in batch `key` now."""
        active = self._active.get(key)
        if active is None:
            snapshots = {a.snapshot.key for a in self._active.values()} | {request.snapshot.key}
            if len(self._active) >= MAX_ACTIVE or len(snapshots) > KEPT:
                return 0
        left = request.params.samples - request.admitted
        fit = min(left, self._max_rows, max(1, self._budget // self._row_bytes(request.params)))
        if self._active:
            used = sum(a.reserved for a in self._active.values())
            by_memory = max(0, self._budget - used) // self._row_bytes(request.params)
            if self._deterministic:  # the shape of a batch must not depend on what runs beside it
                return fit if by_memory >= fit else 0
            fit = min(fit, by_memory, self._max_rows - (len(active.owners) if active else 0))
        return max(0, fit)

    def _row_bytes(self, params: SampleParams) -> int:
        return self._base.kv_bytes * (len(params.prompt) + params.max_tokens)

    def _turn(self, key: Any) -> None:
        active = self._active[key]
        try:
            for _ in range(SLICE):
                for row in active.decoding.advance():
                    request = active.owners.pop(id(row))
                    active.reserved -= self._row_bytes(row.params)
                    request.sequences[row.sample] = row.sequence
                    request.finished += 1
                    if request.finished == request.params.samples:
                        self._close_request(request, None)
                if not active.decoding.rows:
                    del self._active[key]
                    return
        except Exception as error:
            log.exception("decoding failed")
            self._fail(key, error)

    def _fail(self, key: Any, error: BaseException) -> None:
        active = self._active.pop(key)
        for request in {id(r): r for r in active.owners.values()}.values():
            if request in self._pending:
                self._pending.remove(request)
            self._close_request(request, error)

    @staticmethod
    def _close_request(request: Request, error: BaseException | None) -> None:
        if request.closed:
            return
        request.closed = True
        if error is not None:
            request.cancelled = True  # its other rows, if any, leave with the next step
            request.done(error)
            return
        request.done(SampleResult([s for s in request.sequences if s is not None], request.scores))
