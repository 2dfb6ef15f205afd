"""Control through the real command line: the CartPole file learns, and a killed Humanoid run resumes exactly."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mujoco.batch")

CONFIGS = Path(__file__).parents[1] / "configs"
# What a clock says, not the run.
CLOCKED = {"time", "env_steps/per_second", "trainer/busy"}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in CLOCKED and not key.startswith("time/")}
        for row in metrics(run)
    ]


def kill_at_step(process: Any, run: Path, step: int) -> None:
    """`kill -9` once the metrics hold a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            break
        time.sleep(0.005)
    assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_the_cartpole_file_reaches_450(tinker_atropos, tmp_path):
    ran = tinker_atropos("run", "-c", CONFIGS / "cartpole.yaml", "--name", "cartpole", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = metrics(tmp_path / "runs" / "cartpole")
    ended = [row for row in rows if row["env_steps"] > 50_000 and row["episode/count"]]
    episodes = sum(row["episode/count"] for row in ended)
    assert sum(row["episode/return"] * row["episode/count"] for row in ended) / episodes >= 450
    assert 60_000 <= rows[-1]["env_steps"] < 60_000 + 8 * 128
    listed = tinker_atropos("checkpoint", "list", "--run", "cartpole", "--format", "json", cwd=tmp_path)
    assert [Path(entry["uri"]).parent.name for entry in json.loads(listed.stdout)[:2]] == ["final", "final"]
    assert len(json.loads(listed.stdout)) == 2 * 5
    downloaded = tinker_atropos("checkpoint", "download", "--run", "cartpole", cwd=tmp_path)
    folder = tmp_path / "runs" / "cartpole" / "export" / "final"
    assert (downloaded.returncode, downloaded.stdout.strip()) == (0, "runs/cartpole/export/final"), downloaded.stderr
    assert {"policy.npz", "policy.py"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["cartpole", "halfcheetah", "humanoid", "humanoid-10m"])
def test_every_control_file_says_what_it_would_do(name, tinker_atropos, tmp_path):
    ran = tinker_atropos("run", "-c", CONFIGS / f"{name}.yaml", "--dry-run", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "every key that was given has an effect" in ran.stdout


def test_a_killed_humanoid_run_resumes_exactly(tinker_atropos, start_tinker_atropos, tmp_path):
    def flags(name: str) -> list[str]:
        return [
            *("run", "--env", "humanoid", "--trainer", "torch-ppo", "--num-envs", "4", "--steps", "12", "--seed", "3"),
            *("--set", "torch_ppo.steps_per_update=32", "--set", "torch_ppo.minibatches=4"),
            *("--set", "torch_ppo.schedule=sync", "--set", "torch_ppo.save_checkpoint_interval=2"),
            *("--set", "env.steps_per_eval=6", "--set", "rollout.eval_episodes=2", "--name", name),
        ]

    whole = tinker_atropos(*flags("whole"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    runs = tmp_path / "runs"
    kill_at_step(start_tinker_atropos(*flags("again"), cwd=tmp_path), runs / "again", 5)
    resumed = tinker_atropos("run", "--resume", "--name", "again", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing again from step" in resumed.stdout + resumed.stderr
    rows = without_clock(runs / "again")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows == without_clock(runs / "whole")
