"""`/v1/chat/completions` and `/v1/completions`: what is asked reaches the policy, what it did reaches the client."""

from __future__ import annotations

import asyncio
import json

import pytest
from tinker_atropos import PolicyUnavailable, RunError, UserError

HI = [{"role": "user", "content": "hey"}]
PROMPT = "<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n"


async def test_a_chat_is_rendered_sampled_and_answered(serve):
    served = await serve("chatml", "hello<|im_end|>")
    status, body = await served.post("/v1/chat/completions", {"model": "policy", "messages": HI, "max_tokens": 20})
    assert status == 200
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], choice["stop_reason"], body["policy_step"]) == ("stop", None, 0)
    prompt, params, n = served.policy.asked[0]
    assert prompt == served.policy.tokenizer().encode(PROMPT, add_special_tokens=False)
    assert (params.max_tokens, params.stop, n) == (20, None, 1)
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 4,
        "total_tokens": len(prompt) + 4,
    }


async def test_a_turn_that_ran_into_its_limit_says_so(serve):
    served = await serve("chatml", "hello there<|im_end|>")
    _, body = await served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2})
    assert body["choices"][0]["finish_reason"] == "length"
    _, body = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [{}, {"stop": None}, {"stop": []}, {"stop_token_ids": []}])
async def test_without_a_stop_the_end_of_turn_stays(serve, stop):
    served = await serve("chatml", "hello<|im_end|>")
    for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
        assert (await served.post(path, {**body, **stop}))[0] == 200
    assert [params.stop for _, params, _ in served.policy.asked] == [None, None]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"stop": ";"}, [";", "<|im_end|>"]),
        ({"stop": [";", "\n"]}, [";", "\n", "<|im_end|>"]),
        ({"stop": "<|endoftext|>"}, [404, 406]),
        ({"stop": 7}, [7, 406]),
        ({"stop": [7, 8]}, [7, 8, 406]),
        ({"stop_token_ids": [7]}, [7, 406]),
        ({"stop": 7, "ignore_eos": True}, [7]),
        ({"ignore_eos": True}, []),
    ],
)
async def test_stops_of_every_form_are_added_to_the_end_of_turn(serve, stop, expected):
    served = await serve("chatml", "hello<|im_end|>")
    assert served.policy.tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [404, 406]
    status, body = await served.post("/v1/completions", {"prompt": "a", **stop})
    assert (status, served.policy.asked[0][1].stop) == (200, expected), body


async def test_a_stop_string_is_cut_off_and_named(serve):
    served = await serve("chatml", "one; two; three")
    _, body = await served.post("/v1/completions", {"prompt": "a", "stop": [";"], "max_tokens": 40})
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("one", ";")
    _, body = await served.post(
        "/v1/completions", {"prompt": "a", "stop": [";"], "include_stop_str_in_output": True, "max_tokens": 40}
    )
    assert body["choices"][0]["text"].startswith("one;")


async def test_a_sampler_that_ran_past_the_end_of_turn_is_cut_there(serve):
    served = await serve("chatml", "hello<|im_end|>\n<|im_start|>user\nmore")
    _, body = await served.post("/v1/completions", {"prompt": "a", "stop": [";"], "max_tokens": 9})
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")


async def test_sampling_options_reach_the_policy_and_n_is_one_call(serve):
    served = await serve("chatml", "one<|im_end|>", "two<|im_end|>", "three<|im_end|>")
    options = {"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "max_completion_tokens": 11}
    _, body = await served.post("/v1/chat/completions", {"messages": HI, **options})
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two", "three"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    (asked,) = served.policy.asked
    params = asked[1]
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens, asked[2]) == (
        0.5,
        0.9,
        20,
        7,
        11,
        3,
    )


@pytest.mark.parametrize(
    "option",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {"5": 100}},
        {"best_of": 4},
        {"min_tokens": 3},
        {"use_beam_search": True},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {}},
        {"top_logprobs": 5, "logprobs": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ messages }}"},
        {"temprature": 0.7},
    ],
)
async def test_options_that_cannot_be_honoured_are_refused_by_name(serve, option):
    served = await serve("chatml", "hello<|im_end|>")
    status, body = await served.post("/v1/chat/completions", {"messages": HI, **option})
    assert status == 400
    assert body["error"]["param"] == next(iter(option))
    assert body["error"]["type"] == "invalid_request_error"
    assert served.policy.asked == []


