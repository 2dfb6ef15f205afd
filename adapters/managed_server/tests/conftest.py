"""Small real tokenizers with the chat templates that differ where it matters; fakes of a policy and of its source."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import pytest
from tinker_atropos import PolicyRef, Sample, SamplingParams
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and then it rests. user assistant system tool",
    "12 + 7 = 19\n\nThe answer is 19.</answer> Hello! How are you today? I'm fine, thanks.",
    "<|a|> <|b|> <|c|> and so on",
    "Höhe, Größe und naïve café: 你好,世界 🎉 emoji\n<answer>42</answer> User: Assistant:",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tools in the system turn, and an assistant's call re-written with one space after each comma and colon.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '<tool_call>' in m.content %}"
    "{{ m.content.split('<tool_call>')[0] }}<tool_call>"
    "{{ m.content.split('<tool_call>')[1].split() | join(' ') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Like Qwen3: thoughts before the last user message are stripped, those after it are kept.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like GLM 4: no end of turn, the next role's marker ends it.
MARKERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like Phi 3: the end of turn swallows the newline after it.
SWALLOWING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like Llama 2: words carry their space in front, and a text's beginning gets one.
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def byte_level(
    specials: Sequence[str | AddedToken],
    template: str | None,
    *,
    eos: str,
    bos: str | None = None,
    added: Sequence[str] = (),
) -> Any:
    """Return a byte-level BPE tokenizer of about 400 tokens, so merges happen and every byte has a token."""
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXT * 4, trainers.BpeTrainer(vocab_size=440, initial_alphabet=alphabet, show_progress=False)
    )
    raw.add_special_tokens(list(specials))
    raw.add_tokens([AddedToken(token, normalized=False) for token in added])
    if bos is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, raw.token_to_id(bos))]
        )
    return _wrap(PreTrainedTokenizerFast, raw, template, eos, bos)


def sentencepiece_like() -> Any:
    """Return a BPE tokenizer with `▁` for spaces, one of them put before a text, as Llama 2 has."""
    from transformers import PreTrainedTokenizerFast

    learnt = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    learnt.train_from_iterator([text.replace(" ", "▁") for text in TEXT] * 4, trainer)
    model = json.loads(learnt.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrap(PreTrainedTokenizerFast, raw, SPACED, "</s>", "<s>")


def _wrap(kind: Any, raw: Tokenizer, template: str | None, eos: str, bos: str | None) -> Any:
    tokenizer = kind(tokenizer_object=raw, eos_token=eos, bos_token=bos, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> Callable[[str], Any]:
    """Look a tokenizer up by its template's trait."""
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    roles = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
    end = AddedToken("<|end|>", rstrip=True, special=True, normalized=False)
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    found = {
        "chatml": byte_level(chatml, CHATML, eos="<|im_end|>"),
        "tools": byte_level(chatml, TOOLS, eos="<|im_end|>"),
        "thinking": byte_level(chatml, THINKING, eos="<|im_end|>", added=["<think>", "</think>"]),
        "llama3": byte_level(llama3, LLAMA3, eos="<|eot_id|>", bos="<|begin_of_text|>"),
        "plain": byte_level(["<|endoftext|>"], PLAIN, eos="<|endoftext|>"),
        "markers": byte_level(roles, MARKERS, eos="<|user|>"),
        "swallowing": byte_level([*roles, end], SWALLOWING, eos="<|end|>"),
        "spaced": sentencepiece_like(),
        "base": byte_level(["<|endoftext|>"], None, eos="<|endoftext|>", bos="<|endoftext|>"),
    }
    return found.__getitem__


@pytest.fixture(scope="session")
def sample() -> Callable[..., Sample]:
    """Make a sample of given tokens, with log-probabilities that tell every position from every other."""

    def make(tokens: Sequence[int], reason: str = "stop", logprobs: Sequence[float] | None = None) -> Sample:
        given = -0.01 * (1 + np.arange(len(tokens))) if logprobs is None else logprobs
        return Sample(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(given, dtype=np.float32),
            reason,  # type: ignore[arg-type]
            PolicyRef("run", 0, 0, "fake://policy"),
        )

    return make


@pytest.fixture(scope="session")
def open_session() -> Callable[..., Any]:
    """Open a session over a tokenizer; keyword arguments of the configuration go to it, the rest to `open`."""
    from tinker_atropos_managed_server import ManagedServerConfig, make

    def open_(tokenizer: Any, *, stop: Any = None, context_length: int | None = 100_000, **config: Any) -> Any:
        return make(ManagedServerConfig(**config)).open(tokenizer, stop=stop, context_length=context_length)

    return open_


