"""A package of somebody else's: one file, one entry point. It shows in `env list` and trains by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from tinker_atropos import Task, hookimpl, single_turn


@hookimpl
def environment_spec():
    return single_turn(
        "acme-vowels",
        tasks=lambda split: [Task(word) for word in ("cat", "dog", "bird", "fish")],
        reward=lambda completion, task: sum(letter in "aeiou" for letter in completion.text) / 10,
    )
"""

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-vowels"
version = "3.2.1"

[project.entry-points."tinker_atropos.envs"]
acme-vowels = "acme_vowels"

[tool.hatch.build.targets.wheel]
only-include = ["acme_vowels.py"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a folder of its own; return that folder, for PYTHONPATH."""
    source = tmp_path_factory.mktemp("acme")
    (source / "acme_vowels.py").write_text(MODULE)
    (source / "pyproject.toml").write_text(PROJECT)
    target = source / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def test_it_is_listed(installed, tinker_atropos):
    listed = tinker_atropos("env", "list", "--format", "json", PYTHONPATH=str(installed))
    assert listed.returncode == 0, listed.stderr
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["acme-vowels"]["package"] == "acme-vowels 3.2.1"
    assert rows["acme-vowels"]["status"] == "ok"


def test_it_trains_by_name_with_either_spelling(installed, tinker_atropos, tiny_model, tmp_path):
    ran = tinker_atropos(
        *("run", "--env", "acme_vowels", "--trainer", "tinker", "--local", "--model", tiny_model, "--name", "acme"),
        *("--steps", "2", "--group-size", "4", "--batch-size", "8", "--lora-rank", "2", "--learning-rate", "0.001"),
        *("--set", "env.prompt_format=completion", "--set", "rollout.max_tokens=12"),
        *("--set", "env.ensure_scores_are_not_same=false"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert ran.returncode == 0, ran.stderr
    assert "finished 2 steps" in ran.stdout
