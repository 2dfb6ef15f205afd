"""What users get wrong: exit code 2, one clear line, no traceback, and nothing started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RUN = ("run", "--env", "gsm8k", "--trainer", "tinker")
LOCAL = (*RUN, "--local", "--set", "env.dataset=arithmetic")

CASES = {
    "unknown environment": ((*("run", "--env", "gsm8"), *RUN[3:], "--local"), ["'gsm8'", "Did you mean 'gsm8k'?"]),
    "unknown trainer": (("run", "--env", "gsm8k", "--trainer", "tinkr"), ["'tinkr'", "Did you mean 'tinker'?"]),
    "unknown key": ((*LOCAL, "--set", "env.gruop_size=4"), ["env.gruop_size", "Did you mean 'group_size'?"]),
    "unknown section": ((*LOCAL, "--set", "enw.group_size=4"), ["enw", "Did you mean 'env'?"]),
    "wrong value type": ((*LOCAL, "--set", "tinker.lora_rank=eight"), ["tinker.lora_rank", "'eight'", "integer"]),
    "wrong option type": ((*LOCAL, "--steps", "many"), ["--steps", "'many'"]),
    "unknown model": ((*LOCAL, "--model", "smollm2-135"), ["'smollm2-135'", "smollm2-135m"]),
    "no key and not local": (RUN, ["TINKER_API_KEY", "--local"]),
    "batch no multiple of group": ((*LOCAL, "--batch-size", "10", "--group-size", "4"), ["env.batch_size", "8 or 12"]),
    "missing file": (("run", "-c", "nowhere.yaml"), ["'nowhere.yaml'", "does not exist"]),
    "missing environment file": (("run", "--env", "./nowhere.py:env", "--trainer", "tinker"), ["nowhere.py"]),
    "no environment at all": (("run",), ["run.env", "--env gsm8k"]),
    "resume of nothing": ((*LOCAL, "--resume", "--name", "never"), ["never"]),
    "an override without effect": ((*LOCAL, "--set", "openai.base_url=http://x"), ["no effect"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_line(case, tinker_atropos, tmp_path):
    arguments, expected = CASES[case]
    done = tinker_atropos(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr
    assert not (tmp_path / "runs").exists()


def test_configuration_errors_come_before_heavy_imports(tmp_path):
    """In-process look at what was imported by the time the error is raised."""
    import subprocess

    program = (
        "import sys\nfrom tinker_atropos.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        "    print(sorted({'torch', 'tinker', 'transformers', 'datasets', 'math_verify'} & set(sys.modules)))\n"
    )
    for arguments in (CASES["unknown key"][0], CASES["no key and not local"][0], CASES["unknown model"][0]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout.strip().endswith("[]")


def test_an_output_folder_under_a_file(tinker_atropos, tmp_path):
    (tmp_path / "file").write_text("")
    done = tinker_atropos(*LOCAL, "--output", tmp_path / "file" / "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert "is a file" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_hub_names_the_ways_on(tinker_atropos, tmp_path):
    done = tinker_atropos(*RUN, "--local", cwd=tmp_path, HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for way in ("env.dataset=", "gsm_symbolic", "arithmetic"):
        assert way in done.stderr


def test_an_unreachable_model_names_the_ways_on(tinker_atropos, tmp_path):
    done = tinker_atropos(*LOCAL, "--model", "someone/some-model", cwd=tmp_path, HF_HOME=str(tmp_path / "hub"))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "someone/some-model" in done.stderr
    assert "smollm2-135m" in done.stderr


def test_a_corrupt_dataset_line_names_file_and_line(tinker_atropos, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+\n')
    done = tinker_atropos(*RUN, "--local", "--set", "env.dataset=data", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "train.jsonl" in done.stderr
    assert "2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_of_serve_tinker(tinker_atropos, tiny_model, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = tinker_atropos("serve", "tinker", "--port", port, "--model", tiny_model, "--store", "s", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trainer_that_cannot_learn_the_environment(tinker_atropos, tmp_path):
    plugin = tmp_path / "site"
    (plugin / "wobble-1.dist-info").mkdir(parents=True)
    (plugin / "wobble-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wobble\nVersion: 1\n")
    (plugin / "wobble-1.dist-info" / "entry_points.txt").write_text("[tinker_atropos.envs]\nwobble = wobble\n")
    (plugin / "wobble.py").write_text(
        "from tinker_atropos import EnvironmentSpec, hookimpl\n\n\n@hookimpl\ndef environment_spec():\n"
        "    return EnvironmentSpec('wobble', make=lambda config: None, kind='control')\n"
    )
    done = tinker_atropos("run", "--env", "wobble", "--trainer", "tinker", cwd=tmp_path, PYTHONPATH=str(plugin))
    assert done.returncode == 2, done.stderr
    assert "is of kind 'control'" in done.stderr
    assert "Installed trainers that could: torch_ppo" in done.stderr


def test_a_run_folder_of_another_configuration(tinker_atropos, tiny_model, tmp_path):
    from tinker_atropos.yaml_file import read_yaml, write_yaml

    arguments = (*LOCAL, "--model", tiny_model, "--name", "other")
    assert tinker_atropos(*arguments, "--dry-run", cwd=tmp_path).returncode == 0
    folder = tmp_path / "runs" / "other"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(write_yaml(_resolved(arguments, tmp_path)))
    assert read_yaml(folder / "config.yaml")["env"]["group_size"] == 16
    done = tinker_atropos(*arguments, "--resume", "--group-size", "8", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "env.group_size was 16, now 8" in done.stderr


def _resolved(arguments: tuple[object, ...], folder: Path) -> dict[str, object]:
    from tinker_atropos.config import load

    return load(
        None,
        [
            ("run.env", "gsm8k", "--env"),
            ("run.trainer", "tinker", "--trainer"),
            ("run.name", "other", "--name"),
            ("trainer.local", True, "--local"),
            ("env.dataset", "arithmetic", "--set"),
            ("openai.model_name", str(arguments[arguments.index("--model") + 1]), "--model"),
        ],
    ).as_dict()
