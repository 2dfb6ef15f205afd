"""What the server does for its clients, without HTTP: sessions, training requests, saved states, samplers.

Methods belong to the event loop's thread; the functions handed to `Training.submit` run on its worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker import lora
from tinker_atropos_local_tinker.adam import adam_params
from tinker_atropos_local_tinker.answers import Busy, Gone, NotFound
from tinker_atropos_local_tinker.base_model import BaseModel
from tinker_atropos_local_tinker.engine import Datum, Engine, TrainedModel, fingerprint
from tinker_atropos_local_tinker.fields import flag, mapping, metadata, optional_text, text, whole
from tinker_atropos_local_tinker.futures import PROTO, Answer, FutureTable, failed_answer, json_answer
from tinker_atropos_local_tinker.journal import Event, Journal, JournalError, datum_hash
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.records import Kind, Run
from tinker_atropos_local_tinker.sampler import Sampler, SampleResult
from tinker_atropos_local_tinker.samplers import Samplers, SamplingSession
from tinker_atropos_local_tinker.states import States
from tinker_atropos_local_tinker.store import Store
from tinker_atropos_local_tinker.training import Lane, Training
from tinker_atropos_local_tinker.wire import MAX_SAMPLES, PassRequest, decode_sample, encode_pass, encode_sample

log = logging.getLogger(__name__)

SESSION_SECONDS = 3600.0  # without a heartbeat; the SDK sends one every 10 s
MAX_WAITING_SAMPLES = 20_000
CLONE_BLOCK = 1_000_000_000  # the SDK numbers the requests of its k-th client of a sampler from k * 10^9


@dataclass(slots=True)
class Session:
    """One SDK client."""

    session_id: str
    created: float
    seen: float
    user_metadata: dict[str, str] | None
    display_name: str | None = None


class Service:
    """One server's state: made on the event loop that it will be used from."""

    def __init__(self, base: BaseModel, engine: Engine, store: Store, *, deterministic: bool) -> None:
        self.base = base
        self.store = store
        self.futures = FutureTable()
        self.training = Training(self.futures)
        self._base_snapshot = Snapshot("base")
        self.samplers = Samplers(self._base_snapshot)
        self.sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._engine = engine
        self._journal = Journal(store.journal_path)
        self.states = States(base, engine, store, self._journal)
        self._sampler = Sampler(base, deterministic=deterministic)
        self._deterministic = deterministic
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Stop the worker threads and let go of the store."""
        self._sampler.close()
        self.training.close()
        self._journal.close()
        self.store.close()

    # --- sessions

    def create_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a session."""
        session_id, now = str(uuid.uuid4()), time.time()
        self.sessions[session_id] = Session(session_id, now, now, metadata(body), optional_text(body, "display_name"))
        return {"type": "create_session", "session_id": session_id}

    def session(self, session_id: Any) -> Session:
        """Return a live session and note that its client is there; raises `Gone`, at which the SDK ends its own."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Gone(f"session {session_id!r} has ended, or the server was restarted since")
        session.seen = time.time()
        return session

    def finish_session(self, session_id: str) -> None:
        """End a session: its samplers and models are released, its running samples cancelled. Ending twice is fine."""
        if self.sessions.pop(session_id, None) is None:
            return
        for sampler_id in self.samplers.ids(session_id):
            self.futures.forget_session(sampler_id)
        for request in self.samplers.close_session(session_id):
            self._sampler.cancel(request)
        self.training.close_session(session_id)

    def tidy(self) -> None:
        """Drop what timed out; called now and then."""
        now = time.time()
        for session in [s for s in self.sessions.values() if now - s.seen > SESSION_SECONDS]:
            log.info("session %s sent no heartbeat for %.0f s; it is ended", session.session_id, now - session.seen)
            self.finish_session(session.session_id)
        self.training.fail_gaps()
        self.futures.expire()
        self.futures.expire_abandoned()

    # --- training

    def create_model(self, body: Mapping[str, Any], raw: bytes) -> str:
        """Make a model with a fresh adapter; returns the request's id."""
        session = self.session(body.get("session_id"))
        model_id = f"{session.session_id}:train:{whole('model_seq_id', body.get('model_seq_id'))}"
        self.states.check_base_model(body.get("base_model"))
        _check_optimizer(mapping(body, "optimizer_config"))
        given = mapping(body, "lora_config")
        config = {"rank": 32} if given is None else given
        seed = config.get("seed")
        if seed is None:
            seed = 0 if self._deterministic else secrets.randbits(32)
        parts = {key: flag(config, key, True) for key in ("train_attn", "train_mlp", "train_unembed")}
        rank = whole("lora_config.rank", config.get("rank"), 1, lora.MAX_RANK)
        spec = lora.LoraSpec(rank, whole("lora_config.seed", seed, None, None), **parts)
        noted = metadata(body)

        def work(lane: Lane) -> Answer:
            return self._making(lane, lambda: self._create(lane, spec, noted))

        return self.training.submit(self.training.open(model_id, session.session_id), 0, raw, work)

    def _create(self, lane: Lane, spec: lora.LoraSpec, noted: dict[str, str] | None) -> dict[str, Any]:
        lane.model = self._engine.create(lane.model_id, spec)
        self._add_run(lane.model, noted)
        self._journal.write("create_model", lane.model_id, 0)
        return {"type": "create_model", "model_id": lane.model_id}

    def _making(self, lane: Lane, make: Any) -> Answer:
        try:
            return json_answer(make())
        except Exception as error:
            lane.model = None
            lane.failure = str(error)
            raise

    def _add_run(self, model: TrainedModel, noted: dict[str, str] | None) -> None:
        self.store.add_run(Run(model.model_id, self.base.name, model.spec.as_json(), time.time(), noted))

    def _record(self, event: Event, lane: Lane, model: TrainedModel, **fields: Any) -> None:
        """Write down how a model was trained. Where that fails, nothing more is made of it: no step, no checkpoint."""
        try:
            self._journal.write(event, model.model_id, model.step, **fields)
        except JournalError as error:
            lane.unrecorded = f"{event}: {error}"
            model.gradients = None
            raise

    def run_pass(self, request: PassRequest, raw: bytes) -> str:
        """Run a forward or forward_backward pass; returns the request's id."""

        def work(lane: Lane) -> Answer:
            model = lane.trained()
            data = request.data()
            result = self._engine.run(model, data, request.loss, request.config, backward=request.backward)
            if request.backward:
                hashes = [_hash(datum) for datum in data]
                self._record("forward_backward", lane, model, data=hashes, loss=request.loss)
            return Answer(encode_pass(result), PROTO)

        return self.training.submit(self.training.lane(request.model_id), request.seq_id or None, raw, work)

    def optim_step(self, body: Mapping[str, Any], raw: bytes) -> str:
        """Step the optimiser; returns the request's id."""

        def work(lane: Lane) -> Answer:
            if body.get("optimizer_params") is not None:
                raise UserError("only Adam is served here; pass AdamParams")
            model = lane.trained()
            metrics = self._engine.optim_step(model, adam_params(mapping(body, "adam_params") or {}))
            self._record("optim_step", lane, model)
            return json_answer({"metrics": metrics})

        return self.training.submit(self.training.lane(text(body, "model_id")), body.get("seq_id"), raw, work)

    # --- saved states

    def save(self, kind: Kind, body: Mapping[str, Any], raw: bytes) -> str:
        """Save weights under a name, with the optimiser for `weights`; returns the request's id."""

        def work(lane: Lane) -> Answer:
            saved = self.states.save(lane.trained(), kind, body)
            fields: dict[str, Any] = {"path": saved.path}
            return json_answer({**fields, "size_bytes": saved.size_bytes} if kind == "external_weights" else fields)

        return self.training.submit(self.training.lane(text(body, "model_id")), body.get("seq_id"), raw, work)

    def load(self, body: Mapping[str, Any], raw: bytes) -> str:
        """Load a saved state into a model, or make a model from it; returns the request's id."""
        path, optimizer, noted = text(body, "path"), flag(body, "optimizer", False), metadata(body)
        if body.get("base_model") is not None:
            self.states.check_base_model(body["base_model"])
        _check_optimizer(mapping(body, "optimizer_config"))
        if body.get("session_id") is None:

            def work(lane: Lane) -> Answer:
                lane.model = self.states.load(lane.model_id, path, optimizer, lane.made())
                lane.unrecorded = None
                return json_answer(_loaded(lane, path))

            return self.training.submit(self.training.lane(text(body, "model_id")), body.get("seq_id"), raw, work)
        session = self.session(body["session_id"])
        model_id = f"{session.session_id}:train:{whole('model_seq_id', body.get('model_seq_id'))}"

        def make(lane: Lane) -> Answer:
            def build() -> dict[str, Any]:
                lane.model = self.states.load(lane.model_id, path, optimizer, None)
                self._add_run(lane.model, noted)
                return _loaded(lane, path)

            return self._making(lane, build)

        return self.training.submit(self.training.open(model_id, session.session_id), 0, raw, make)

    # --- samplers

    def save_for_sampler(self, body: Mapping[str, Any], raw: bytes) -> str:
        """Save weights to sample from: by name, or for this session only, in memory; returns the request's id."""
        number = body.get("sampling_session_seq_id")
        if number is None:
            return self.save("sampler_weights", body, raw)
        lane = self.training.lane(text(body, "model_id"))
        session = self.session(lane.session_id)
        kind = body.get("kind", "snapshot")
        if kind not in ("snapshot", "inflight"):
            raise UserError(f"kind {kind!r} is unknown; choose snapshot or inflight")
        sampler_id = f"{session.session_id}:sample:{whole('sampling_session_seq_id', number)}"

        def work(lane: Lane) -> Answer:
            model = lane.trained()
            key = fingerprint(model.adapter)
            snapshot = Snapshot(key, lora.frozen_copy(model.adapter), model.spec.rank)
            inflight_of = model.model_id if kind == "inflight" else None
            opened = SamplingSession(sampler_id, session.session_id, key, inflight_of=inflight_of)
            asyncio.run_coroutine_threadsafe(_call(self._open_sampler, opened, snapshot), self._loop).result()
            return json_answer({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        # The SDK numbers a repetition's sampler anew; it is the same request all the same, and opens one sampler.
        same = json.dumps({k: v for k, v in body.items() if k != "sampling_session_seq_id"}, sort_keys=True).encode()
        return self.training.submit(lane, body.get("seq_id"), same, work)

    async def create_sampling_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open a sampler on saved weights or on the base model."""
        session = self.session(body.get("session_id"))
        number = whole("sampling_session_seq_id", body.get("sampling_session_seq_id"))
        sampler_id = f"{session.session_id}:sample:{number}"
        path = optional_text(body, "model_path")
        if sampler_id in self.samplers:
            return {"type": "create_sampling_session", "sampling_session_id": sampler_id}  # sent again
        if path is not None:
            snapshot = await asyncio.to_thread(self.states.snapshot, path)
            session = self.session(session.session_id)  # it may have ended meanwhile
        else:
            self.states.check_base_model(body.get("base_model"))
            snapshot = self._base_snapshot
        self._open_sampler(SamplingSession(sampler_id, session.session_id, snapshot.key, path), snapshot)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _open_sampler(self, sampler: SamplingSession, snapshot: Snapshot) -> None:
        for dropped in self.samplers.open(sampler, snapshot):
            self.futures.forget_session(dropped)

    def sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Queue a sampling request; its future is a SampleResponse."""
        sampler = self.samplers.get(body.get("sampling_session_id"))  # type: ignore[arg-type]
        self.session(sampler.session_id)
        seq = body.get("seq_id")
        seq = secrets.randbits(40) if seq is None else whole("seq_id", seq)
        request_id = f"{sampler.sampler_id}:{seq}"
        count = body.get("num_samples", 1)
        answer = {
            "request_id": request_id,
            "sample_sequence_ids": [
                f"{request_id}:{i}" for i in range(min(count, MAX_SAMPLES) if isinstance(count, int) else 0)
            ],
        }
        if request_id in self.futures:
            return answer  # sent again because the first answer was lost
        if self._sampler.waiting >= MAX_WAITING_SAMPLES:
            raise Busy(f"{MAX_WAITING_SAMPLES} sampling requests are waiting")
        snapshot = self.samplers.snapshot(sampler)
        self.futures.open(request_id, (sampler.sampler_id, seq // CLONE_BLOCK))
        try:
            params = decode_sample(body, self.base)
        except UserError as error:
            self.futures.resolve(request_id, failed_answer(error))
            return answer

        def finish(answer: Answer) -> None:
            sampler.requests.pop(request_id, None)
            self.futures.resolve(request_id, answer)

        def done(result: SampleResult | BaseException) -> None:
            if isinstance(result, BaseException):
                found = failed_answer(result)
            else:
                found = Answer(encode_sample(params, result), PROTO)
            self._loop.call_soon_threadsafe(finish, found)

        sampler.requests[request_id] = self._sampler.submit(params, snapshot, done)
        return answer

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request; one that is done, or unknown, is left alone."""
        sampler_id = request_id.rpartition(":")[0]
        try:
            running = self.samplers.get(sampler_id).requests.get(request_id)
        except NotFound:
            return
        if running is not None:
            self._sampler.cancel(running)


def _loaded(lane: Lane, path: str) -> dict[str, Any]:
    return {"type": "load_weights", "path": path, "model_id": lane.model_id}


async def _call(function: Any, *args: Any) -> None:
    function(*args)


def _hash(datum: Datum) -> str:
    inputs = datum.inputs
    return datum_hash(datum.tokens, inputs.get("target_tokens"), inputs.get("logprobs"), inputs.get("advantages"))


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise UserError(f"optimizer {config.get('type')!r} is not served here; leave it out for AdamW")
