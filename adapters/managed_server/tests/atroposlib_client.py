"""Runs atroposlib's own clients against an endpoint, in an interpreter that has atroposlib; prints JSON.

Called by `test_managed_atroposlib.py` as `python atroposlib_client.py CASE URL TOKENIZER`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from transformers import AutoTokenizer

HI = [{"role": "user", "content": "hey, how are you?"}]


def manager(kind: str, url: str, tokenizer: str, **options: Any) -> ServerManager:
    config = APIServerConfig(
        model_name="policy",
        tokenizer_name=tokenizer,
        base_url=url,
        api_key="x",
        server_type=kind,
        timeout=30,
        **options,
    )
    return ServerManager([config])


def nodes(managed: Any) -> list[dict[str, Any]]:
    return [node.model_dump() for node in managed.get_state()["nodes"]]


async def managed(kind: str, url: str, tokenizer: str) -> Any:
    """A group, a second turn after its first sample, and a completion: what scripts do with ManagedServer."""
    server = manager(kind, url, tokenizer)
    found: dict[str, Any] = {}
    async with server.managed_server() as session:
        chat = await session.chat_completion(messages=HI, n=2, max_tokens=64, temperature=1.0, top_p=1.0)
        found["chat"] = [choice.message.content for choice in chat.choices]
        found["reasons"] = [choice.finish_reason for choice in chat.choices]
        found["group"] = nodes(session)
    async with server.managed_server() as session:
        messages = list(HI)
        for _ in range(3):
            chat = await session.chat_completion(messages=messages, n=1, max_tokens=64)
            messages += [{"role": "assistant", "content": chat.choices[0].message.content}, *HI]
        found["turns"] = nodes(session)
    async with server.managed_server() as session:
        done = await session.completion(prompt="The quick brown", n=2, max_tokens=4, stop=["\n\n"])
        found["completion"] = [choice.text for choice in done.choices]
        found["completion_reasons"] = [choice.finish_reason for choice in done.choices]
        found["completion_nodes"] = nodes(session)
    found["healthy"] = [one.server_healthy for one in server.servers]
    return found


async def vllm_logprobs(kind: str, url: str, tokenizer: str) -> Any:
    server = manager("vllm", url, tokenizer)
    async with server.managed_server() as session:
        by_text = await session.get_logprobs(prompt="The quick brown")
        by_ids = await session.get_logprobs(input_ids=[5, 6, 7], top_k=1)
        by_chat = await session.get_logprobs(messages=HI)
    return {"text": by_text, "ids": by_ids, "chat": by_chat}


async def openai(kind: str, url: str, tokenizer: str) -> Any:
    """Scripts without ManagedServer: text in, text out; then the trainer's tokens by atroposlib's own function."""
    server = manager("openai", url, tokenizer)
    chat = await server.chat_completion(messages=HI, n=3, max_tokens=64, temperature=1.0, split="train")
    raw = await server.completion(prompt="The quick brown", n=2, max_tokens=4, stop="\n")
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    messages: list[dict[str, str]] = []
    for _ in range(3):
        messages += HI
        turn = await server.chat_completion(messages=messages, n=1, max_tokens=64)
        messages.append({"role": "assistant", "content": turn.choices[0].message.content})
    return {
        "chat": [choice.message.content for choice in chat.choices],
        "reasons": [choice.finish_reason for choice in chat.choices],
        "completion": [choice.text for choice in raw.choices],
        "single": [
            tokenize_for_trainer(theirs, [*HI, {"role": "assistant", "content": choice.message.content}])
            for choice in chat.choices
        ],
        "multi": tokenize_for_trainer(theirs, messages, train_on_all_assistant_turns=True),
    }


async def share(kind: str, url: str, tokenizer: str) -> Any:
    """Chats of one turn and of three, then the trainer's tokens by atroposlib's own function."""
    server = manager("openai", url, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    questions = ["Name three animals.", "What is the capital of Italy?", "Write a short poem about rain."]
    single: list[Any] = []
    multi: list[Any] = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        chat = await server.chat_completion(messages=messages, n=8, max_tokens=32, temperature=1.0)
        for choice in chat.choices:
            whole = [*messages, {"role": "assistant", "content": choice.message.content}]
            single.append(tokenize_for_trainer(theirs, whole, finish_reason=choice.finish_reason)["tokens"])
        for _ in range(3):
            turn = await server.chat_completion(messages=messages, n=1, max_tokens=32, temperature=1.0)
            messages.append({"role": "assistant", "content": turn.choices[0].message.content})
            messages.append({"role": "user", "content": "Go on."})
        multi.append(tokenize_for_trainer(theirs, messages[:-1], train_on_all_assistant_turns=True)["tokens"])
    return {"single": single, "multi": multi}


async def trl(kind: str, url: str, tokenizer: str) -> Any:
    config = APIServerConfig(model_name=tokenizer, base_url=url.removesuffix("/v1"), server_type="trl")
    server = ServerManager([config])
    chat = await server.chat_completion(messages=HI, n=2, max_tokens=64)
    return {"chat": [choice.message.content for choice in chat.choices]}


async def tools(kind: str, url: str, tokenizer: str) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    chat = await client.chat.completions.create(model="policy", messages=HI, tools=[tool])
    message = chat.choices[0].message
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    call = message.tool_calls[0].function
    return {
        "name": call.name,
        "arguments": call.arguments,
        "reason": chat.choices[0].finish_reason,
        "streamed": "".join(texts),
    }


async def health(kind: str, url: str, tokenizer: str) -> Any:
    """Three seconds of waiting beside one request: the clients look every second whether the server is there."""
    servers = [manager(kind, url, tokenizer) for kind in ("sglang", "openai", "vllm")]
    await asyncio.gather(*(server.chat_completion(messages=HI, max_tokens=8) for server in servers))
    await asyncio.sleep(3)
    return [one.server_healthy for server in servers for one in server.servers]


if __name__ == "__main__":
    case, url, tokenizer = sys.argv[1:4]
    kind = sys.argv[4] if len(sys.argv) > 4 else ""
    print("RESULT " + json.dumps(asyncio.run(globals()[case](kind, url, tokenizer)), default=str))
