"""Takes in training requests and runs them in order: by sequence number within a model, one at a time over all.

Taking in belongs to the event loop's thread, running to one worker thread. A request that comes twice runs once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tinker_atropos.errors import TrainerError, UserError

from tinker_atropos_local_tinker.answers import Busy, NotFound
from tinker_atropos_local_tinker.engine import TrainedModel
from tinker_atropos_local_tinker.fields import whole
from tinker_atropos_local_tinker.futures import Answer, FutureTable, failed_answer

log = logging.getLogger(__name__)

MAX_WAITING = 4096  # requests of one model that have not begun
MAX_WAITING_BYTES = 1 << 30  # of the bodies of all requests that have not been run
REMEMBERED = 1024  # requests of one model whose bodies are known again
GAP_SECONDS = 600.0  # longer than the SDK goes on trying to submit a request

Work = Callable[["Lane"], Answer]


@dataclass(frozen=True, slots=True)
class _Job:
    request_id: str
    work: Work
    size_bytes: int


@dataclass(slots=True)
class Lane:
    """One model's requests. `model` exists once the first of them, which makes it, has run."""

    model_id: str
    session_id: str
    next_seq: int = 0
    waiting: dict[int, tuple[_Job, float]] = field(default_factory=dict)
    bodies: OrderedDict[int, str] = field(default_factory=OrderedDict)
    model: TrainedModel | None = None
    failure: str | None = None
    closed: bool = False
    unrecorded: str | None = None

    def made(self) -> TrainedModel:
        """Return the model, in whatever state; raises `UserError` where making it failed."""
        if self.model is None:
            raise UserError(f"model {self.model_id} was not made: {self.failure or 'its session has ended'}")
        return self.model

    def trained(self) -> TrainedModel:
        """Return the model; raises `TrainerError` where `unrecorded` says what the journal lacks of its training."""
        model = self.made()
        if self.unrecorded is not None:
            raise TrainerError(
                f"model {self.model_id} was trained on something that is not in the journal ({self.unrecorded}); "
                f"load a saved state (load_state_with_optimizer) to go on"
            )
        return model


class Training:
    """The lanes of every model, and the thread that works on them."""

    def __init__(self, futures: FutureTable) -> None:
        self._futures = futures
        self._lanes: dict[str, Lane] = {}
        self._waiting_bytes = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._loop = asyncio.get_running_loop()

    def lane(self, model_id: str) -> Lane:
        """Return a model's lane; raises `NotFound`."""
        lane = self._lanes.get(model_id)
        if lane is None:
            raise NotFound(
                f"no model {model_id!r} in training here; its session has ended or the server was restarted. "
                f"Create one from a saved state (create_training_client_from_state_with_optimizer)"
            )
        return lane

    def lanes(self) -> list[Lane]:
        """Return every lane."""
        return list(self._lanes.values())

    def open(self, model_id: str, session_id: str) -> Lane:
        """Return the lane of a model that is about to be made, or that was made by the same request before."""
        return self._lanes.setdefault(model_id, Lane(model_id, session_id))

    def submit(self, lane: Lane, seq: int | None, body: bytes, work: Work) -> str:
        """Take in a request and return its id; raises `UserError` where this number came with another body before."""
        seq = lane.next_seq + len(lane.waiting) if seq is None else whole("seq_id", seq)
        request_id = f"{lane.model_id}:{seq}"
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        if seq in lane.bodies or seq < lane.next_seq:
            if lane.bodies.get(seq, digest) != digest:
                raise UserError(f"model {lane.model_id}: request {seq} was sent before with another content")
            return request_id
        # The very next request is always taken: later ones wait for it.
        if seq != lane.next_seq and (len(lane.waiting) >= MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES):
            raise Busy(f"model {lane.model_id}: too many requests are waiting")
        self._waiting_bytes += len(body)
        lane.bodies[seq] = digest
        while len(lane.bodies) > REMEMBERED:
            lane.bodies.popitem(last=False)
        self._futures.open(request_id)
        lane.waiting[seq] = _Job(request_id, work, len(body)), time.monotonic()
        while lane.next_seq in lane.waiting:
            job, _ = lane.waiting.pop(lane.next_seq)
            lane.next_seq += 1
            self._worker.submit(self._run, lane, job)
        return request_id

    def _run(self, lane: Lane, job: _Job) -> None:
        try:
            if lane.closed:
                raise UserError(f"model {lane.model_id}: its session has ended")
            answer = job.work(lane)
        except UserError as error:
            answer = failed_answer(error)
        except BaseException as error:  # whatever went wrong, the request must be answered
            log.exception("request %s failed", job.request_id)
            answer = failed_answer(error)
        self._loop.call_soon_threadsafe(self._finish, job, answer)

    def _finish(self, job: _Job, answer: Answer) -> None:
        self._waiting_bytes -= job.size_bytes
        self._futures.resolve(job.request_id, answer)

    def fail_gaps(self) -> None:
        """Fail requests that wait for a number that never came, so that nothing hangs."""
        now = time.monotonic()
        for lane in self._lanes.values():
            if lane.waiting and min(at for _, at in lane.waiting.values()) < now - GAP_SECONDS:
                self._abandon(lane, f"request {lane.next_seq} never arrived, so later ones can't run in order")

    def close_session(self, session_id: str) -> None:
        """Forget a session's models; what is saved stays."""
        for lane in [lane for lane in self._lanes.values() if lane.session_id == session_id]:
            lane.closed = True
            self._abandon(lane, "its session has ended")
            del self._lanes[lane.model_id]

    def _abandon(self, lane: Lane, reason: str) -> None:
        for job, _ in lane.waiting.values():
            self._finish(job, failed_answer(UserError(f"model {lane.model_id}: {reason}")))
        lane.waiting.clear()

    def close(self) -> None:
        """Finish the present request and end the thread."""
        self._worker.shutdown(wait=True, cancel_futures=True)
