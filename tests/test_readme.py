"""The README's own example runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_first_own_reward_trains(tinker_atropos, tiny_model, tmp_path):
    (code,) = re.findall(r"```python\n(# my_env\.py\n.*?)```", README, re.DOTALL)
    (tmp_path / "my_env.py").write_text(code)
    (command,) = re.findall(r"```sh\n(tinker-atropos run --env \./my_env\.py:env .*?)```", README, re.DOTALL)
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    # The README's model takes minutes; a tiny random one goes the same way. It has no chat template.
    smaller = ["--model", str(tiny_model), "--set", "env.prompt_format=completion", "--name", "readme"]
    arguments[arguments.index("--steps") + 1] = "2"
    done = tinker_atropos(*arguments, *smaller, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished 2 steps" in done.stdout
    metrics = (tmp_path / "runs" / "readme" / "metrics.jsonl").read_text()
    assert "env/reward/right_letter" in metrics
    assert "env/reward/short" in metrics


def test_the_hosted_command_passes_as_a_dry_run_without_a_key(tinker_atropos, tmp_path):
    (command,) = re.findall(r"^(tinker-atropos run --env gsm8k --trainer tinker --dry-run)$", README, re.MULTILINE)
    done = tinker_atropos(*shlex.split(command)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "TINKER_API_KEY" in done.stderr
    assert not (tmp_path / "runs").exists()