async def test_neutral_and_harmless_options_are_accepted(serve):
    served = await serve("chatml", "hello<|im_end|>")
    neutral = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": None,
        "best_of": 2,
        "n": 2,
        "top_k": -1,
        "response_format": {"type": "text"},
        "user": "me",
        "parallel_tool_calls": True,
        "seed": None,
        "max_tokens": 16.0,
        "stream": False,
        "tool_choice": "auto",
        "logprobs": False,
    }
    status, body = await served.post("/v1/chat/completions", {"messages": HI, **neutral})
    assert status == 200, body
    assert served.policy.asked[0][1].max_tokens == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", 10**9),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "5"),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", [None]),
        ("stop", {"a": 1}),
        ("stop", 10**9),
        ("stop", ["a"] * 100),
        ("stop_token_ids", ["a"]),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [5]),
        ("messages", [{"content": "a"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ("tools", [{}]),
        ("tools", "a"),
        ("logprobs", 3),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"documents": []}),
        ("model", 5),
        ("stream", "yes"),
    ],
)
async def test_wrong_values_are_a_400_that_names_them(serve, field, value):
    served = await serve("chatml", "hello<|im_end|>")
    status, body = await served.post("/v1/chat/completions", {"messages": HI, field: value})
    assert status == 400, body
    assert field in (body["error"]["param"] or body["error"]["message"])


async def test_max_tokens_by_two_names_must_agree(serve):
    served = await serve("chatml", "hello<|im_end|>")
    both = {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}
    assert (await served.post("/v1/chat/completions", both))[0] == 400
    assert (await served.post("/v1/chat/completions", {**both, "max_tokens": 6}))[0] == 200


async def test_content_may_be_null_text_or_a_list_of_parts(serve):
    served = await serve("chatml", "hello<|im_end|>")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "ey"}]
    status, _ = await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    decoded = served.policy.tokenizer().decode(served.policy.asked[0][0])
    assert (status, "user\nh\ney<|im_end|>" in decoded) == (200, True)
    messages = [*HI, {"role": "assistant", "content": None}, {"role": "user"}]
    assert (await served.post("/v1/chat/completions", {"messages": messages}))[0] == 200


async def test_an_image_is_refused_clearly(serve):
    served = await serve("chatml", "hello<|im_end|>")
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    status, body = await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert (status, body["error"]["code"]) == (400, "unsupported_content")
    assert "image_url" in body["error"]["message"]


async def test_a_marker_in_a_message_forges_no_turn(serve):
    served = await serve("chatml", "hello<|im_end|>")
    await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a<|im_end|>b"}]})
    assert served.policy.asked[0][0].count(406) == 1


async def test_logprobs_of_a_chat_are_the_samplers(serve):
    served = await serve("chatml", "hello<|im_end|>")
    asked = {"messages": HI, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    _, body = await served.post("/v1/chat/completions", asked)
    choice = body["choices"][0]
    assert [round(entry["logprob"], 4) for entry in choice["logprobs"]["content"]] == [-0.01, -0.02, -0.03, -0.04]
    tokens = served.policy.tokenizer().encode("hello<|im_end|>", add_special_tokens=False)
    assert (choice["token_ids"], body["prompt_token_ids"]) == (tokens, served.policy.asked[0][0])


async def test_prompts_of_every_form_are_sampled_in_order(serve):
    served = await serve("chatml", "hello<|im_end|>")
    encode = served.policy.tokenizer().encode
    forms = {
        "text": ("abc", [encode("abc")]),
        "texts": (["abc", "de"], [encode("abc"), encode("de")]),
        "ids": ([5, 6, 7], [[5, 6, 7]]),
        "lists of ids": ([[5, 6], [7]], [[5, 6], [7]]),
    }
    for prompt, expected in forms.values():
        served.policy.asked.clear()
        status, body = await served.post("/v1/completions", {"prompt": prompt, "n": 2})
        assert status == 200
        assert [asked for asked, _, _ in served.policy.asked] == expected
        assert len(body["choices"]) == 2 * len(expected)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))


@pytest.mark.parametrize(
    "prompt", [None, [], "", [""], [[]], [5, "a"], [True], [-1], [10**9], {"a": 1}, [[5], "a"], 5, 1.5]
)
async def test_what_is_no_prompt_is_refused(serve, prompt):
    served = await serve("chatml", "hello<|im_end|>")
    status, body = await served.post("/v1/completions", {"prompt": prompt})
    assert (status, body["error"]["param"]) == (400, "prompt")


async def test_the_beginning_of_sequence_comes_once(serve):
    served = await serve("llama3", "hello<|eot_id|>")
    for prompt in ("abc", "<|begin_of_text|>abc"):
        await served.post("/v1/completions", {"prompt": prompt})
    first, second = (asked for asked, _, _ in served.policy.asked)
    assert first == second == served.policy.tokenizer().encode("abc")


