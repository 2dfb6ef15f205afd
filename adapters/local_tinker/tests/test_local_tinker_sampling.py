"""Sampling through the real SDK: stops, seeds, scores, snapshots, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_atropos_local_tinker.tiny_model import END

PROMPT = [10, 20, 30, 40]


def sample(client: Any, prompt: list[int] = PROMPT, n: int = 1, **params: Any) -> Any:
    from tinker import types

    extra = {k: params.pop(k) for k in list(params) if k not in types.SamplingParams.model_fields}
    settings = types.SamplingParams(**{"max_tokens": 16, "seed": 5, **params})
    return client.sample(types.ModelInput.from_ints(prompt), n, settings, **extra)


def tokens(client: Any, **params: Any) -> list[list[int]]:
    return [list(s.tokens) for s in sample(client, **params).result().sequences]


def reference_logprobs(model: Path, sequence: list[int]) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([sequence])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy()


@pytest.fixture
def sampler(client: Any, tiny_model: Path) -> Any:
    return client.create_sampling_client(base_model=str(tiny_model)).result()


@pytest.fixture
def tokenizer(sampler: Any) -> Any:
    return sampler.get_tokenizer()


def test_logprobs_are_raw_whatever_the_temperature(sampler: Any, tiny_model: Path) -> None:
    every: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 0.0},
    )
    for settings in every:
        got = sample(sampler, stop=[], **settings).result().sequences[0]
        want = reference_logprobs(tiny_model, PROMPT + list(got.tokens))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


def test_greedy_takes_the_likeliest_and_top_k_1_does_too(sampler: Any) -> None:
    assert tokens(sampler, temperature=0.0, seed=1) == tokens(sampler, top_k=1, seed=2)
    assert tokens(sampler, temperature=0.0, seed=1) == tokens(sampler, top_p=1e-6, seed=2)


def test_one_seed_gives_one_result_and_its_samples_differ(sampler: Any) -> None:
    first = tokens(sampler, n=4, stop=[])
    assert first == tokens(sampler, n=4, stop=[])
    assert len({tuple(t) for t in first}) == 4
    assert first != tokens(sampler, n=4, stop=[], seed=6)
    assert tokens(sampler, n=4, stop=[], seed=None) != tokens(sampler, n=4, stop=[], seed=None)


def test_draws_follow_the_models_distribution(sampler: Any, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor([PROMPT])).logits[0, -1]
    found = [t[0] for t in tokens(sampler, n=1000, max_tokens=1, stop=[])]
    counts = torch.bincount(torch.tensor(found), minlength=len(logits)) / len(found)
    assert float((counts - logits.softmax(-1)).abs().sum() / 2) < 0.2  # total variation, 262 tokens, 1000 draws


def test_every_sample_has_its_own_id_and_stop_reason(sampler: Any) -> None:
    found = sample(sampler, n=3, stop=[]).result().sequences
    assert len({s.sequence_id for s in found}) == 3
    assert [s.stop_reason for s in found] == ["length"] * 3
    assert all(len(s.tokens) == len(s.logprobs) == 16 for s in found)


def test_without_a_stop_the_models_own_end_of_turn_ends_a_sequence(client: Any, ending: Any) -> None:
    got = sample(ending, max_tokens=8).result().sequences[0]
    assert (list(got.tokens), got.stop_reason) == ([256], "stop")


@pytest.mark.parametrize("stop", [[], "never", ["never"], [3]])
def test_a_stop_of_ones_own_replaces_the_models_end_of_turn(ending: Any, stop: Any) -> None:
    got = sample(ending, max_tokens=8, stop=stop).result().sequences[0]
    assert (list(got.tokens), got.stop_reason) == ([256] * 8, "length")


@pytest.mark.parametrize("stop", [[256], END, [END], ["x", END]])
def test_an_end_of_turn_stops_as_id_and_as_string(ending: Any, stop: Any) -> None:
    got = sample(ending, max_tokens=8, stop=stop).result().sequences[0]
    assert (list(got.tokens), got.stop_reason) == ([256], "stop")


@pytest.fixture
def ending(client: Any, tiny_model: Path) -> Any:
    """A sampler that was trained to say nothing but the end of turn."""
    return trained_to_say(client, tiny_model, [256] * 8)


def trained_to_say(client: Any, model: Path, said: list[int], steps: int = 25) -> Any:
    from tinker import types

    training = client.create_lora_training_client(base_model=str(model), rank=8, seed=0).result()
    whole = PROMPT + said
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(said)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": whole[1:], "weights": weights},
    )
    for _ in range(steps):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training.save_weights_and_get_sampling_client().result()


def test_a_stop_string_may_end_in_mid_token_and_cross_tokens(client: Any, tiny_model: Path, tokenizer: Any) -> None:
    said = tokenizer.encode("xyab\n\n!cdz")
    assert len(said) < len("xyab\n\n!cdz")  # some tokens hold several characters
    speaking = trained_to_say(client, tiny_model, said, steps=60)
    whole = sample(speaking, max_tokens=len(said), temperature=0.0, stop=[]).result().sequences[0]
    assert list(whole.tokens) == said
    for stop, text in (("a", "xyab\n"), ("b\n", "xyab\n"), ("\n", "xyab\n"), ("\n\n", None), ("!c", "xyab\n\n!cd")):
        got = sample(speaking, max_tokens=len(said), temperature=0.0, stop=stop).result().sequences[0]
        assert got.stop_reason == "stop"
        assert list(got.tokens) == said[: len(got.tokens)]
        assert stop in tokenizer.decode(list(got.tokens))
        assert stop not in tokenizer.decode(list(got.tokens)[:-1])
        assert text is None or tokenizer.decode(list(got.tokens)).startswith(text)


def test_a_stop_string_in_the_prompt_stops_nothing(client: Any, tiny_model: Path, tokenizer: Any) -> None:
    prompt = tokenizer.encode("x!")
    got = sample(client.create_sampling_client(base_model=str(tiny_model)).result(), prompt, stop="!", top_k=1).result()
    assert "!" not in tokenizer.decode(list(got.sequences[0].tokens)[:-1])
    assert len(got.sequences[0].tokens) > 1


def test_compute_logprobs_has_one_entry_a_token(sampler: Any, tiny_model: Path) -> None:
    from tinker import types

    for length in (1, 2, 7, 200, 256):
        prompt = [(7 * i) % 256 for i in range(length)]
        got = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
        assert len(got) == length
        assert got[0] is None
        if length > 1:
            np.testing.assert_allclose(got[1:], reference_logprobs(tiny_model, prompt), atol=1e-4)


def test_scores_of_the_last_tokens_and_the_likeliest_ones(sampler: Any) -> None:
    got = sample(
        sampler, include_prompt_logprobs=True, prompt_logprobs_last_n=2, topk_prompt_logprobs=3, topk_sample_logprobs=2
    ).result()
    assert [x is None for x in got.prompt_logprobs] == [True, True, False, False]
    assert [bool(row) for row in got.topk_prompt_logprobs] == [False, False, True, True]
    rows = got.sequences[0].topk_logprobs
    assert [len(row) for row in rows] == [2] * len(got.sequences[0].tokens)
    assert all(row[0][1] >= row[1][1] for row in rows)


def test_different_lengths_run_together_as_each_alone(sampler: Any, tiny_model: Path) -> None:
    prompts = [[(i * 11 + j) % 256 for j in range(3 + 9 * i)] for i in range(8)]
    running = [sample(sampler, p, stop=[], seed=i, include_prompt_logprobs=i % 2 == 0) for i, p in enumerate(prompts)]
    for prompt, future in zip(prompts, running, strict=True):
        got = future.result()
        want = reference_logprobs(tiny_model, prompt + list(got.sequences[0].tokens))
        np.testing.assert_allclose(got.sequences[0].logprobs, want[len(prompt) - 1 :], atol=1e-4)
        if got.prompt_logprobs is not None:
            np.testing.assert_allclose(got.prompt_logprobs[1:], want[: len(prompt) - 1], atol=1e-4)


def test_a_sampler_does_not_change_when_training_goes_on(training: Any, client: Any, sft_datum: Any) -> None:
    from tinker import types

    named = training.save_weights_for_sampler("fixed").result().path
    samplers = [
        training.save_weights_and_get_sampling_client().result(),
        client.create_sampling_client(model_path=named).result(),
    ]
    before = [tokens(s, n=3, stop=[]) for s in samplers]
    assert before[0] == before[1]
    training.forward_backward([sft_datum([1, 2, 3, 4])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    samplers.append(client.create_sampling_client(model_path=named).result())
    assert [tokens(s, n=3, stop=[]) for s in samplers] == [before[0]] * 3
    newer = training.save_weights_and_get_sampling_client().result()
    assert tokens(newer, n=3, stop=[]) != before[0]


def test_an_inflight_sampler_follows_what_is_published(training: Any, sft_datum: Any) -> None:
    from tinker import types

    following = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = tokens(following, stop=[])
    training.forward_backward([sft_datum([1, 2, 3, 4])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert tokens(following, stop=[]) == before
    newer = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert tokens(following, stop=[]) == tokens(newer, stop=[]) != before


def test_a_handle_opens_the_same_sampler_again(training: Any) -> None:
    from tinker import SamplingClient
    from tinker_atropos_local_tinker import LOCAL_API_KEY

    first = training.save_weights_and_get_sampling_client().result()
    second = SamplingClient.from_sampler_handle(first.get_sampler_handle(), api_key=LOCAL_API_KEY)
    assert tokens(first, n=2) == tokens(second, n=2)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 250, {"max_tokens": 100}, "exceed the model's context of 256"),
        ([1] * 256, {"max_tokens": None}, "no room to sample"),
        ([1, 999], {}, "token 999"),
        ([1], {"temperature": -1.0}, "temperature=-1"),
        ([1], {"top_p": 0.0}, "top_p=0"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"stop": [""]}, "stop has a string of 0"),
        ([1], {"stop": [9999]}, "token id 9999"),
        ([1], {"n": 0}, "num_samples=0"),
    ],
)
def test_bad_requests_are_user_errors(sampler: Any, prompt: list[int], settings: Any, message: str) -> None:
    from tinker import RequestFailedError

    with pytest.raises(RequestFailedError, match=message) as caught:
        sample(sampler, prompt, **settings).result()
    assert caught.value.category == "user"


def test_unknown_paths_are_not_found(client: Any) -> None:
    from tinker import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path="tinker://nobody/sampler_weights/none").result()
    with pytest.raises(BadRequestError, match="no checkpoint path"):
        client.create_sampling_client(model_path="tinker://x/../y").result()


def test_an_abandoned_request_is_cancelled_and_others_go_on(sampler: Any) -> None:
    long = [sample(sampler, n=64, max_tokens=240, stop=[]) for _ in range(4)]
    for future in long:
        future.future().cancel()
    assert len(tokens(sampler, max_tokens=4, stop=[])[0]) == 4


def test_more_samples_than_rows_are_all_there(sampler: Any) -> None:
    found = tokens(sampler, n=150, max_tokens=3, stop=[])
    assert len(found) == 150
    assert len({tuple(t) for t in found}) > 100


def test_the_tokenizer_comes_from_the_folder(training: Any, sampler: Any, tiny_model: Path) -> None:
    assert training.get_tokenizer().decode([256]) == END
    assert sampler.get_tokenizer().encode("hello") == training.get_tokenizer().encode("hello")
