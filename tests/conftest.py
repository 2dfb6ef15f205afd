"""What crosses packages: the real command line, the real SDK, a real server over a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ENVIRONMENT_FILE = """
from tinker_atropos import Task, single_turn

WORDS = "one two three four five six seven eight nine ten".split()

env = single_turn(
    "parity",
    tasks=lambda split: [Task(f"{split} {word}") for word in (WORDS if split == "train" else WORDS[:4])],
    reward=lambda completion, task: sum(map(ord, completion.text)) % 7 / 7,
)
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tinker_atropos_local_tinker.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def environment_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(ENVIRONMENT_FILE)
    return path


def quiet_environment(**changes: str) -> dict[str, str]:
    """No key, no hub, one thread a process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "HF_"))}
    kept["TINKER_ATROPOS_CACHE"] = os.environ.get("TINKER_ATROPOS_CACHE", "")
    return (
        {k: v for k, v in kept.items() if v} | {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"} | changes
    )


@pytest.fixture(scope="session")
def tinker_atropos() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a process."""

    def call(*arguments: str | Path, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tinker_atropos", *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, env=quiet_environment(**changes), capture_output=True, text=True, timeout=600
        )

    return call


@pytest.fixture(scope="session")
def start_tinker_atropos() -> Callable[..., subprocess.Popen[str]]:
    """Start the command line as a process and do not wait."""

    def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tinker_atropos", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=cwd, env=quiet_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start
