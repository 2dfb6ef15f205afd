"""`/generate` in three dialects, `/logprobs`, `/tokenize`, `/detokenize` and the small ones."""

from __future__ import annotations

import numpy as np
import pytest
from tinker_atropos import Sample


async def test_sglang_gets_tokens_and_logprobs(serve):
    served = await serve("chatml", "hello<|im_end|>")
    tokens = served.policy.tokenizer().encode("hello<|im_end|>", add_special_tokens=False)
    params = {"max_new_tokens": 9, "temperature": 0.7, "stop": ["\n\n"]}
    asked = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True, "return_text_in_logprobs": False}
    status, body = await served.post("/generate", asked)
    meta = body["meta_info"]
    assert (status, body["text"], body["output_ids"]) == (200, "hello", tokens)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    assert [round(entry[0], 4) for entry in meta["output_token_logprobs"]] == [-0.01, -0.02, -0.03, -0.04]
    assert meta["finish_reason"] == {"type": "stop", "matched": 406}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (2, 4, "0")
    prompt, sampled, n = served.policy.asked[0]
    assert (prompt, sampled.max_tokens, sampled.temperature, sampled.stop, n) == (
        [5, 6],
        9,
        0.7,
        ["\n\n", "<|im_end|>"],
        1,
    )


async def test_sglang_gets_n_samples_as_a_list(serve):
    served = await serve("chatml", "one<|im_end|>", "two three<|im_end|>")
    asked = {"input_ids": [5], "sampling_params": {"n": 2, "max_completion_tokens": 5}, "return_logprob": True}
    _, body = await served.post("/generate", asked)
    assert [one["meta_info"]["finish_reason"]["type"] for one in body] == ["stop", "length"]
    assert len(served.policy.asked) == 1
    _, body = await served.post("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"temperature": 0}]})
    assert len(body) == 2
    assert [params.temperature for _, params, _ in served.policy.asked[1:]] == [1, 0]
    _, body = await served.post("/generate", {"text": ["a"]})
    assert isinstance(body, list)


async def test_sglang_gets_the_prompts_logprobs_from_where_it_asks(serve):
    served = await serve("chatml", "one<|im_end|>")
    asked = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    _, body = await served.post("/generate", {**asked, "sampling_params": {"max_new_tokens": 0}})
    assert [entry[0] is None for entry in body["meta_info"]["input_token_logprobs"]] == [True, False, False]
    assert [entry[1] for entry in body["meta_info"]["input_token_logprobs"]] == [5, 6, 7]
    assert served.policy.asked == []
    _, body = await served.post("/generate", {**asked, "logprob_start_len": 2})
    assert [entry[1] for entry in body["meta_info"]["input_token_logprobs"]] == [7]


async def test_vllm_gets_its_own_shape(serve):
    served = await serve("chatml", "one<|im_end|>", "two three<|im_end|>")
    asked = {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "n": 2, "max_tokens": 5, "stop": "\n"}
    status, body = await served.post("/generate", asked)
    assert (status, body["finish_reasons"], body["prompt_token_ids"]) == (200, ["stop", "length"], [5, 6])
    for sequence, tokens in zip(body["logprobs"], body["token_ids"], strict=True):
        assert [int(next(iter(entry))) for (entry,) in sequence] == tokens
    assert body["text"][0] == "one"
    assert "prompt_logprobs" not in body


async def test_vllm_gets_prompt_logprobs(serve):
    served = await serve("chatml", "one<|im_end|>")
    for prompt in ("abc", [64, 65, 66], {"prompt": "abc"}):
        _, body = await served.post("/generate", {"prompt": prompt, "prompt_logprobs": 1, "temperature": 0.0})
        first, *rest = body["prompt_logprobs"]
        assert first is None
        assert [int(token) for entry in rest for token in entry] == body["prompt_token_ids"][1:] == [65, 66]


async def test_trl_gets_ids(serve):
    served = await serve("chatml", "one<|im_end|>")
    body = {"prompts": ["a", "b"], "n": 2, "repetition_penalty": 1.0, "min_p": 0.0, "top_k": -1, "max_tokens": 8}
    status, found = await served.post("/generate/", body)
    assert (status, len(found["completion_ids"])) == (200, 4)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        "text",
        None,
        {"input_ids": None},
        {"input_ids": [5], "text": "a"},
        {"input_ids": [5], "sampling_params": {"min_p": 0.1}},
        {"input_ids": [5], "sampling_params": {"nonsense": 1}},
        {"input_ids": [5], "sampling_params": [{}, {}]},
        {"input_ids": [5], "sampling_params": 5},
        {"input_ids": [5], "stream": True},
        {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 4},
        {"input_ids": [5], "image_data": ["a"]},
        {"prompt": {"prompt_token_ids": []}},
        {"prompt": {"multi_modal_data": {"image": 1}, "prompt": "a"}},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "prompt_logprobs": 20},
        {"prompt": "a", "logprobs": -1},
        {"prompts": "a"},
    ],
)
async def test_what_cannot_be_generated_is_a_400(serve, body):
    served = await serve("chatml", "one<|im_end|>")
    status, found = await served.post("/generate", body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")


async def test_logprobs_of_text_ids_lists_and_messages(serve):
    served = await serve("chatml", "one<|im_end|>")
    _, body = await served.post("/logprobs", {"input_ids": [5, 6, 7]})
    assert (body["tokens"], body["logprobs"][0], len(body["logprobs"])) == ([5, 6, 7], None, 3)
    _, body = await served.post("/logprobs", {"prompt": ["ab", "c"]})
    assert [len(one) for one in body["logprobs"]] == [2, 1]
    _, body = await served.post("/v1/logprobs", {"messages": [{"role": "user", "content": "hey"}]})
    assert len(body["tokens"]) == len(body["logprobs"]) > 5
    assert (await served.post("/logprobs", {}))[0] == 400


async def test_tokens_and_back(serve):
    served = await serve("llama3", "one<|eot_id|>")
    encode = served.policy.tokenizer().encode
    _, body = await served.post("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert (body["tokens"], body["max_model_len"], len(body["token_strs"])) == (encode("abc"), 4096, body["count"])
    _, body = await served.post("/tokenize", {"text": "abc", "add_special_tokens": False})
    assert body["tokens"] == encode("abc", add_special_tokens=False)
    _, body = await served.post("/tokenize", {"messages": [{"role": "user", "content": "hey"}]})
    _, back = await served.post("/detokenize", {"tokens": body["tokens"]})
    assert back["prompt"].startswith("<|begin_of_text|><|start_header_id|>user")
    _, back = await served.post("/detokenize", {"tokens": body["tokens"], "skip_special_tokens": True})
    assert back["text"].startswith("user")
    assert (await served.post("/detokenize", {"tokens": [10**6]}))[0] == 400
    assert (await served.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []


async def test_wandb_info_and_the_models(serve):
    extra = {"wandb_group": "g", "wandb_project": "p"}
    served = await serve("chatml", "one<|im_end|>", settings={"extra": extra})
    assert await served.get("/wandb_info") == (200, {"group": "g", "project": "p"})
    assert (await served.get("/v1/models/policy"))[1]["id"] == "policy"
    assert (await served.get("/v1/models/other"))[0] == 404


async def test_unknown_paths_and_methods_are_answered_in_openais_form(serve):
    served = await serve("chatml", "one<|im_end|>")
    status, body = await served.post("/v1/chat/completion", {})
    assert (status, "/v1/chat/completions" in body["error"]["message"]) == (404, True)
    status, body = await served.get("/generate")
    assert (status, "POST" in body["error"]["message"]) == (405, True)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"a": NaN}', b'{"prompt": "\\ud800"}', b"[" * 5000])
async def test_what_is_no_json_is_a_400(serve, raw):
    served = await serve("chatml", "one<|im_end|>")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/logprobs", "/tokenize", "/detokenize"):
        async with served.client.post(served.root + path, data=raw) as response:
            assert (response.status, "error" in await response.json()) == (400, True)


async def test_a_body_that_is_too_large_or_compressed_is_refused(serve):
    served = await serve("chatml", "one<|im_end|>")
    async with served.client.post(served.root + "/generate", data=b" " * (33 * 2**20)) as response:
        assert response.status == 413
    headers = {"Content-Encoding": "gzip"}
    async with served.client.post(served.root + "/generate", data=b"x", headers=headers) as response:
        assert response.status == 415


async def test_what_was_sampled_is_proven_and_what_was_not_is_not(serve):
    served = await serve("chatml", "hello<|im_end|>")
    encode = served.policy.tokenizer().encode
    prompt, said = encode("a b c"), encode("hello<|im_end|>")
    await served.post("/generate", {"input_ids": prompt})
    proven = served.endpoint.prove(np.array(prompt + said + [5]))
    assert proven.mask.tolist() == [False] * len(prompt) + [True] * len(said) + [False]
    assert proven.finish_reasons == ("stop",)
    assert not served.endpoint.prove(np.array([5, *prompt, *said])).mask.any()


async def test_samples_of_plain_lists_are_taken_as_the_arrays_they_stand_for(serve):
    served = await serve("chatml", "hello<|im_end|>")
    policy = served.policy

    async def lists(prompt, params, n):
        tokens, logprobs = [5, 6], [-0.5, -0.25]
        return [Sample(tokens, logprobs, "length", policy.ref)] * n  # type: ignore[arg-type]

    policy.sample = lists
    status, body = await served.post("/generate", {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 2}})
    assert (status, body["output_ids"]) == (200, [5, 6])
    assert served.endpoint.prove(np.array([7, 8, 5, 6], dtype=np.int32)).logprobs.tolist() == [0, 0, -0.5, -0.25]
