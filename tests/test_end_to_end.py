"""The main job with the real command line and SDK against the local server: exact resume, ledger, export."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from tinker_atropos.rollout.records import read_records
from tinker_atropos.testing import check_ledger


def flags(model: Path, environment: Path, name: str, *more: str) -> list[str]:
    return [
        *("run", "--env", f"{environment}:env", "--trainer", "tinker", "--local", "--model", str(model)),
        *("--name", name, "--group-size", "4", "--batch-size", "8", "--lora-rank", "4"),
        *("--learning-rate", "0.01", "--set", "rollout.max_tokens=6", "--set", "env.steps_per_eval=3"),
        *("--set", "tinker.save_checkpoint_interval=2", "--set", "tinker.local_threads=1", *more),
        *("--set", "env.prompt_format=completion"),
        *(() if "--steps" in more else ("--steps", "6")),
    ]


SYNCHRONOUS = ("--set", "rollout.max_staleness=0", "--set", "run.deterministic=true", "--seed", "5")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained(run: Path) -> list[Any]:
    """Tokens, log-probabilities, rewards and advantages of all that was trained on, in order."""
    return [
        (record["ordinal"], record["step"], t["rewards"], t["segments"])
        for path in sorted((run / "rollouts").glob("step-*.jsonl.gz"))
        for record in read_records(path)
        for t in record["trajectories"]
    ]


def kill_at_step(process: Any, run: Path, step: int) -> None:
    """`kill -9` once the metrics hold a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and any(f'"step": {step},' in line for line in file.read_text().splitlines()):
            break
        time.sleep(0.02)
    assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGKILL)
    process.wait()


def servers_of(run: Path) -> list[int]:
    """Processes whose command line names the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except (OSError, NotADirectoryError):
            continue
        if str(run).encode() in command and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def test_a_killed_run_resumes_exactly(tiny_model, environment_file, tmp_path, tinker_atropos, start_tinker_atropos):
    whole = tinker_atropos(*flags(tiny_model, environment_file, "whole", *SYNCHRONOUS), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    runs = tmp_path / "runs"
    process = start_tinker_atropos(*flags(tiny_model, environment_file, "again", *SYNCHRONOUS), cwd=tmp_path)
    kill_at_step(process, runs / "again", 3)
    resumed = tinker_atropos("run", "--resume", "--name", "again", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert trained(runs / "again") == trained(runs / "whole")
    for row, other in zip(metrics(runs / "again"), metrics(runs / "whole"), strict=True):
        for key in ("step", "loss", "reward/mean", "eval/reward", "train/kl_sample_train_v1"):
            assert row.get(key) == other.get(key), (row["step"], key)
    assert check_ledger(runs / "again" / "tinker" / "journal.jsonl", runs / "again").steps == 6


def test_with_overlap_nothing_is_lost_or_doubled(
    tiny_model, environment_file, tmp_path, tinker_atropos, start_tinker_atropos
):
    process = start_tinker_atropos(
        *flags(tiny_model, environment_file, "overlap", "--set", "rollout.max_staleness=2"), cwd=tmp_path
    )
    run = tmp_path / "runs" / "overlap"
    kill_at_step(process, run, 3)
    deadline = time.monotonic() + 60
    while servers_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of(run), "the server outlived its parent"
    resumed = tinker_atropos("run", "--resume", "--name", "overlap", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in metrics(run)] == list(range(7))
    ledger = check_ledger(run / "tinker" / "journal.jsonl", run)
    assert (ledger.steps, ledger.trained, len(ledger.models)) == (6, 12, 2)


def test_downloaded_weights_are_the_policy_that_was_served(tiny_model, environment_file, tmp_path, tinker_atropos):
    ran = tinker_atropos(*flags(tiny_model, environment_file, "short"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    weights = next(line for line in ran.stdout.splitlines() if line.startswith("weights ")).removeprefix("weights ")
    commands = [
        line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("  ") and "tinker-atropos " in line
    ]
    assert [command[0] for command in commands] == ["checkpoint", "checkpoint", "run"]
    downloaded = tinker_atropos(*commands[0], cwd=tmp_path)
    assert downloaded.returncode == 0, downloaded.stderr
    listed = tinker_atropos(*commands[1], "--format", "json", cwd=tmp_path)
    assert weights in [entry["uri"] for entry in json.loads(listed.stdout)]
    described = tinker_atropos("checkpoint", "info", "--local", "--run", "short", cwd=tmp_path)
    assert weights in described.stdout
    longer = tinker_atropos(*commands[2][:-1], "7", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert metrics(tmp_path / "runs" / "short")[-1]["step"] == 7

    tokens = list(range(3, 40))
    served = served_logprobs(tiny_model, tmp_path / "runs" / "short" / "tinker", weights, tokens, tmp_path / "log")
    loaded = peft_logprobs(tiny_model, tmp_path / downloaded.stdout.strip(), tokens)
    untrained = peft_logprobs(tiny_model, None, tokens)
    assert np.abs(served - loaded).max() < 1e-4
    assert np.abs(served - untrained).max() > 1e-3


def served_logprobs(model: Path, store: Path, weights: str, tokens: list[int], log: Path) -> Any:
    import tinker
    from tinker_atropos_local_tinker import LOCAL_API_KEY, start_local_server

    with start_local_server(store, model=str(model), threads=1, log=log) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=LOCAL_API_KEY)
        sampler = service.create_sampling_client(model_path=weights)
        values = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    return np.array(values[1:], np.float64)


def peft_logprobs(model: Path, adapter: Path | None, tokens: list[int]) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        net = PeftModel.from_pretrained(net, str(adapter))
    with torch.no_grad():
        logits = net(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_ctrl_c_once_stops_with_a_checkpoint(tiny_model, environment_file, tmp_path, start_tinker_atropos):
    process = start_tinker_atropos(*flags(tiny_model, environment_file, "stopped", "--steps", "500"), cwd=tmp_path)
    run = tmp_path / "runs" / "stopped"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(metrics(run)) > 1:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "--resume --name stopped" in output
    assert "finished" not in output
    assert list((run / "manifests").glob("*.json"))
    assert not servers_of(run)


def test_the_loop_runs_in_a_program_of_ones_own(tiny_model, environment_file, tmp_path):
    from tinker_atropos.config import load
    from tinker_atropos.progress import PlainProgress
    from tinker_atropos.registry import Registry
    from tinker_atropos.run import run

    registry = Registry()
    settings = {
        "run.env": f"{environment_file}:env",
        "run.trainer": "tinker",
        "run.output": str(tmp_path / "runs"),
        "trainer.local": True,
        "openai.model_name": str(tiny_model),
        "env.total_steps": 1,
        "env.group_size": 2,
        "env.batch_size": 4,
        "rollout.max_tokens": 4,
        "env.prompt_format": "completion",
        "env.ensure_scores_are_not_same": False,
    }
    config = load(None, [(path, value, "test") for path, value in settings.items()], registry=registry)
    finished = asyncio.run(run(config, PlainProgress(), registry=registry))
    assert finished.steps == 1