async def test_echo_scores_the_prompt(serve):
    served = await serve("chatml", "hello<|im_end|>")
    asked = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    status, body = await served.post("/v1/completions", asked)
    logprobs = body["choices"][0]["logprobs"]
    assert (status, body["choices"][0]["text"], logprobs["tokens"]) == (200, "abc", ["a", "b", "c"])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2]
    assert (len(served.policy.scored), served.policy.asked) == (1, [])


async def test_a_full_context_is_a_400_in_openais_form(serve):
    served = await serve("chatml", "hello<|im_end|>", context_length=8)
    for path, asked in (
        ("/v1/completions", {"prompt": [5] * 8}),
        ("/v1/completions", {"prompt": [5] * 9, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a " * 100_000}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/generate", {"input_ids": [5] * 8}),
        ("/logprobs", {"input_ids": [5] * 9}),
    ):
        status, body = await served.post(path, asked)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), path
    assert served.policy.asked == []
    status, body = await served.post("/v1/completions", {"prompt": [5] * 6, "max_tokens": 100})
    assert (status, served.policy.asked[0][1].max_tokens, body["choices"][0]["finish_reason"]) == (200, 2, "length")


async def test_without_a_context_length_something_must_bound_the_answer(serve):
    served = await serve("chatml", "hello<|im_end|>", context_length=None)
    status, body = await served.post("/v1/chat/completions", {"messages": HI})
    assert (status, body["error"]["param"]) == (400, "max_tokens")
    assert (await served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 5}))[0] == 200


async def test_the_health_check_of_atropos_samples_nothing(serve):
    served = await serve("chatml", "hello<|im_end|>")
    for path, asked in (
        ("/v1/completions", {"model": "policy", "prompt": "hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ):
        status, body = await served.post(path, asked)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        async with served.client.post(served.root + path, json=asked) as response:
            assert response.headers["x-health-check"] == "1"
    assert (served.policy.asked, served.endpoint.counts.health_checks, served.endpoint.journal.turns) == ([], 4, 0)
    # Anything that asks for more is answered by the policy.
    more = {"prompt": "hi", "max_tokens": 1, "logprobs": 1}
    async with served.client.post(served.root + "/v1/completions", json=more) as response:
        assert "x-health-check" not in response.headers
    assert len(served.policy.asked) == 1


async def test_another_model_is_not_found(serve):
    served = await serve("chatml", "hello<|im_end|>", settings={"extra": {"aliases": ["other"]}})
    for name, expected in (("policy", 200), ("other", 200), (served.endpoint.tokenizer, 200), ("gpt-4o", 404)):
        status, body = await served.post("/v1/chat/completions", {"model": name, "messages": HI})
        assert status == expected
    assert body["error"]["code"] == "model_not_found"
    assert (await served.get("/v1/models"))[1]["data"][0]["id"] == "policy"


async def read_stream(served, path, body):
    async with served.client.post(served.root + path, json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_chat_streams_finished_choices_in_chunks(serve):
    served = await serve("chatml", "one<|im_end|>", "two<|im_end|>")
    options = {"messages": HI, "n": 2, "stream_options": {"include_usage": True}}
    found = await read_stream(served, "/v1/chat/completions", options)
    texts = {0: "", 1: ""}
    ends = {}
    for chunk in found[:-1]:
        assert chunk["object"] == "chat.completion.chunk"
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert (texts, ends) == ({0: "one", 1: "two"}, {0: "stop", 1: "stop"})
    assert (found[-1]["choices"], found[-1]["usage"]["completion_tokens"] > 0) == ([], True)


async def test_a_completion_streams_too(serve):
    served = await serve("chatml", "one<|im_end|>")
    (chunk,) = await read_stream(served, "/v1/completions", {"prompt": "a", "logprobs": 1})
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("one", "stop")


async def test_an_error_of_a_stream_has_its_own_status(serve):
    served = await serve("chatml", "one<|im_end|>", context_length=4)
    assert (await served.post("/v1/chat/completions", {"messages": HI, "stream": True}))[0] == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PolicyUnavailable("the service is busy"), 503),
        (RunError("the server of the run has ended"), 503),
        (UserError("the service refuses this"), 400),
        (RuntimeError("a defect"), 500),
    ],
)
async def test_what_the_policy_fails_at_has_a_status_of_its_own(serve, error, status):
    served = await serve("chatml", "one<|im_end|>")
    served.policy.error = error
    for asked in ({"prompt": "a"}, {"prompt": ["a", "b"]}):
        found, body = await served.post("/v1/completions", asked)
        assert found == status
        assert str(error) in body["error"]["message"]


async def test_a_broken_sample_is_a_503(serve):
    served = await serve("chatml", [10**6])
    assert (await served.post("/v1/completions", {"prompt": "a"}))[0] == 503


async def test_a_client_that_leaves_cancels_the_sampling(serve, until):
    served = await serve("chatml", "one<|im_end|>")
    served.policy.gate.clear()
    bodies = [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": HI, "stream": True}),
        ("/generate", {"input_ids": [5]}),
    ]
    tasks = [asyncio.create_task(served.post(path, body)) for path, body in bodies]
    await until(lambda: len(served.policy.asked) == 4)
    for task in tasks:
        task.cancel()
    await until(lambda: served.policy.cancelled == 4 and not served.source.held)
    assert served.endpoint.counts.gone == 3
    served.policy.gate.set()
    assert (await served.post("/v1/completions", {"prompt": "a"}))[0] == 200


async def test_the_answer_says_which_policy_it_is_from(serve, until):
    served = await serve("chatml", "old<|im_end|>")
    served.policy.gate.clear()
    waiting = asyncio.create_task(served.post("/v1/completions", {"prompt": ["a", "b"]}))
    old = served.policy
    await until(lambda: len(old.asked) == 2)
    served.exchange(["new<|im_end|>"], 1)
    async with served.client.post(served.endpoint.url + "/completions", json={"prompt": "a"}) as response:
        assert (response.headers["x-policy-step"], (await response.json())["policy_step"]) == ("1", 1)
    old.gate.set()
    _, body = await waiting
    assert (body["policy_step"], {choice["text"] for choice in body["choices"]}) == (0, {"old"})


async def test_a_long_prompt_is_tokenised_as_a_short_one(serve):
    served = await serve("chatml", "one<|im_end|>", context_length=10**6)
    text = "The quick brown fox. " * 3000
    assert (await served.post("/v1/completions", {"prompt": text}))[0] == 200
    assert served.policy.asked[0][0] == served.policy.tokenizer().encode(text)
    assert (await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}))[0] == 200


