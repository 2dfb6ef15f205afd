"""Whatever is sent to whatever path: an answer, in time, and never a 5xx."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_atropos.external import EndpointSettings
from tinker_atropos_managed_server import ManagedServerConfig, serve_policy

SECONDS = 30

POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/generate/",
    "/logprobs",
    "/v1/logprobs",
    "/tokenize",
    "/detokenize",
]
GETS = ["/", "/v1/models", "/v1/models/policy", "/health", "/health_generate", "/wandb_info"]

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(0, 400), max_size=6)
texts = st.text(max_size=12) | st.sampled_from(
    ["hi", "<|im_end|>", "<|im_start|>user\n", "a" * 30_000, "\x00", "{{ 1 }}"]
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "x"]), "text": texts}), max_size=3
)
call = st.fixed_dictionaries(
    {"id": texts, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": texts}, optional={"arguments": texts | junk})},
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "?"])},
    optional={
        "content": texts | parts | st.none() | junk,
        "tool_calls": st.lists(call, max_size=2) | junk,
        "tool_call_id": texts,
        "name": texts,
    },
)
tool = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts})})
sampling = {
    "n": st.integers(-1, 3),
    "max_tokens": st.integers(-1, 8),
    "max_new_tokens": st.integers(0, 8),
    "max_completion_tokens": st.integers(1, 8),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 50),
    "seed": st.integers(),
    "stop": texts | st.lists(texts | st.integers(-5, 500), max_size=3) | st.integers(-5, 500),
    "stop_token_ids": ids,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "no_stop_trim": st.booleans(),
    "min_p": st.sampled_from([0, 0.1]),
}
prompt = texts | ids | st.lists(texts, max_size=3) | st.lists(ids, max_size=3)
fields = {
    **sampling,
    "model": st.sampled_from(["policy", "other", None]),
    "messages": st.lists(message, max_size=3),
    "tools": st.lists(tool, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "prompt": prompt | st.fixed_dictionaries({}, optional={"prompt_token_ids": ids, "prompt": texts}),
    "prompts": st.lists(texts, max_size=2),
    "input_ids": ids | st.lists(ids, max_size=2),
    "text": texts | st.lists(texts, max_size=2),
    "tokens": ids,
    "sampling_params": st.fixed_dictionaries({}, optional=sampling) | junk,
    "return_logprob": st.booleans(),
    "return_text_in_logprobs": st.booleans(),
    "logprob_start_len": st.integers(-2, 9),
    "logprobs": st.booleans() | st.integers(-1, 2),
    "top_logprobs": st.integers(-1, 2),
    "prompt_logprobs": st.integers(-1, 2),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "return_token_strs": st.booleans(),
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(texts, junk, max_size=2),
    "reasoning": junk,
    "best_of": st.integers(0, 3),
}
# Which fields a path knows, so that most examples get past the reading of them.
PROMPTS = ["prompt", "prompts", "input_ids", "text", "tokens", "messages"]
CHAT = "messages tools tool_choice logprobs top_logprobs stream stream_options return_token_ids"
TEMPLATE = "continue_final_message chat_template_kwargs reasoning add_generation_prompt"
SGLANG = "input_ids text sampling_params return_logprob logprob_start_len return_text_in_logprobs"
KNOWN = {
    "/v1/chat/completions": f"{CHAT} {TEMPLATE}".split(),
    "/v1/completions": ["prompt", "logprobs", "echo", "stream", "return_token_ids", "return_tokens_as_token_ids"],
    "/generate": f"{SGLANG} prompt prompt_logprobs logprobs".split(),
    "/generate/": ["prompts"],
    "/logprobs": PROMPTS,
    "/v1/logprobs": PROMPTS,
    "/tokenize": ["prompt", "text", "messages", "return_token_strs", "add_special_tokens", "tools"],
    "/detokenize": ["tokens", "skip_special_tokens"],
}


def bodies(path):
    known = {name: fields[name] for name in KNOWN[path]}
    takes_sampling = path in ("/v1/chat/completions", "/v1/completions", "/generate", "/generate/")
    options = {**known, **(sampling if takes_sampling else {})}
    return (
        st.fixed_dictionaries({}, optional=options)
        | st.fixed_dictionaries(known)
        | st.fixed_dictionaries({}, optional={name: value | junk for name, value in options.items()})
        | st.fixed_dictionaries({}, optional=fields)
        | junk
    )


@pytest.fixture(scope="module")
def address(tokenizers, fake_policy, fake_source):
    """A server in a thread of its own; its log must show no defect at the end."""
    started, ended = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def run():
        policy = fake_policy(tokenizers("tools"), ["one; two<|im_end|>", [300, 301], [], "<tool_call>{<|im_end|>"])
        source = fake_source(policy)
        config = ManagedServerConfig(tool_parser="hermes", journal_tokens=5000)
        async with serve_policy(config, source, EndpointSettings(model="policy")) as endpoint:
            found["port"] = int(endpoint.url.split(":")[2].split("/")[0])
            found["endpoint"], found["source"] = endpoint, source
            started.set()
            await asyncio.to_thread(ended.wait)
        assert source.held == 0

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(SECONDS)
    yield found
    ended.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert found["endpoint"].counts.failed == 0


def ask(address, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", address["port"], timeout=SECONDS)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read()
    finally:
        connection.close()


def check(status, kind, raw):
    assert status < 500, raw
    if kind.startswith("text/event-stream"):
        assert raw.endswith(b"data: [DONE]\n\n")
        return
    body = json.loads(raw)
    if status >= 400:
        assert body["error"]["message"]
        assert body["error"]["type"]


generous = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", POSTS)
def test_any_json(address, path):
    seen = set()

    @generous
    @given(bodies(path))
    def sends(body):
        status, kind, raw = ask(address, "POST", path, json.dumps(body))
        check(status, kind, raw)
        seen.add(status)

    sends()
    assert 400 in seen


@pytest.mark.parametrize("path", POSTS)
def test_any_bytes(address, path):
    @settings(generous, max_examples=30)
    @given(st.binary(max_size=64), st.sampled_from([{}, {"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}]))
    def sends(raw, headers):
        check(*ask(address, "POST", path, raw, headers))

    sends()


@pytest.mark.parametrize("path", GETS)
def test_any_method(address, path):
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, kind, raw = ask(address, method, path, b"{}" if method != "GET" else None)
        check(status, kind, raw)
        assert (status == 200) is (method == "GET")


def test_any_path(address):
    @settings(generous, max_examples=60)
    @given(st.text(alphabet="/abcv1.%~-_?=&é", max_size=20), st.sampled_from(["GET", "POST"]))
    def sends(path, method):
        from urllib.parse import quote

        status, kind, raw = ask(address, method, "/" + quote(path, safe="/?=&"), b"{}" if method == "POST" else None)
        check(status, kind, raw)

    sends()
