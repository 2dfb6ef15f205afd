"""Where the endpoints listen, who may ask, when they are ready, and how they end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import tempfile

import aiohttp
import pytest
from tinker_atropos import ConfigError, RunError
from tinker_atropos.external import EndpointSettings
from tinker_atropos_managed_server import ManagedServerConfig, adapter_spec, serve_policy


def settings(**given):
    return EndpointSettings(model="policy", **given)


async def test_before_the_first_policy_everything_is_a_503(tokenizers, fake_source, fake_policy):
    source = fake_source(None)
    async with serve_policy(ManagedServerConfig(), source, settings()) as endpoint, aiohttp.ClientSession() as client:
        root = endpoint.url.removesuffix("/v1")
        with pytest.raises(RunError, match="first policy"):
            _ = endpoint.tokenizer
        assert endpoint.context_length is None
        for path, body in (
            ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hey"}]}),
            ("/generate", {"input_ids": [5]}),
            ("/tokenize", {"prompt": "a"}),
        ):
            async with client.post(root + path, json=body) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
        for path, status in (("/health", 503), ("/health_generate", 503), ("/v1/models", 200), ("/wandb_info", 200)):
            async with client.get(root + path) as response:
                assert response.status == status
        source.publish(fake_policy(tokenizers("chatml"), ["one<|im_end|>"], context_length=77))
        await endpoint.ready()
        assert endpoint.context_length == 77
        for path in ("/health", "/health_generate"):
            async with client.get(root + path) as response:
                assert (response.status, response.headers["x-policy-step"]) == (200, "0")
        async with client.post(root + "/v1/completions", json={"prompt": "hi", "max_tokens": 1}) as response:
            assert response.status == 200


async def test_a_token_is_asked_for_where_there_is_one(serve):
    served = await serve("chatml", "one<|im_end|>", settings={"token": "sécret"})
    assert served.endpoint.token == "sécret"
    for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic x"}, {"Authorization": "Bearer "}):
        status, body = await served.post("/v1/completions", {"prompt": "a"}, **header)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await served.get("/v1/models", **header))[0] == 401
    assert (await served.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer sécret"))[0] == 200
    assert (await served.get("/health"))[0] == 200


async def test_pages_and_other_names_may_not_ask(serve):
    served = await serve("chatml", "one<|im_end|>")
    assert (await served.post("/v1/completions", {"prompt": "a"}, Origin="http://evil.example"))[0] == 403
    assert (await served.post("/v1/completions", {"prompt": "a"}, Origin="null"))[0] == 403
    assert (await served.post("/v1/completions", {"prompt": "a"}, Host="evil.example"))[0] == 403
    assert (await served.post("/v1/completions", {"prompt": "a"}, Origin="http://localhost:3000"))[0] == 200
    async with served.client.options(served.root + "/v1/completions") as response:
        assert "Access-Control-Allow-Origin" not in response.headers
    assert served.policy.asked[1:] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "0.0.0.0"}, "token"),
        ({"host": "0.0.0.0", "token": "t"}, "tls_certificate"),
        ({"host": "example.com"}, "IP address"),
        ({"port": 70000}, "out of range"),
        ({"token": "  "}, "blank"),
        ({"extra": {"alias": []}}, "aliases"),
        ({"extra": {"aliases": "x"}}, "list"),
        ({"host": "0.0.0.0", "token": "t", "extra": {"tls_certificate": "/nowhere"}}, "can't be loaded"),
    ],
)
async def test_an_address_that_cannot_be_is_refused(fake_source, given, said):
    with pytest.raises(ConfigError, match=said):
        async with serve_policy(ManagedServerConfig(), fake_source(None), settings(**given)):
            raise AssertionError


async def test_a_fixed_port_is_taken_or_said_to_be_busy_and_free_again_at_the_end(fake_source):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 can't be had.*0 for a free one"):
            async with serve_policy(ManagedServerConfig(), fake_source(None), settings(port=port)):
                raise AssertionError
    for _ in range(2):
        async with serve_policy(ManagedServerConfig(), fake_source(None), settings(port=port)) as endpoint:
            assert endpoint.url == f"http://127.0.0.1:{port}/v1"


async def test_the_end_cancels_what_is_still_sampled(tokenizers, fake_source, fake_policy, until):
    policy = fake_policy(tokenizers("chatml"), ["one<|im_end|>"])
    policy.gate.clear()
    source = fake_source(policy)
    async with aiohttp.ClientSession() as client:
        async with serve_policy(ManagedServerConfig(), source, settings()) as endpoint:
            asked = asyncio.create_task(client.post(endpoint.url + "/completions", json={"prompt": "a"}))
            await until(lambda: len(policy.asked) == 1)
        assert (policy.cancelled, source.held) == (1, 0)
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_an_error_in_the_block_comes_out_and_the_port_is_free(fake_source):
    ports = []

    async def fail():
        async with serve_policy(ManagedServerConfig(), fake_source(None), settings()) as endpoint:
            ports.append(int(endpoint.url.split(":")[2].split("/")[0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", ports[0]))


async def test_a_first_policy_that_cannot_be_opened_is_said(fake_source, fake_policy):
    class Broken(fake_policy):  # type: ignore[valid-type, misc]
        def tokenizer(self):
            raise RunError("no tokenizer here")

    with pytest.raises(RunError, match="no tokenizer here"):
        async with serve_policy(ManagedServerConfig(), fake_source(Broken(None, [])), settings()):
            raise AssertionError


@pytest.fixture
def certified(tmp_path):
    """A key and a certificate for 127.0.0.1."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no openssl command to make a certificate with")
    return key, certificate


