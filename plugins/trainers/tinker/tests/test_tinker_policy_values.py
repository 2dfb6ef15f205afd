from __future__ import annotations

import httpx
import numpy as np
import pytest
import tinker
from tinker.types import RequestErrorCategory, SampledSequence
from tinker_atropos.errors import ConfigError, DataError, PolicyUnavailable, RunError
from tinker_atropos.trajectory import PolicyRef, SamplingParams, Stop
from tinker_atropos_tinker.model_tokenizer import hub_tokenizer
from tinker_atropos_tinker.policy import read_sample, sampler_stop, sampling_params
from tinker_atropos_tinker.service_errors import is_refusal, sampling_error

REF = PolicyRef("run", 0, 0, "tinker://x")


@pytest.mark.parametrize(
    ("stop", "sent"),
    [(None, None), ("\n", ["\n"]), (7, [7]), ([], []), (["a", "b"], ["a", "b"]), ((1, 2), [1, 2])],
)
def test_stops_keep_their_meaning(stop: Stop, sent: list[str] | list[int] | None) -> None:
    assert sampler_stop(stop) == sent
    assert sampling_params(SamplingParams(4, stop=stop)).stop == sent


def test_text_and_ids_in_one_stop_are_refused() -> None:
    with pytest.raises(RunError, match="mixes"):
        sampler_stop(["a", 1])


def test_every_sampling_parameter_is_passed_on() -> None:
    sent = sampling_params(SamplingParams(9, temperature=0.5, top_p=0.9, top_k=3, seed=11))
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k, sent.seed) == (9, 0.5, 0.9, 3, 11)


def sequence(logprobs: list[float] | None) -> SampledSequence:
    values = None if logprobs is None else np.array(logprobs, dtype=np.float32)
    return SampledSequence("stop", "s", tokens_np=np.array([4, 5], dtype=np.int32), logprobs_np=values)


def test_a_sample_keeps_tokens_and_log_probabilities() -> None:
    sample = read_sample(sequence([-1, -2]), REF)
    assert sample.tokens.dtype == np.int32
    assert sample.logprobs.tolist() == [-1, -2]
    assert sample.stop_reason == "stop"


@pytest.mark.parametrize("broken", [None, [-1.0], [-1.0, float("nan")]])
def test_missing_log_probabilities_are_an_error_not_zeros(broken: list[float] | None) -> None:
    with pytest.raises(PolicyUnavailable):
        read_sample(sequence(broken), REF)


def status_error(status: int) -> tinker.APIStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://x"))
    return tinker.APIStatusError("no", response=response, body=None)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_not_tried_again(status: int) -> None:
    assert type(sampling_error(status_error(status))) is RunError


@pytest.mark.parametrize("status", [404, 408, 409, 410, 429, 500, 503])
def test_a_busy_service_or_a_lost_sampler_costs_an_episode_not_the_run(status: int) -> None:
    assert isinstance(sampling_error(status_error(status)), PolicyUnavailable)


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_key_or_a_bill_is_for_the_user(status: int) -> None:
    assert isinstance(sampling_error(status_error(status)), ConfigError)


def test_a_lost_connection_may_come_back() -> None:
    assert isinstance(
        sampling_error(tinker.APIConnectionError(request=httpx.Request("POST", "http://x"))), PolicyUnavailable
    )


def test_the_status_is_found_where_the_sdk_wraps_it() -> None:
    wrapped = ValueError("Error retrieving result")
    wrapped.__cause__ = status_error(422)
    assert is_refusal(wrapped)


def test_the_service_s_own_category_decides() -> None:
    user = tinker.RequestFailedError("bad", request_id="r", category=RequestErrorCategory.User)
    server = tinker.RequestFailedError("bad", request_id="r", category=RequestErrorCategory.Server)
    assert type(sampling_error(user)) is RunError
    assert isinstance(sampling_error(server), PolicyUnavailable)


def test_an_unreachable_hub_is_an_error_with_the_way_on() -> None:
    import threading

    never = threading.Event()
    with pytest.raises(DataError, match=r"acme/model.*env.tokenizer_name"):
        hub_tokenizer("acme/model", never.wait, patience=0.05)
    with pytest.raises(DataError, match="offline"):
        hub_tokenizer("acme/model", lambda: (_ for _ in ()).throw(OSError("offline")))
    assert hub_tokenizer("acme/model", lambda: "tokenizer") == "tokenizer"
