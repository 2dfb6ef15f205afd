"""Serves a fake policy on a given port in place of the vLLM server that atroposlib's own tests start.

It takes that server's flags. The replies come from the JSON file that ATROPOSLIB_REPLIES names (tokens, logprobs and
finish reasons of the next call), else the policy says "hello" and ends its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from tinker_atropos import PolicyRef, Sample
from tinker_atropos.external import EndpointSettings
from tinker_atropos_managed_server import ManagedServerConfig, serve_policy


class FakePolicy:
    ref = PolicyRef("run", 0, 0, "fake://policy")

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.context_length = context
        self._tokenizer = tokenizer
        self._hello = [*tokenizer.encode("hello", add_special_tokens=False), tokenizer.eos_token_id]

    def tokenizer(self) -> Any:
        return self._tokenizer

    async def sample(self, prompt: Any, params: Any, n: int) -> list[Sample]:
        path = os.environ.get("ATROPOSLIB_REPLIES")
        if path is None:
            logprobs = -0.1 * np.arange(1, len(self._hello) + 1)
            return [self._made(self._hello, logprobs, "stop")] * n
        said = json.loads(Path(path).read_text())
        return [self._made(*one) for one in zip(said["tokens"], said["logprobs"], said["reasons"], strict=True)]

    def _made(self, tokens: Any, logprobs: Any, reason: Any) -> Sample:
        return Sample(np.asarray(tokens, dtype=np.int32), np.asarray(logprobs, dtype=np.float32), reason, self.ref)

    async def logprobs(self, tokens: Any) -> Any:
        return np.full(len(tokens), -1, dtype=np.float32)


class FakeSource:
    def __init__(self, policy: FakePolicy) -> None:
        self._policy = policy
        self.newest = policy.ref

    @contextlib.asynccontextmanager
    async def use(self, step: int = 0) -> AsyncIterator[FakePolicy]:
        yield self._policy


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=32000)
    parser.add_argument("--max-num-seqs")
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    source: Any = FakeSource(FakePolicy(AutoTokenizer.from_pretrained(asked.model), asked.max_model_len))
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    settings = EndpointSettings(model=asked.model, port=asked.port)
    async with serve_policy(ManagedServerConfig(), source, settings):
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