async def test_tls_with_a_certificate(certified, tokenizers, fake_source, fake_policy):
    key, certificate = certified
    extra = {"tls_certificate": str(certificate), "tls_key": str(key)}
    source = fake_source(fake_policy(tokenizers("chatml"), ["one<|im_end|>"]))
    given = settings(host="0.0.0.0", token="t", extra=extra)
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with serve_policy(ManagedServerConfig(), source, given) as endpoint, aiohttp.ClientSession() as client:
        assert endpoint.url.startswith("https://127.0.0.1:")
        headers = {"Authorization": "Bearer t"}
        asked = client.post(endpoint.url + "/completions", json={"prompt": "a"}, headers=headers, ssl=trusting)
        async with asked as response:
            assert response.status == 200


async def test_clients_load_the_tokenizer_and_render_as_the_server_does(serve, tmp_path):
    from transformers import AutoTokenizer

    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{{ mark }}{{ deep.a }}<|im_end|>{% endfor %}"
        "{% if enable_thinking %}T{% else %}N{% endif %}<|im_start|>"
    )
    variables = {"mark": "'!\"", "deep": {"a": None}}
    config = {"chat_template": template, "enable_thinking": False, "chat_template_kwargs": variables}
    for name, given in (("thinking", {"enable_thinking": False}), ("chatml", config), ("llama3", {})):
        served = await serve(name, [5], **given)
        theirs = AutoTokenizer.from_pretrained(served.endpoint.tokenizer)
        messages = [{"role": "user", "content": "Höhe und <x> 你好"}]
        await served.post("/v1/chat/completions", {"messages": messages})
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert theirs.encode(rendered, add_special_tokens=False) == served.policy.asked[0][0]


def test_the_adapter_offers_the_endpoint():
    assert adapter_spec().endpoint is serve_policy


async def test_a_start_that_fails_leaves_neither_port_nor_folder(fake_source, fake_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(2):  # the second would find the port taken
        with pytest.raises(RunError, match="can't be made for the sampled turns"):
            async with serve_policy(
                ManagedServerConfig(), fake_source(None), settings(port=port, records=blocked / "turns")
            ):
                pass
        assert list((tmp_path / "temporary").iterdir()) == []
    async with serve_policy(ManagedServerConfig(), fake_source(None), settings(port=port)):
        assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert list((tmp_path / "temporary").iterdir()) == []
