"""atroposlib's real clients, in their own process and unchanged, against the endpoints.

They need an interpreter with atroposlib 0.4.0, named by TINKER_ATROPOS_ATROPOSLIB_PYTHON unless this one has it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

PYTHON = os.environ.get("TINKER_ATROPOS_ATROPOSLIB_PYTHON") or (
    sys.executable if importlib.util.find_spec("atroposlib") else ""
)
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="atroposlib is not installed; TINKER_ATROPOS_ATROPOSLIB_PYTHON may name a Python that has it"
)

SCRIPT = Path(__file__).with_name("atroposlib_client.py")


@pytest.fixture
def run():
    async def start(case, served, kind=""):
        hidden = {"PYTHONPATH", "PYTHONHOME"}
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            str(SCRIPT),
            case,
            served.endpoint.url,
            served.endpoint.tokenizer,
            kind,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(240):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        return json.loads(out.decode().rpartition("RESULT ")[2])

    return start


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def is_exact(served, node):
    """Whether a node of ManagedServer holds sampled tokens and their log-probabilities alone, and is proven so."""
    tokens, masked = node["tokens"], np.array(node["masked_tokens"])
    proven = served.endpoint.prove(ids(tokens))
    trained = masked != -100
    assert np.array_equal(np.array(tokens)[trained], masked[trained])
    assert np.array_equal(proven.mask, trained)
    assert np.array_equal(ids_of(node["logprobs"])[trained], proven.logprobs[trained])
    return True


def ids_of(logprobs):
    return np.array(logprobs, dtype=np.float32)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_managed_server_holds_the_exact_tokens_and_logprobs(serve, run, kind):
    served = await serve("chatml", "fine, thanks<|im_end|>", "not so well today<|im_end|>")
    encode = served.policy.tokenizer().encode
    found = await run("managed", served, kind)
    assert found["chat"] == ["fine, thanks", "not so well today"]
    assert found["reasons"] == ["stop", "stop"]
    said = [encode(text + "<|im_end|>") for text in found["chat"]]
    assert [node["tokens"][-len(tokens) :] for node, tokens in zip(found["group"], said, strict=True)] == said
    assert all(is_exact(served, node) for node in [*found["group"], *found["completion_nodes"]])
    assert found["completion_reasons"] == ["length", "length"]
    assert found["healthy"] == [True]
    # Its own text of a turn lacks the end of turn, which the template writes once more: two in the script's prompt.
    # What was sampled after that prompt is exact all the same.
    (conversation,) = found["turns"]
    assert is_exact(served, conversation)
    assert len(served.endpoint.prove(ids(conversation["tokens"])).policies) == 3
    # One call of the policy for a group, and none for the health checks.
    assert [n for _, _, n in served.policy.asked] == [2, 1, 1, 1, 2]


async def test_vllm_prompt_logprobs(serve, run):
    served = await serve("chatml", "fine<|im_end|>")
    found = await run("vllm_logprobs", served)
    for one in found.values():
        tokens = one["prompt_tokens"]
        assert one["prompt_topk_token_ids"] == [[], *([token] for token in tokens[1:])]
        assert [round(value, 3) for (value,) in one["prompt_topk_logprobs"][1:]] == [
            round(-0.5 - 0.001 * place, 3) for place in range(1, len(tokens))
        ]


async def test_text_clients_are_completed_from_the_journal(serve, run):
    served = await serve("chatml", "fine, thanks<|im_end|>", "not so well today<|im_end|>")
    encode = served.policy.tokenizer().encode
    found = await run("openai", served)
    assert (len(found["chat"]), found["reasons"], len(found["completion"])) == (3, ["stop"] * 3, 2)
    for text, made in zip(found["chat"], found["single"], strict=True):
        proven = served.endpoint.prove(ids(made["tokens"]))
        # All that was sampled; the script's mask has the newline after the end of turn besides.
        assert np.array(made["tokens"])[proven.mask].tolist() == encode(text + "<|im_end|>")
        assert proven.finish_reasons == ("stop",)
    proven = served.endpoint.prove(ids(found["multi"]["tokens"]))
    assert len(proven.policies) == 3
    assert not proven.mask[np.array(found["multi"]["masks"]) == -100].any()


async def test_a_stripping_template_proves_what_it_leaves(serve, run):
    served = await serve("thinking", "<think>so</think>fine<|im_end|>", "<think>hm</think>bad<|im_end|>")
    found = await run("openai", served)
    assert all(len(served.endpoint.prove(ids(made["tokens"])).policies) == 1 for made in found["single"])
    # The thoughts of the first two turns are stripped, so these turns are no longer what was sampled; the third is.
    proven = served.endpoint.prove(ids(found["multi"]["tokens"]))
    assert len(proven.policies) == 1
    assert proven.mask[-2]


async def test_trl(serve, run):
    served = await serve("chatml", "fine, thanks<|im_end|>")
    assert (await run("trl", served))["chat"] == ["fine, thanks<|im_end|>"] * 2


async def test_tools_and_streams_of_the_openai_client(serve, run, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[0].content }}")
    said = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call><|im_end|>'
    served = await serve("chatml", said, chat_template=template)
    found = await run("tools", served)
    assert (found["name"], found["arguments"], found["reason"]) == ("weather", '{"city": "Köln"}', "tool_calls")
    assert found["streamed"] == said.removesuffix("<|im_end|>")


async def test_the_health_checks_of_every_client_sample_nothing(serve, run):
    served = await serve("chatml", "fine<|im_end|>")
    assert await run("health", served) == [True] * 3
    assert len(served.policy.asked) == 3
    assert served.endpoint.counts.health_checks >= 4