class FakePolicy:
    """A policy that says what it is told to, token by token, at once unless `gate` is closed.

    `replies` are texts (special-token text stands for the token) or token ids, taken in turn and over again; each
    position has a log-probability of its own. What it was asked is in `asked`.
    """

    def __init__(
        self, tokenizer: Any, replies: Sequence[Any], step: int = 0, context_length: int | None = 4096
    ) -> None:
        self.ref = PolicyRef("run", 0, step, f"fake://policy/{step}")
        self.context_length = context_length
        self.replies = list(replies)
        self.asked: list[tuple[list[int], SamplingParams, int]] = []
        self.scored: list[list[int]] = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._tokenizer = tokenizer
        self._next = 0

    def tokenizer(self) -> Any:
        return self._tokenizer

    async def sample(self, prompt: Any, params: SamplingParams, n: int) -> list[Sample]:
        self.asked.append((prompt.tolist(), params, n))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [self._sample(params) for _ in range(n)]

    def _sample(self, params: SamplingParams) -> Sample:
        reply = self.replies[self._next % len(self.replies)]
        self._next += 1
        whole = self._tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        tokens = np.asarray(whole[: params.max_tokens], dtype=np.int32)
        logprobs = (-0.01 * (1 + np.arange(len(tokens))) - self.ref.step).astype(np.float32)
        return Sample(tokens, logprobs, "length" if len(whole) > len(tokens) else "stop", self.ref)

    async def logprobs(self, tokens: Any) -> Any:
        self.scored.append(tokens.tolist())
        found = (-0.5 - 0.001 * np.arange(len(tokens))).astype(np.float32)
        found[:1] = np.nan
        return found


class FakeSource:
    """Hands out `policy`, which a test may exchange; None: there is none yet."""

    def __init__(self, policy: FakePolicy | None) -> None:
        self._there = asyncio.Event()
        self.policy: FakePolicy | None = None
        self.held = 0
        if policy is not None:
            self.publish(policy)

    def publish(self, policy: FakePolicy) -> None:
        self.policy = policy
        self._there.set()

    @property
    def newest(self) -> PolicyRef | None:
        return self.policy.ref if self.policy is not None else None

    @contextlib.asynccontextmanager
    async def use(self, step: int = 0) -> AsyncIterator[FakePolicy]:
        await self._there.wait()
        assert self.policy is not None
        self.held += 1
        try:
            yield self.policy
        finally:
            self.held -= 1


@dataclass
class Served:
    """An endpoint in this process with a client of it."""

    endpoint: Any
    source: FakeSource
    policy: FakePolicy
    client: aiohttp.ClientSession

    @property
    def root(self) -> str:
        return self.endpoint.url.removesuffix("/v1")

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.client.post(self.root + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.client.get(self.root + path, headers=headers) as response:
            return response.status, await response.json()

    def exchange(self, replies: Sequence[Any], step: int) -> FakePolicy:
        """Publish the policy of another step."""
        self.policy = FakePolicy(self.policy.tokenizer(), replies, step, self.policy.context_length)
        self.source.publish(self.policy)
        return self.policy


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Any]:
    """Wait for something to become true."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def fake_policy() -> type[FakePolicy]:
    return FakePolicy


@pytest.fixture(scope="session")
def fake_source() -> type[FakeSource]:
    return FakeSource


@pytest.fixture
async def serve(tokenizers: Callable[[str], Any]) -> AsyncIterator[Callable[..., Any]]:
    """Serve replies over a tokenizer by name (or a tokenizer); keyword arguments go to the configuration."""
    from tinker_atropos.external import EndpointSettings
    from tinker_atropos_managed_server import ManagedServerConfig, serve_policy

    async with contextlib.AsyncExitStack() as stack:

        async def start(
            tokenizer: Any, *replies: Any, context_length: int | None = 4096, settings: Any = None, **config: Any
        ) -> Served:
            found = tokenizers(tokenizer) if isinstance(tokenizer, str) else tokenizer
            policy = FakePolicy(found, replies, context_length=context_length)
            source = FakeSource(policy)
            settings = {"model": "policy", **(settings or {})}
            made = serve_policy(ManagedServerConfig(**config), source, EndpointSettings(**settings))
            endpoint = await stack.enter_async_context(made)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return Served(endpoint, source, policy, client)

        yield start