async def test_thinking_is_switched_by_the_request(serve):
    served = await serve("thinking", "one<|im_end|>")
    for asked in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": {"enabled": False}}, {}):
        assert (await served.post("/v1/chat/completions", {"messages": HI, **asked}))[0] == 200
    texts = [served.policy.tokenizer().decode(asked) for asked, _, _ in served.policy.asked]
    assert ["<think>" in text for text in texts] == [True, True, False]


async def test_a_turn_may_be_continued(serve):
    served = await serve("chatml", "one<|im_end|>")
    messages = [*HI, {"role": "assistant", "content": "I say"}]
    await served.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert served.policy.tokenizer().decode(served.policy.asked[0][0]).endswith("assistant\nI say")


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/v1/completions", {"prompt": [[5]] * 16, "n": 1024, "max_tokens": 1}),
        ("/generate", {"prompts": [[5]] * 16, "n": 1024, "max_tokens": 1}),
        ("/generate", {"input_ids": [[5]] * 16, "sampling_params": [{"n": 1024, "max_new_tokens": 1}] * 16}),
    ],
)
async def test_one_request_asks_for_no_more_samples_than_it_may(serve, path, most):
    served = await serve("chatml", [6])
    assert (await served.post(path, most))[0] == 200
    name = next(name for name in ("prompt", "prompts", "input_ids") if name in most)
    body = {**most, name: [*most[name], [5]]}
    if "sampling_params" in most:
        body["sampling_params"] = [*most["sampling_params"], {"n": 1}]
    before = len(served.policy.asked)
    status, answer = await served.post(path, body)
    assert (status, answer["error"]["param"], len(served.policy.asked)) == (400, "n", before)
    assert "send 16384 at most" in answer["error"]["message"]


async def test_the_bodies_of_waiting_requests_are_bounded(serve, until, monkeypatch):
    monkeypatch.setattr("tinker_atropos_managed_server.server.MAX_HELD_BYTES", 1000)
    monkeypatch.setattr("tinker_atropos_managed_server.server.MAX_BODY_BYTES", 900)
    served = await serve("chatml", [6])
    large = {"prompt": [5] * 200, "max_tokens": 1}
    for _ in range(2):
        served.policy.gate.clear()
        waiting = asyncio.create_task(served.post("/v1/completions", large))
        await until(lambda: bool(served.source.held))
        status, answer = await served.post("/v1/completions", large)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")

        async def chunks():
            yield b"{}"

        async with served.client.post(served.root + "/v1/completions", data=chunks()) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await served.get("/health"))[0] == 200
        served.policy.gate.set()
        assert (await waiting)[0] == 200  # and what it held is free again
    assert (await served.post("/v1/completions", large))[0] == 200
