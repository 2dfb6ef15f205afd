"""`make bench-api`: posting and draining 1,000 groups, ours beside the original `run-api`, in one run.

A group is 16 sequences of 512 tokens with masks, log-probabilities and messages, as JSON in gzip: what atroposlib's
environments send. Eight processes post their share each over one connection; then one client fetches batches of 256
sequences until all are out. Clients neither parse nor compress while the clock runs; what came out is checked after.
Peak memory is the server process's own (VmHWM). Last, at a cap of 100 groups, clients go on posting for some seconds.

The original runs in an interpreter of its own: `--original PYTHON` or TINKER_ATROPOS_ORIGINAL_PYTHON names one that has
atroposlib 0.4.0, fastapi and uvicorn; without, one is made from the package index. Ours also runs on a Redis that is
started for it and writes each change to disk before it answers (`appendfsync always`); `--redis URL` names another.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEQUENCES, TOKENS, PROMPT = 16, 512, 96
CLIENTS = 8
BATCH = 256
HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
TARGETS = {  # ours / original: posted, drained, and peak memory at most
    "memory": (2.0, 10.0, 0.3),
    "redis": (1.2, 5.0, None),
}


@dataclass
class Measured:
    posted: float
    drained: float
    peak: float  # MB


def make_group(seed: int) -> bytes:
    draw = random.Random(seed)
    tokens = [[draw.randrange(50_000) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
    words = [f"w{draw.randrange(3000)}" for _ in range(TOKENS)]
    group = {
        "tokens": tokens,
        "masks": [[-100] * PROMPT + row[PROMPT:] for row in tokens],
        "scores": [float(draw.random() < 0.5) for _ in range(SEQUENCES)],
        "advantages": None,
        "ref_logprobs": None,
        "messages": [
            [
                {"role": "user", "content": " ".join(words[:PROMPT])},
                {"role": "assistant", "content": " ".join(draw.choices(words, k=TOKENS - PROMPT))},
            ]
            for _ in range(SEQUENCES)
        ],
        "inference_logprobs": [
            [1.0] * PROMPT + [-draw.expovariate(1.5) for _ in range(TOKENS - PROMPT)] for _ in range(SEQUENCES)
        ],
        "overrides": None,
        "group_overrides": None,
        "env_id": 0,
    }
    return gzip.compress(json.dumps(group).encode())


def write_groups(folder: Path, count: int) -> tuple[int, int]:
    """Write the bodies; return the mean sizes of JSON and gzip in bytes."""
    with multiprocessing.Pool(min(8, os.cpu_count() or 1)) as pool:
        bodies = pool.map(make_group, range(count), chunksize=8)
    for index, body in enumerate(bodies):
        (folder / f"{index}.gz").write_bytes(body)
    sample = bodies[:20]
    return sum(len(gzip.decompress(body)) for body in sample) // len(sample), sum(map(len, bodies)) // count


def call(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def post_share(port: int, folder: str, share: range, ready: Any, go: Any) -> None:
    bodies = [Path(folder, f"{index}.gz").read_bytes() for index in share]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    ready.release()
    go.wait()
    for body in bodies:
        connection.request("POST", "/scored_data", body, HEADERS)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status} {said[:300]!r}")


def post_on(port: int, folder: str, seconds: float, count: int, offset: int) -> None:
    """Post without end, also what is refused for want of room."""
    deadline = time.monotonic() + seconds
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    index = offset
    while time.monotonic() < deadline:
        connection.request("POST", "/scored_data", Path(folder, f"{index % count}.gz").read_bytes(), HEADERS)
        answer = connection.getresponse()
        answer.read()
        if answer.will_close:
            connection.close()
        index += CLIENTS


@contextmanager
def served(command: list[str]) -> Iterator[tuple[int, int]]:
    """Start a server on a free port; yields its port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {server.returncode}")
            try:
                if call(http.client.HTTPConnection("127.0.0.1", port, timeout=5), "GET", "/info")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(30)


