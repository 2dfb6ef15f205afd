"""`eval` with real models: one on this machine, a run's checkpoint, and our own OpenAI-compatible server process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.registry import Registry

# Serves a model as the endpoints of a run do, until its stdin ends.
SERVER = """
import asyncio, sys
from contextlib import asynccontextmanager
from pathlib import Path

from tinker_atropos.external import EndpointSettings
from tinker_atropos.registry import Registry
from tinker_atropos.trainer import StoredPolicy
from tinker_atropos.validation import validate

class Source:
    def __init__(self, policy):
        self.policy, self.newest = policy, policy.ref

    @asynccontextmanager
    async def use(self, step=0):
        yield self.policy

async def main(model, folder):
    registry = Registry()
    trainer, adapter = registry.load("trainer", "tinker"), registry.load("adapter", "managed_server")
    wanted = StoredPolicy(None, model, Path(folder), "served", 0, deterministic=True, say=lambda line: None)
    async with trainer.stored(validate(trainer.config, {"local": True}), wanted) as policy:
        settings = EndpointSettings(model="served")
        async with adapter.endpoint(validate(adapter.config, {}), Source(policy), settings) as endpoint:
            print(endpoint.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""

Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    from tinker_atropos_local_tinker.tiny_model import write_tiny_model
    from transformers import AutoTokenizer

    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if Registry().load("adapter", "managed_server").endpoint is None:
        pytest.skip("managed_server has no endpoint yet")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(chat_model), str(tmp_path_factory.mktemp("served"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http"), "the server did not start"
    yield url
    process.communicate(timeout=120)


@pytest.fixture
def evaluate(tinker_atropos: Any, environment_file: Path, tmp_path: Path) -> Evaluate:
    def call(*arguments: Any) -> dict[str, Any]:
        more = ("--max-tokens", "8", "--format", "json")
        ended = tinker_atropos("eval", environment_file, *arguments, *more, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        report: dict[str, Any] = json.loads(ended.stdout)
        return report

    return call


def scores(report: dict[str, Any], tmp_path: Path) -> dict[tuple[int, int], float]:
    lines = (tmp_path / report["folder"] / "episodes.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return {(record["task"], record["sample"]): record["reward"] for record in records}


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_our_server_and_the_model_itself_give_the_same_scores(
    evaluate: Evaluate, server: str, chat_model: Path, tmp_path: Path, tinker_atropos: Any, form: str
) -> None:
    """Both sample one answer a request, with the same seeds; `--deterministic` keeps batches out of it."""
    more = ("-n", 4, "-r", 3, "--seed", 3, "--set", f"env.prompt_format={form}")
    over_http = evaluate("-m", server, *more, "--name", "http")
    directly = evaluate("-m", chat_model, *more, "--deterministic", "--name", "direct")
    assert scores(over_http, tmp_path) == scores(directly, tmp_path)
    assert len(set(scores(directly, tmp_path).values())) > 1
    assert over_http["tokens"] == directly["tokens"]
    assert over_http["finish_reasons"] == directly["finish_reasons"]
    assert over_http["reward"] == directly["reward"]
    compared = tinker_atropos("eval", "compare", "http", "direct", cwd=tmp_path)
    assert "no difference shown" in compared.stdout, compared.stderr


def test_a_local_model_is_scored_in_exact_tokens(evaluate: Evaluate, chat_model: Path, tmp_path: Path) -> None:
    report = evaluate("-m", chat_model, "-n", 2, "-r", 2, "--deterministic")
    record = json.loads((tmp_path / report["folder"] / "episodes.jsonl").read_text().splitlines()[0])
    (segment,) = record["segments"]
    assert sum(segment["mask"]) == record["tokens"]["sampled"]
    assert len(segment["tokens"]) == record["tokens"]["sampled"] + record["tokens"]["prompt"]
    assert report["model"]["kind"] == "model"


def test_killed_and_called_again_it_has_what_a_whole_evaluation_has(
    evaluate: Evaluate, start_tinker_atropos: Any, chat_model: Path, environment_file: Path, tmp_path: Path
) -> None:
    more = ("-n", 4, "-r", 4, "--deterministic")
    whole = evaluate("-m", chat_model, *more, "--name", "whole")
    command = ("eval", environment_file, "-m", chat_model, *more, "--max-tokens", 8, "--concurrency", 2)
    process = start_tinker_atropos(*map(str, command), "--name", "killed", cwd=tmp_path)
    episodes = tmp_path / "evals" / "killed" / "episodes.jsonl"
    deadline = time.monotonic() + 300
    while not (episodes.exists() and episodes.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = [json.loads(line) for line in episodes.read_bytes().split(b"\n")[:-1]]
    assert 3 <= len(before) < 16
    resumed = evaluate("-m", chat_model, *more, "--name", "killed", "--concurrency", 2)
    after = [json.loads(line) for line in episodes.read_text().splitlines()]
    assert after[: len(before)] == before
    assert len(after) == 16
    assert scores(resumed, tmp_path) == scores(whole, tmp_path)


def test_a_runs_checkpoint_and_its_beginning_are_scored(
    evaluate: Evaluate, tinker_atropos: Any, tiny_model: Path, environment_file: Path, tmp_path: Path
) -> None:
    trained = tinker_atropos(
        *("run", "--env", f"{environment_file}:env", "--trainer", "tinker", "--local", "--model", tiny_model),
        *("--name", "mine", "--steps", "2", "--group-size", "4", "--batch-size", "8", "--lora-rank", "4"),
        *("--learning-rate", "0.05", "--set", "rollout.max_tokens=8", "--set", "env.prompt_format=completion"),
        *("--set", "tinker.save_checkpoint_interval=1", "--set", "env.steps_per_eval=0"),
        cwd=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    more = ("-n", 4, "-r", 4, "--set", "env.prompt_format=completion", "--deterministic")
    base = evaluate("-m", "mine@base", *more, "--name", "base")
    first = evaluate("-m", "mine@step-000001", *more, "--name", "first")
    last = evaluate("-m", "mine", *more, "--name", "last")
    model = evaluate("-m", tiny_model, *more, "--name", "model")
    assert scores(base, tmp_path) == scores(model, tmp_path)
    assert [report["model"]["step"] for report in (base, first, last)] == [0, 1, 2]
    assert scores(last, tmp_path) != scores(base, tmp_path)
    assert scores(first, tmp_path) != scores(last, tmp_path)
    compared = tinker_atropos("eval", "compare", "base", "last", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr


@pytest.mark.model
def test_the_packaged_model_adds(tinker_atropos: Any, tmp_path: Path) -> None:
    arguments = ("-m", "smollm2-135m", "-n", "12", "-r", "2", "--set", "env.dataset=arithmetic", "--format", "json")
    ended = tinker_atropos("eval", "gsm8k", *arguments, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert 0.05 < report["reward"]["mean"] < 0.95
    assert report["pass"]["2"]["mean"] >= report["pass"]["1"]["mean"]
    assert "correct" in report["metrics"]
