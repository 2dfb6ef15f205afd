"""The trainer: one LoRA training run at a Tinker service, hosted or on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tinker_atropos.errors import CheckpointError, TinkerAtroposError, TrainerError, UpdateUncertain
from tinker_atropos.trainer import Checkpoint, RunSpec, Update
from tinker_atropos.trajectory import Batch, FloatArray, PolicyRef

from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.datums import TrainingData, to_tinker, training_data
from tinker_atropos_tinker.download import download_model, download_state, refuse_target
from tinker_atropos_tinker.learning_rate import learning_rate
from tinker_atropos_tinker.local import LocalServer, refuse_dead, start_local, stop_local
from tinker_atropos_tinker.preflight import default_model
from tinker_atropos_tinker.service import (
    Address,
    abandon_service,
    address,
    answer,
    check_model,
    forget_service,
    new_service,
    refuse_unreachable,
    sampler_uri,
    sdk,
    unlisted,
)
from tinker_atropos_tinker.service_errors import brief, checkpoint_error, is_refusal, trainer_error
from tinker_atropos_tinker.service_log import LOGGER, Reporter, forward_warnings, watch_queue, watch_retries
from tinker_atropos_tinker.update_metrics import grad_norm, to_probe, update_metrics
from tinker_atropos_tinker.update_warnings import RATIO_QUIET_STEPS, mismatch_warning, ratio_warning

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

CLOSE_SECONDS = 10.0
VERIFY_SECONDS = 10.0

PROBES = 4
"""Segments that are scored by sampler and trainer alike in a step whose trajectories are all stale."""


@dataclass(slots=True)
class _Running:
    """What exists between `start` and `close`."""

    spec: RunSpec
    model: str
    where: Address
    client: tinker.TrainingClient
    step: int
    samplers: dict[PolicyRef, Any]
    saved: dict[int, Checkpoint]
    attempts: dict[str, int]
    doubt: str | None = None
    ratio_quiet_until: int = 0


class TinkerTrainer:
    """A `Trainer` over the Tinker SDK.

    Requests of one update are sent back to back, so the service does them without waiting for us. After a failed or
    interrupted update it is not known what the weights are: every call then raises `UpdateUncertain`, until `start`
    goes back to a checkpoint.
    """

    def __init__(self, config: TinkerConfig) -> None:
        self.config = config
        self._now: _Running | None = None
        self._session: tuple[Address, tinker.ServiceClient] | None = None
        self._reporter: Reporter | None = None
        self._server: LocalServer | None = None
        self._cleanup = contextlib.ExitStack()

    async def start(self, spec: RunSpec, resume: Checkpoint | None) -> PolicyRef:
        """Create the LoRA model, or load a checkpoint with its optimiser; return its policy.

        May be called again, to go back to a checkpoint with the next lineage.
        """
        await self._drop_run()
        if self._reporter is None:
            self._reporter = Reporter(spec.say)
            self._cleanup.enter_context(forward_warnings(self._reporter))
        model = spec.model or default_model(self.config)
        try:
            where = await self._connect(spec, model)
            service = await self._told(new_service(where, spec.name), "a session at the Tinker service")
            self._session = (where, service)
            watch_retries(service, self._reporter)
            client = await self._training_client(spec, model, where, service, resume)
            watch_queue(client, self._reporter, "training")
            step = resume.step if resume is not None else 0
            now = _Running(spec, model, where, client, step, samplers={}, saved={}, attempts={})
            self._now = now
            if resume is not None:
                now.saved[step] = resume
            sampler = await self._told(client.save_weights_and_get_sampling_client(), "the first policy's weights")
        except TinkerAtroposError:
            raise
        except Exception as error:
            if resume is not None and is_refusal(error):
                raise checkpoint_error(error, f"checkpoint {resume.state} could not be loaded") from error
            raise trainer_error(error, "the trainer could not start") from error
        return self._adopt(now, sampler, step)

    async def update(self, batch: Batch) -> Update:
        """Take one optimiser step on the batch, also where all its advantages are zero.

        Raises `UpdateUncertain` where a reply was lost or a request failed, `TrainerError` for a batch that can't be
        trained on and for a loss that is not finite.
        """
        now = self._running()
        if batch.step != now.step:
            raise TrainerError(
                f"the batch is for step {batch.step}, the trainer is at step {now.step}; resume from a checkpoint"
            )
        data = training_data(batch, self.config.advantage, self.config.max_token_trainer_length)
        if not data.datums:
            reasons = ", ".join(f"{count} {reason}" for reason, count in data.left_out.items()) or "it is empty"
            raise TrainerError(
                f"nothing in the batch of step {batch.step} can be trained on ({reasons}); check "
                "tinker.max_token_trainer_length and the environment's masks"
            )
        now.doubt = f"the update of step {now.step} was interrupted"
        update = await self._step(now, data)
        now.doubt = None
        return update

    async def save(self, name: str) -> Checkpoint:
        """Save resumable state and sampler weights; a name that this run has used gets a number behind it.

        Raises `UpdateUncertain` where the local server has ended: then the weights are gone, and the run must rewind.
        """
        now = self._running()
        known = now.saved.get(now.step)
        if known is not None and known.name == name:
            return known
        now.attempts[name] = now.attempts.get(name, 0) + 1
        unique = name if now.attempts[name] == 1 else f"{name}-{now.attempts[name]}"
        ttl = self.config.checkpoint_ttl_seconds
        notes = {"run": now.spec.name, "lineage": str(now.spec.lineage), "step": str(now.step)}
        sent: list[Any] = []
        try:
            sent.append(now.client.save_state(unique, ttl_seconds=ttl, user_metadata=notes))
            sent.append(now.client.save_weights_for_sampler(unique, ttl_seconds=ttl, user_metadata=notes))
            paths = [
                (await self._told(sent[0], f"saving the state {unique}")).path,
                (await self._told(sent[1], f"saving the sampler weights {unique}")).path,
            ]
        except Exception as error:
            self._refuse_dead()
            raise checkpoint_error(error, f"checkpoint {unique} could not be saved") from error
        finally:
            for request in sent:
                request.future().cancel()
        await self._verify(now, paths)
        checkpoint = Checkpoint(name=name, step=now.step, state=paths[0], weights=paths[1])
        now.saved[now.step] = checkpoint
        return checkpoint

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        """Write a policy's weights as a PEFT adapter folder.

        The service hands out weights of the newest policy, of those at a checkpoint, and of a `tinker://…/weights/…`
        uri; raises `CheckpointError` for any other.
        """
        now = self._running()
        refuse_target(to)
        if "/weights/" in ref.uri:
            return await self._told(download_state(now.where, ref.uri, to), f"the download of {ref.uri}")
        ours = ref.run == now.spec.name and ref.lineage == now.spec.lineage
        try:
            if ours and ref.step == now.step:
                return await self._told(download_model(now.where, now.client, to), "the export of the weights")
            if ours and ref.step in now.saved:
                state = now.saved[ref.step].state
                return await self._told(download_state(now.where, state, to), f"the download of {state}")
        except Exception as error:
            raise checkpoint_error(error, f"the policy of step {ref.step} could not be exported") from error
        raise CheckpointError(
            f"the weights of step {ref.step} (lineage {ref.lineage}) were not kept; those of the newest step "
            f"({now.step}) and of the checkpoints at steps {sorted(now.saved)} can be exported"
        )

    async def release(self, ref: PolicyRef) -> None:
        """Forget the samplers of a policy and of older ones; who still uses one holds it. The service drops it then."""
        if self._now is not None:
            for known in [known for known in self._now.samplers if known.step <= ref.step]:
                del self._now.samplers[known]

    async def close(self) -> None:
        """End the session, and the local server."""
        try:
            await self._drop_run()
        finally:
            self._cleanup.close()
            server, self._server = self._server, None
            if server is not None:
                await asyncio.to_thread(stop_local, server)

    async def _connect(self, spec: RunSpec, model: str) -> Address:
        reporter = self._reporter
        assert reporter is not None
        if self._server is not None and not self._server.alive:
            stop_local(self._server)
            self._server = None
        if self.config.local and self._server is None:
            spec.say(f"starting a Tinker server on this machine with {model}")
            starting = start_local(
                spec.folder,
                model,
                deterministic=spec.deterministic,
                threads=self.config.local_threads,
                say=lambda line: reporter.line(f"local {line}", line),
            )
            self._server = await self._told(starting, "the local Tinker server")
        where = address(self.config, None if self._server is None else self._server.url)
        await refuse_unreachable(where)
        return where

    async def _training_client(
        self, spec: RunSpec, model: str, where: Address, service: tinker.ServiceClient, resume: Checkpoint | None
    ) -> tinker.TrainingClient:
        notes = {"run": spec.name, "lineage": str(spec.lineage)}
        if resume is not None:
            loading = service.create_training_client_from_state_with_optimizer(resume.state, user_metadata=notes)
            return await self._told(loading, f"the checkpoint {resume.state}")
        await self._told(check_model(where, model), "the service's list of models")
        creating = service.create_lora_training_client(
            model, rank=self.config.lora_rank, seed=spec.seed, user_metadata=notes
        )
        return await self._told(creating, f"a place to train {model}")

    async def _step(self, now: _Running, data: TrainingData) -> Update:
        rate = learning_rate(self.config, now.model)
        stage = "sending the batch"
        sent: list[Any] = []
        probes: dict[int, Any] = {}
        try:
            began = time.monotonic()
            # All three before any reply: the service works them off in this order without a round trip in between.
            forward = now.client.forward_backward(to_tinker(data.datums), self.config.loss)
            stepped = now.client.optim_step(self._adam(rate))
            saved = now.client.save_weights_and_get_sampling_client()
            sent += [forward, stepped, saved]
            probes = self._probe(now, data)
            stage = f"forward_backward of step {now.step}"
            passed = await self._told(forward, stage)
            forward_seconds = time.monotonic() - began
            metrics = update_metrics(data, _logprobs(passed), passed.metrics, await self._probed(probes))
            _refuse_broken(metrics["loss"], now.step, rate)
            stage = f"optim_step of step {now.step}"
            step = await self._told(stepped, stage)
            step_seconds = time.monotonic() - began - forward_seconds
            stage = f"sampler weights of step {now.step + 1}"
            sampler = await self._told(saved, stage)
            save_seconds = time.monotonic() - began - forward_seconds - step_seconds
        except Exception as error:
            now.doubt = f"{stage} failed ({brief(error)})"
            # Refused, or broken for a reason that comes again: a rewind would repeat it. A dead server is neither.
            if is_refusal(error) or (isinstance(error, TinkerAtroposError) and self._serving()):
                raise _ended(trainer_error(error, stage)) from error
            raise self._uncertain(now) from error
        finally:
            for request in sent:  # where one failed, the others may wait for it for ever
                request.future().cancel()
            for probe in probes.values():
                probe.future().cancel()
        metrics |= grad_norm(step.metrics or {})
        metrics["train/learning_rate"] = rate
        metrics["time/forward_backward"] = forward_seconds
        metrics["time/optim_step"] = step_seconds
        metrics["time/save_weights"] = save_seconds
        self._warn(now, metrics, rate, stale=not all(datum.fresh for datum in data.datums))
        return Update(self._adopt(now, sampler, now.step + 1), metrics, data.advantages)

    def _probe(self, now: _Running, data: TrainingData) -> dict[int, Any]:
        """Ask the sampler of the weights of this pass to score a few datums that an older policy sampled."""
        sampler = next((client for ref, client in now.samplers.items() if ref.step == now.step), None)
        if sampler is None:
            return {}
        return {
            place: sampler.compute_logprobs(
                sdk().ModelInput.from_ints([*datum.inputs.tolist(), int(datum.targets[-1])])
            )
            for place in to_probe(data, PROBES)
            for datum in (data.datums[place],)
        }

    async def _probed(self, probes: dict[int, Any]) -> dict[int, FloatArray]:
        """Return the scores that came; a probe that fails costs a figure, not the step."""
        found = {}
        for place, request in probes.items():
            try:
                values = await self._told(request, "log-probabilities to compare")
                found[place] = np.array([math.nan if v is None else v for v in values[1:]], dtype=np.float32)
            except Exception as error:
                LOGGER.warning("sampler and trainer could not be compared: %s", brief(error))
                return {}
        return found

    def _adam(self, rate: float) -> tinker.AdamParams:
        return sdk().AdamParams(
            learning_rate=rate,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            grad_clip_norm=self.config.grad_clip_norm,
        )

    def _adopt(self, now: _Running, sampler: tinker.SamplingClient, step: int) -> PolicyRef:
        assert self._reporter is not None
        watch_queue(sampler, self._reporter, "sampling")
        ref = PolicyRef(
            run=now.spec.name,
            lineage=now.spec.lineage,
            step=step,
            uri=sampler_uri(sampler),
            endpoint=now.where.url,
        )
        now.step = step
        now.samplers[ref] = sampler
        return ref

    def _warn(self, now: _Running, metrics: dict[str, float], rate: float, *, stale: bool) -> None:
        if mismatch := mismatch_warning(now.step, metrics, self.config.logprob_mismatch_warning):
            now.spec.say(mismatch)
        ratio = ratio_warning(now.step, metrics, rate, stale=stale)
        if ratio and now.step >= now.ratio_quiet_until:
            now.ratio_quiet_until = now.step + RATIO_QUIET_STEPS
            now.spec.say(ratio)

    async def _verify(self, now: _Running, paths: list[str]) -> None:
        """Say so where the service has acknowledged a checkpoint and does not list it."""
        try:
            asked = answer(unlisted(now.where, paths), "the list of checkpoints", VERIFY_SECONDS)
            absent = await self._told(asked, "the service's list of checkpoints")
        except Exception as error:
            self._refuse_dead()
            now.spec.say(f"warning: the service acknowledged {paths[0]} but could not be asked for it ({brief(error)})")
            return
        if absent:
            now.spec.say(f"warning: the service acknowledged {absent[0]} but does not list it yet")

    def _serving(self) -> bool:
        return self._server is None or self._server.alive

    def _running(self) -> _Running:
        if self._now is None:
            raise TrainerError("the trainer was not started; await start(spec, resume) first")
        if self._now.doubt is not None:
            raise self._uncertain(self._now)
        return self._now

    def _uncertain(self, now: _Running) -> UpdateUncertain:
        kept = now.saved[max(now.saved)].name if now.saved else "none yet: it begins anew"
        return UpdateUncertain(
            f"{now.doubt}: it is not known whether the optimiser step was taken, so these weights can't be trusted. "
            f"Rewind to the last manifest (checkpoint: {kept}); what was trained since is trained again"
        )

    async def _told(self, awaitable: Awaitable[T], stage: str) -> T:
        assert self._reporter is not None
        return await self._reporter.told(awaitable, stage, self._refuse_dead)

    def _refuse_dead(self) -> None:
        refuse_dead(None if self._server is None else self._server.url)

    async def _drop_run(self) -> None:
        """Leave the current session, if there is one; what can't be reached within seconds is left to its time-out."""
        now, self._now = self._now, None
        session, self._session = self._session, None
        if session is None:
            return
        where, service = session
        if not self._serving():
            abandon_service(where, service)
            return
        status = "success" if now is not None and now.doubt is None else "errored"
        closing: list[Callable[[], Awaitable[Any]]] = [lambda: service.close(status)]
        if self.config.local:
            closing.append(lambda: forget_service(where))
        for close in closing:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()


def _ended(error: TinkerAtroposError) -> TinkerAtroposError:
    """Add the way on to a failure of an update that would only come again."""
    return type(error)(f"{error}. What was saved stays sound: put that right, then --resume")


def _logprobs(passed: Any) -> list[FloatArray]:
    return [
        np.asarray(output["logprobs"].to_numpy(), dtype=np.float32).reshape(-1) for output in passed.loss_fn_outputs
    ]


def _refuse_broken(loss: float, step: int, rate: float) -> None:
    if not math.isfinite(loss):
        raise TrainerError(
            f"the loss of step {step} is {loss}, so the weights after it are useless; lower tinker.learning_rate (now "
            f"{rate:g}) or set tinker.grad_clip_norm to what train/grad_norm was before"
        )