def memory(pid: int, field: str = "VmHWM") -> float:
    """Return a process's peak (VmHWM) or present (VmRSS) memory in MB."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1000


def register(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    trainer = {
        **{"wandb_group": "bench", "wandb_project": "bench", "batch_size": BATCH, "max_token_len": 2048},
        **{"checkpoint_dir": "", "save_checkpoint_interval": 100, "starting_step": 0, "num_steps": 1000},
    }
    environment = {"max_token_length": 2048, "desired_name": "bench", "weight": 1.0, "group_size": SEQUENCES}
    for method, path, body in (
        ("POST", "/register", trainer),
        ("GET", "/batch", None),
        ("POST", "/register-env", environment),
    ):
        status, said = call(connection, method, path, body)
        assert status == 200, (path, status, said)
    return connection


def measure(command: list[str], folder: Path, count: int) -> Measured:
    with served(command) as (port, pid):
        connection = register(port)
        ready, go = multiprocessing.Semaphore(0), multiprocessing.Event()
        clients = [
            multiprocessing.Process(target=post_share, args=(port, str(folder), range(n, count, CLIENTS), ready, go))
            for n in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for _ in clients:
            ready.acquire()
        began = time.perf_counter()
        go.set()
        for client in clients:
            client.join()
            assert client.exitcode == 0, "a client failed"
        posted = count / (time.perf_counter() - began)
        bodies: list[bytes] = []
        connection.close()  # uvicorn has ended it by now; the next call opens another
        began = time.perf_counter()
        while not bodies or len(bodies[-1]) != len('{"batch":null}'):
            status, body = call(connection, "GET", "/batch")
            assert status == 200, body
            bodies.append(body)
        seconds = time.perf_counter() - began
        peak = memory(pid)
    out = [len(json.loads(gzip.decompress(body))["batch"]) for body in bodies[:-1]]
    assert sum(out) == count * SEQUENCES // BATCH * (BATCH // SEQUENCES), out
    return Measured(posted, sum(out) / seconds, peak)


def at_the_cap(command: list[str], folder: Path, count: int, seconds: float) -> tuple[float, float, int]:
    """Return memory in MB once the cap is reached, after `seconds` more of posting, and groups held."""
    with served([*command, "--cap", "100", "--hold", "0.2"]) as (port, pid):
        connection = register(port)

        def pour(duration: float) -> None:
            clients = [
                multiprocessing.Process(target=post_on, args=(port, str(folder), duration, count, n))
                for n in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()

        pour(seconds / 2)
        before = memory(pid, "VmRSS")
        pour(seconds)
        connection.close()
        held = json.loads(call(connection, "GET", "/status")[1])["queue_size"]
        return before, memory(pid, "VmRSS"), held


def original(given: str | None, folder: Path) -> list[str]:
    """Return the command of the original `run-api`."""
    python = given or os.environ.get("TINKER_ATROPOS_ORIGINAL_PYTHON")
    if python is None:
        print("making an interpreter with atroposlib 0.4.0 …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "original")], check=True)
        python = str(folder / "original" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "fastapi", "uvicorn", "pydantic"], check=True)
        subprocess.run([*pip, "--no-deps", "atroposlib==0.4.0"], check=True)
    return [python, "-m", "atroposlib.cli.run_api"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the median counts")
    parser.add_argument("--original", help="an interpreter that has atroposlib 0.4.0")
    parser.add_argument("--redis", help="redis://… of a server that may be filled; without, one is started")
    asked = parser.parse_args()
    from tinker_atropos.contract_tests.redis_server import RedisServer, find_servers

    ours = [sys.executable, "-m", "tinker_atropos", "run-api", "--cap", str(2 * asked.groups)]
    failed = False
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        if not asked.redis and find_servers():
            asked.redis = stack.enter_context(RedisServer(folder / "redis")).url
        commands = {"original": original(asked.original, folder), "memory": [*ours, "--state", "memory"]}
        if asked.redis:
            commands["redis"] = [*ours, "--state", asked.redis, "--run", f"bench-{os.getpid()}"]
        plain, packed = write_groups(folder, asked.groups)
        print(f"{asked.groups} groups of {plain / 1000:.0f} kB of JSON, {packed / 1000:.0f} kB as gzip")
        results: dict[str, list[Measured]] = {name: [] for name in commands}
        for turn in range(asked.repeat):
            for name, command in commands.items():
                if name == "redis":
                    command = [*command[:-1], f"{command[-1]}-{turn}"]
                results[name].append(measure(command, folder, asked.groups))
        print(f"{'':10}{'posted/s':>10}{'drained/s':>11}{'peak MB':>9}")
        middle = {
            name: Measured(
                *(statistics.median(getattr(one, field) for one in all) for field in ("posted", "drained", "peak"))
            )
            for name, all in results.items()
        }
        for name, one in middle.items():
            print(f"{name:10}{one.posted:10.0f}{one.drained:11.0f}{one.peak:9.0f}")
        base = middle["original"]
        for name, one in middle.items():
            if name != "original":
                post, drain, peak = one.posted / base.posted, one.drained / base.drained, one.peak / base.peak
                least_post, least_drain, most_peak = TARGETS[name]
                good = post >= least_post and drain >= least_drain and (most_peak is None or peak <= most_peak)
                failed |= not good
                print(
                    f"{name} / original: posted {post:.2f} (target ≥ {least_post}), drained {drain:.1f} "
                    f"(≥ {least_drain}), peak {peak:.2f}" + ("" if most_peak is None else f" (≤ {most_peak})")
                )
        before, after, held = at_the_cap([*ours[:-2], "--state", "memory"], folder, asked.groups, 6.0)
        print(f"at a cap of 100 groups, {held} held: {before:.0f} MB, after 6 s more of posting {after:.0f} MB")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
