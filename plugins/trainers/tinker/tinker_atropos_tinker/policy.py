"""Samples from one immutable snapshot of a policy through the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tinker_atropos.errors import DataError, PolicyUnavailable, RunError, TinkerAtroposError
from tinker_atropos.trajectory import FloatArray, IntArray, PolicyRef, Sample, SamplingParams, Stop

from tinker_atropos_tinker.config import TinkerConfig, is_loopback
from tinker_atropos_tinker.local import refuse_dead
from tinker_atropos_tinker.model_tokenizer import hub_tokenizer, local_tokenizer
from tinker_atropos_tinker.service import address, context_length, open_sampler, sdk
from tinker_atropos_tinker.service_errors import sampling_error
from tinker_atropos_tinker.service_log import LOGGER, Reporter

if TYPE_CHECKING:
    import tinker


async def open_policy(ref: PolicyRef, config: TinkerConfig) -> TinkerPolicy:
    """Open the policy that a reference names, in any process. Raises `PolicyUnavailable` if it can't be had now."""
    try:
        where = address(config, ref.endpoint)
        reporter = Reporter(LOGGER.warning)

        async def opened() -> TinkerPolicy:
            client = await open_sampler(ref, where)
            context = await context_length(where, client.get_base_model())
            return TinkerPolicy(ref, client, context, reporter, local=config.local)

        return await reporter.told(opened(), f"the policy of step {ref.step}", lambda: refuse_dead(ref.endpoint))
    except TinkerAtroposError:
        raise
    except Exception as error:
        refuse_dead(ref.endpoint)
        raise sampling_error(error) from error


class TinkerPolicy:
    """A `TextPolicy` over the SDK's sampling client."""

    def __init__(
        self,
        ref: PolicyRef,
        client: tinker.SamplingClient,
        context_length: int | None,
        reporter: Reporter,
        *,
        local: bool = False,
    ) -> None:
        self.ref = ref
        self.context_length = context_length
        self._client = client
        self._reporter = reporter
        self._local = local
        self._tokenizer: Any = None

    def tokenizer(self) -> Any:
        """Return the model's tokenizer; raises `DataError` where a hub must be asked and does not answer."""
        if self._tokenizer is None:
            model = self._client.get_base_model()
            served_here = self.ref.endpoint is not None and is_loopback(self.ref.endpoint)
            found = local_tokenizer(model, required=self._local) if self._local or served_here else None
            self._tokenizer = hub_tokenizer(model, self._client.get_tokenizer) if found is None else found
        return self._tokenizer

    async def sample(self, prompt: IntArray, params: SamplingParams, n: int) -> list[Sample]:
        """Return `n` samples of `prompt int32[T]`; a cancellation reaches the service.

        Raises `UpdateUncertain` where the local server of the run has ended: with it the weights in training.
        """
        if len(prompt) == 0:
            raise DataError("the prompt has no tokens; a policy samples after one token at least")
        tinker_params = sampling_params(params)
        try:
            request = self._client.sample(sdk().ModelInput.from_ints(prompt.tolist()), n, tinker_params)
            response = await self._told(request, "samples")
        except Exception as error:
            refuse_dead(self.ref.endpoint)
            raise sampling_error(error) from error
        if len(response.sequences) != n:
            raise PolicyUnavailable(f"asked for {n} samples, the service returned {len(response.sequences)}")
        return [read_sample(sequence, self.ref) for sequence in response.sequences]

    async def logprobs(self, tokens: IntArray) -> FloatArray:
        """Return `float32[T]`, NaN at the first token."""
        if len(tokens) == 0:
            raise DataError("no tokens to score; give one at least")
        try:
            request = self._client.compute_logprobs(sdk().ModelInput.from_ints(tokens.tolist()))
            values = await self._told(request, "log-probabilities")
        except Exception as error:
            refuse_dead(self.ref.endpoint)
            raise sampling_error(error) from error
        if values is None or len(values) != len(tokens):
            got = "none" if values is None else len(values)
            raise PolicyUnavailable(
                f"asked for the log-probabilities of {len(tokens)} tokens, the service returned {got}"
            )
        found = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
        if not np.isfinite(found[1:]).all():
            raise PolicyUnavailable("the service returned a log-probability that is missing or not finite")
        return found

    async def _told(self, request: Any, what: str) -> Any:
        return await self._reporter.told(
            request, f"{what} of the policy of step {self.ref.step}", lambda: refuse_dead(self.ref.endpoint)
        )


def sampling_params(params: SamplingParams) -> tinker.SamplingParams:
    """Return the SDK's parameters; raises `RunError` where a stop has no form there."""
    return sdk().SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop=sampler_stop(params.stop),
    )


def sampler_stop(stop: Stop) -> list[str] | list[int] | None:
    """Return the stop in the SDK's form: None (the model's own), a list of strings, or a list of ids.

    `[]` stays `[]`, which turns even the end of turn off. Raises `RunError` for strings and ids in one list.
    """
    if stop is None:
        return None
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, int):
        return [stop]
    strings = [item for item in stop if isinstance(item, str)]
    ids = [int(item) for item in stop if not isinstance(item, str)]
    if strings and ids:
        raise RunError(f"stop {list(stop)!r} mixes text and token ids; the Tinker service takes one or the other")
    return strings or ids


def read_sample(sequence: Any, ref: PolicyRef) -> Sample:
    """Return one sampled sequence; raises `PolicyUnavailable` where its log-probabilities are missing or broken."""
    tokens = np.asarray(sequence.tokens, dtype=np.int32)
    if sequence.logprobs is None:
        raise PolicyUnavailable("the service returned a sample without log-probabilities, so it can't be trained on")
    logprobs = np.asarray(sequence.logprobs, dtype=np.float32)
    if logprobs.shape != tokens.shape or not np.isfinite(logprobs).all():
        raise PolicyUnavailable(
            f"the service returned {logprobs.size} log-probabilities for {tokens.size} sampled tokens, or one that is "
            "not finite"
        )
    if sequence.stop_reason not in ("stop", "length"):
        raise PolicyUnavailable(f"the service returned stop_reason {sequence.stop_reason!r}; expected stop or length")
    return Sample(tokens=tokens, logprobs=logprobs, stop_reason=sequence.stop_reason, ref=ref)
