"""The sampling sessions: which weights each one samples from, kept apart from everything trained later.

Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from tinker_atropos_local_tinker.answers import Gone, NotFound
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.sampler import Request

SNAPSHOT_BYTES = 512 << 20
SNAPSHOTS_KEPT = 8  # even where they exceed SNAPSHOT_BYTES
SESSIONS_KEPT = 4096  # of one client; a training loop opens one a step


@dataclass(slots=True, eq=False)
class SamplingSession:
    """One sampler that the SDK holds a handle to. `inflight_of` names a model whose newest weights it uses."""

    sampler_id: str
    session_id: str
    weights_key: str
    model_path: str | None = None
    inflight_of: str | None = None
    clients: int = 0
    requests: dict[str, Request] = field(default_factory=dict)


class Samplers:
    """Sampling sessions and the snapshots they use, bounded in memory by forgetting the longest unused ones."""

    def __init__(self, base: Snapshot, limit_bytes: int = SNAPSHOT_BYTES, sessions_kept: int = SESSIONS_KEPT) -> None:
        self._base = base
        self._limit = limit_bytes
        self._sessions_kept = sessions_kept
        self._sessions: OrderedDict[str, SamplingSession] = OrderedDict()  # the longest unused first
        self._count: Counter[str] = Counter()
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._inflight: dict[str, str] = {}

    def open(self, session: SamplingSession, snapshot: Snapshot) -> list[str]:
        """Add a sampling session, and its weights; return the ids of those that had to go for it.

        An in-flight session's weights are from now on those of all in-flight sessions of that model.
        """
        if session.sampler_id not in self._sessions:
            self._count[session.session_id] += 1
        self._sessions[session.sampler_id] = session
        self._sessions.move_to_end(session.sampler_id)
        dropped = self._drop_unused_sessions(session)
        if session.inflight_of is not None:
            self._inflight[session.inflight_of] = snapshot.key
        if dropped or session.inflight_of is not None:
            self._drop_unused_snapshots()
        if snapshot is not self._base:
            self._snapshots[snapshot.key] = snapshot
            self._snapshots.move_to_end(snapshot.key)
            self._bound()
        return dropped

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._sessions

    def get(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session; raises `NotFound`."""
        session = self._sessions.get(sampler_id)
        if session is None:
            raise NotFound(
                f"no sampler {sampler_id!r} here; its session has ended, the server was restarted, or "
                f"{self._sessions_kept} samplers of the same client were used after it"
            )
        self._sessions.move_to_end(sampler_id)
        return session

    def snapshot(self, session: SamplingSession) -> Snapshot:
        """Return the weights that a request uses now; raises `Gone` where they had to be forgotten."""
        key = self._key(session)
        if key == self._base.key:
            return self._base
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            raise Gone(
                f"the weights of sampler {session.sampler_id!r} were released: {self._limit >> 20} MB of newer ones "
                f"came after them. Save weights that you need for long by name (save_weights_for_sampler)"
            )
        self._snapshots.move_to_end(key)
        return snapshot

    def ids(self, session_id: str) -> list[str]:
        """Return the sampler ids of a session."""
        return [s.sampler_id for s in self._sessions.values() if s.session_id == session_id]

    def close_session(self, session_id: str) -> list[Request]:
        """Forget a session's samplers; return the requests that are still on their way."""
        running: list[Request] = []
        for sampler_id in self.ids(session_id):
            running.extend(self._sessions.pop(sampler_id).requests.values())
        del self._count[session_id]
        self._drop_unused_snapshots()
        return running

    def _key(self, session: SamplingSession) -> str:
        return session.weights_key if session.inflight_of is None else self._inflight[session.inflight_of]

    def _drop_unused_sessions(self, opened: SamplingSession) -> list[str]:
        """Drop the longest unused sessions of one client beyond the limit, but none that is sampling."""
        excess = self._count[opened.session_id] - self._sessions_kept
        if excess <= 0:
            return []
        idle = (
            s.sampler_id
            for s in self._sessions.values()
            if s.session_id == opened.session_id and s is not opened and not s.requests
        )
        dropped = list(islice(idle, excess))
        for sampler_id in dropped:
            del self._sessions[sampler_id]
        self._count[opened.session_id] -= len(dropped)
        return dropped

    def _drop_unused_snapshots(self) -> None:
        used = {self._key(session) for session in self._sessions.values()}
        for key in [key for key in self._snapshots if key not in used]:
            del self._snapshots[key]

    def _bound(self) -> None:
        total = sum(s.size_bytes for s in self._snapshots.values())
        while total > self._limit and len(self._snapshots) > SNAPSHOTS_KEPT:
            _, oldest = self._snapshots.popitem(last=False)
            total -= oldest.size_bytes
