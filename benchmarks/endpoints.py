"""`make bench-endpoints`: what a request of `/generate` costs over the bare policy, with a policy that answers at once.

The server runs in a process of its own, pinned to one core; 16 clients in another keep one request each in flight. The
policy is a fake: it returns the same tokens to every prompt without computing anything, so all that is left is ours.
Target: at least 2,000 requests/s on one core, and 99 % of them within 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

CLIENTS = 16
TARGET_RATE = 2000.0
TARGET_P99_MS = 20.0
# Prompt and answer in tokens; the first is the one the target is for.
SHAPES = ((128, 32), (1024, 256))


class InstantPolicy:
    """A fake policy: the same answer to all, at once."""

    context_length = 65536

    def __init__(self, answer: int) -> None:
        from tinker_atropos import PolicyRef, Sample
        from tinker_atropos_local_tinker.tiny_model import make_tokenizer

        self.ref = PolicyRef("bench", 0, 1, "fake://instant")
        self._tokenizer = make_tokenizer()
        tokens = np.arange(97, 97 + answer, dtype=np.int32) % 90 + 1
        tokens[-1] = 256
        logprobs = -np.linspace(0.01, 2, answer).astype(np.float32)
        self._sample = Sample(tokens, logprobs, "stop", self.ref)

    def tokenizer(self) -> Any:
        return self._tokenizer

    async def sample(self, prompt: Any, params: Any, n: int) -> list[Any]:
        return [self._sample] * n


class InstantSource:
    def __init__(self, policy: InstantPolicy) -> None:
        self._policy = policy
        self.newest = policy.ref

    @contextlib.asynccontextmanager
    async def use(self, step: int = 0) -> AsyncIterator[InstantPolicy]:
        yield self._policy


def serve(answer: int, core: int) -> None:
    """Serve until stdin closes; say the port and, at the end, the seconds of CPU."""
    os.sched_setaffinity(0, {core})
    from tinker_atropos.external import EndpointSettings
    from tinker_atropos_managed_server import ManagedServerConfig, serve_policy

    async def run() -> None:
        source: Any = InstantSource(InstantPolicy(answer))
        async with serve_policy(ManagedServerConfig(), source, EndpointSettings(model="bench")) as endpoint:
            print(endpoint.url.rsplit(":", 1)[1].split("/")[0], flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())
    print(time.process_time(), flush=True)


class Client(asyncio.Protocol):
    """Keeps one request in flight on one connection; as little work as can be, for it must not be what is measured."""

    def __init__(self, request: bytes, latencies: list[float], until: float) -> None:
        self._request = request
        self._latencies = latencies
        self._until = until
        self._seen = b""
        self._sent = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head = self._seen.find(b"\r\n\r\n")
        if head < 0:
            return
        lower = self._seen[:head].lower()
        at = lower.index(b"content-length:")
        length = int(lower[at + 15 : lower.find(b"\r", at) if b"\r" in lower[at:] else None])
        if len(self._seen) < head + 4 + length:
            return
        now = time.perf_counter()
        if not self._seen.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self._seen[:500].decode()))
            return
        self._latencies.append(now - self._sent)
        self._seen = b""
        if now < self._until:
            self._send()
        else:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)


async def load(port: int, request: bytes, seconds: float) -> tuple[float, list[float]]:
    """Return requests per second and the latencies in seconds."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    began = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: Client(request, latencies, began + seconds), "127.0.0.1", port))[1]
        for _ in range(CLIENTS)
    ]
    await asyncio.gather(*(client.done for client in clients))
    return len(latencies) / (time.perf_counter() - began), latencies


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, its own and the kernel's for it."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare(prompt: list[int], answer: int, seconds: float) -> float:
    """Return samples per second of the policy itself, called as the endpoint calls it, from JSON-ready tokens."""
    from tinker_atropos import SamplingParams

    policy = InstantPolicy(answer)

    async def run() -> float:
        calls = 0
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            await policy.sample(np.array(prompt, dtype=np.int32), SamplingParams(answer), 1)
            calls += 1
        return calls / (time.perf_counter() - began)

    return asyncio.run(run())


def measure(prompt_tokens: int, answer: int, seconds: float) -> tuple[float, float]:
    """Measure one shape and print it; return requests/s and the 99th percentile in milliseconds."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "--serve", str(answer), "--core", str(cores[0])]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))
        prompt = [1 + place % 90 for place in range(prompt_tokens)]
        body = json.dumps(
            {
                "input_ids": prompt,
                "sampling_params": {"n": 1, "max_new_tokens": answer, "temperature": 1.0},
                "return_logprob": True,
                "return_text_in_logprobs": False,
            }
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        request = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        asyncio.run(load(port, request, 1.0))
        used = cpu_seconds(server.pid)
        rate, latencies = asyncio.run(load(port, request, seconds))
        cpu = (cpu_seconds(server.pid) - used) / len(latencies)
        alone = bare(prompt, answer, 1.0)
    finally:
        os.sched_setaffinity(0, set(cores))
        server.stdin.close()
        server.wait(30)
    p50, p99 = (float(value) * 1e3 for value in np.percentile(latencies, (50, 99)))
    print(
        f"{prompt_tokens:>5} + {answer:<4} tokens {rate:7.0f} requests/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms; overhead "
        f"{1e6 / rate - 1e6 / alone:.0f} µs a request over the bare policy's {alone:,.0f}/s; server's CPU time "
        f"{cpu * 1e6:.0f} µs a request ({1 / cpu:,.0f} a second of it)",
        flush=True,
    )
    return rate, p99


def main() -> int:
    """Return 0 where the target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each shape is measured")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve, asked.core)
        return 0
    busy = f"load average before {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
    print(
        f"/generate (SGLang), {CLIENTS} clients, server on one core, a policy that answers at once; {busy}", flush=True
    )
    found = [measure(*shape, asked.seconds) for shape in SHAPES]
    rate, p99 = found[0]
    met = rate >= TARGET_RATE and p99 <= TARGET_P99_MS
    shape = f"{SHAPES[0][0]} + {SHAPES[0][1]} tokens"
    print(
        f"target {TARGET_RATE:.0f} requests/s and p99 {TARGET_P99_MS:.0f} ms at {shape}: {'met' if met else 'missed'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
