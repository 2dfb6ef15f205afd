"""The sampling sessions: which weights each one samples from, kept apart from everything trained later.

Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tinker_atropos_local_tinker.answers import Gone, NotFound
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.sampler import Request

SNAPSHOT_BYTES = 2 << 30
SNAPSHOTS_KEPT = 8  # even where they exceed SNAPSHOT_BYTES


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

    def __init__(self, base: Snapshot, limit_bytes: int = SNAPSHOT_BYTES) -> None:
        self._base = base
        self._limit = limit_bytes
        self._sessions: dict[str, SamplingSession] = {}
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._inflight: dict[str, str] = {}

    def open(self, session: SamplingSession, snapshot: Snapshot) -> None:
        """Add a sampling session, and its weights."""
        self._sessions[session.sampler_id] = session
        self.publish(session.inflight_of, snapshot)

    def publish(self, inflight_of: str | None, snapshot: Snapshot) -> None:
        """Keep weights; with a model id, its in-flight sessions use them from now on."""
        if inflight_of is not None:
            self._inflight[inflight_of] = snapshot.key
        if snapshot is not self._base:
            self._snapshots[snapshot.key] = snapshot
            self._snapshots.move_to_end(snapshot.key)
            self._bound()

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._sessions

    def get(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session; raises `NotFound`."""
        session = self._sessions.get(sampler_id)
        if session is None:
            raise NotFound(f"no sampler {sampler_id!r} here; its session has ended or the server was restarted")
        return session

    def snapshot(self, session: SamplingSession) -> Snapshot:
        """Return the weights that a request uses now; raises `Gone` where they had to be forgotten."""
        key = self._inflight[session.inflight_of] if session.inflight_of is not None else session.weights_key
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
        used = {s.weights_key for s in self._sessions.values()}
        used |= {self._inflight[s.inflight_of] for s in self._sessions.values() if s.inflight_of is not None}
        for key in [key for key in self._snapshots if key not in used]:
            del self._snapshots[key]
        return running

    def _bound(self) -> None:
        total = sum(s.size_bytes for s in self._snapshots.values())
        while total > self._limit and len(self._snapshots) > SNAPSHOTS_KEPT:
            _, oldest = self._snapshots.popitem(last=False)
            total -= oldest.size_bytes
