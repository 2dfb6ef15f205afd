"""What is typed wrong ends with code 2 and a line that names the way on; nothing is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

WALKER = """
from tinker_atropos import EnvironmentSpec

env = EnvironmentSpec("walker", make=print, kind="control")
driver = EnvironmentSpec("driver", make=print, kind="external")
"""

URL = "http://127.0.0.1:9/v1#m"
FOUR = ("endpoint", "tinker://", "run", "model on this machine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ("Missing argument 'ENV'",)),
        (("gsm8k",), ("-m",)),
        (("gsm9k", "-m", URL), ("Did you mean 'gsm8k'?",)),
        (("./nowhere.py:env", "-m", URL), ("does not exist",)),
        (("count_env.py:enw", "-m", URL), ("Did you mean 'env'?",)),
        (("walker.py:env", "-m", URL), ("kind 'control'", "evaluations/")),
        (("walker.py:driver", "-m", URL), ("drives itself",)),
        (("count_env.py", "-m", "no such thing"), FOUR),
        (("count_env.py", "-m", ""), FOUR),
        (("count_env.py", "-m", "wat://x"), ("no installed trainer opens wat://", *FOUR)),
        (("count_env.py", "-m", "runs/nothing"), ("there is no run 'nothing'",)),
        (("count_env.py", "-m", "nothing@step-000010"), ("there is no run 'nothing'",)),
        (("count_env.py", "-m", "smolm2-135m"), ("smollm2-135m",)),
        (("count_env.py", "-m", "."), FOUR),
        (("count_env.py", "-m", "http://u:p@127.0.0.1/v1"), ("would be stored",)),
        (("count_env.py", "-m", "http://127.0.0.1/v1?key=x"), ("would be stored",)),
        (("count_env.py", "-m", "http://127.0.0.1:99999/v1"), ("out of range",)),
        (("count_env.py", "-m", "http:///v1"), ("names no host",)),
        (("count_env.py", "-m", "smollm2-135m", "--model-name", "x"), ("--model-name",)),
        (("count_env.py", "-m", "smollm2-135m", "--body", "x=1"), ("--body",)),
        (("count_env.py", "-m", URL, "--body", "seed=1"), ("--body",)),
        (("count_env.py", "-m", URL, "--deterministic"), ("--deterministic",)),
        (("count_env.py", "-m", URL, "--set", "managed_server.enable_thinking=true"), ("no effect on an endpoint",)),
        (("count_env.py", "-m", URL, "--set", "env.group_size=2"), ("env.group_size has no effect",)),
        (("count_env.py", "-m", URL, "--set", "rollout.temperature=1"), ("say --temperature",)),
        (("count_env.py", "-m", URL, "--set", "env.promt_format=chat"), ("Did you mean 'prompt_format'?",)),
        (("count_env.py", "-m", URL, "--set", "tinker.lora_rank=4"), ("tinker",)),
        (("count_env.py", "-m", URL, "--split", "train"), ("no tasks in split 'train'", "'test'")),
        (("count_env.py", "-m", URL, "-n", "0"), ("-n",)),
        (("count_env.py", "-m", URL, "--temperature", "-1"), ("eval_temperature",)),
        (("count_env.py", "-m", URL, "--pass-threshold", "nan"), ("finite",)),
        (("count_env.py", "-m", URL, "--name", "a/b"), ("can't name a folder",)),
        (("count_env.py", "-m", URL, "--resume", "--name", "x"), ("there is no evaluation 'x'",)),
        (("count_env.py", "-m", URL, "--output", "walker.py"), ("is a file",)),
        (("count_env.py", "-m", "tinker://run/sampler_weights/final"), ("TINKER_API_KEY",)),
        (("compare", "a"), ("Missing argument 'B'",)),
    ],
)
def test_wrong_words(run_eval, environment_file: Path, arguments, said) -> None:
    (environment_file.parent / "walker.py").write_text(WALKER)
    code, out, err = run_eval(*arguments)
    assert (code, out) == (2, ""), err
    assert all(words in err for words in said), err
    assert "Traceback" not in err
    assert not (environment_file.parent / "evals").exists()


def test_a_dry_run_goes_on_without_a_key(run_eval, environment_file: Path) -> None:
    code, out, err = run_eval(environment_file, "-m", "tinker://run/sampler_weights/final", "--dry-run")
    assert (code, "TINKER_API_KEY" in err, "nothing was asked" in out) == (0, True, True)


def write_run(folder: Path, trainer: str = "tinker") -> Path:
    from tinker_atropos.run_folder import Manifest, RunFolder
    from tinker_atropos.trainer import Checkpoint
    from tinker_atropos.yaml_file import write_yaml

    (folder / "manifests").mkdir(parents=True)
    content = {"run": {"trainer": trainer}, "openai": {"model_name": "smollm2-135m"}, "tinker": {"local": True}}
    (folder / "config.yaml").write_text(write_yaml(content))
    for step, name in ((5, "step-000005"), (7, "final")):
        uri = f"tinker://x/sampler_weights/{name}"
        RunFolder(folder).write_manifest(
            Manifest("r", 0, step, Checkpoint(name, step, uri, uri), (), {"next": 0, "open": []})
        )
    return folder


@pytest.mark.parametrize(
    ("model", "uri", "label"),
    [
        ("mine", "tinker://x/sampler_weights/final", "mine@final"),
        ("runs/mine", "tinker://x/sampler_weights/final", "mine@final"),
        ("mine@step-000005", "tinker://x/sampler_weights/step-000005", "mine@step-000005"),
        ("mine@7", "tinker://x/sampler_weights/final", "mine@final"),
        ("run:mine@final", "tinker://x/sampler_weights/final", "mine@final"),
        ("mine@base", None, "mine@base"),
    ],
)
def test_a_run_is_named_in_several_ways(run_eval, environment_file: Path, model, uri, label) -> None:
    write_run(environment_file.parent / "runs" / "mine")
    code, out, err = run_eval(environment_file, "-m", model, "--dry-run", "--format", "json")
    assert code == 0, err
    settings = json.loads(out)["settings"]["model"]
    assert (settings["kind"], settings["uri"], settings["name"]) == ("run", uri, label)


def test_what_a_run_lacks_is_said(run_eval, environment_file: Path) -> None:
    folder = write_run(environment_file.parent / "runs" / "mine")
    code, _, err = run_eval(environment_file, "-m", "mine@step-000099")
    assert (code, "it has step-000005, final, and base" in err) == (2, True), err
    code, _, err = run_eval(environment_file, "-m", "mien")
    assert (code, "Did you mean 'mine'?" in err) == (2, True), err
    for path in (folder / "manifests").iterdir():
        path.unlink()
    code, _, err = run_eval(environment_file, "-m", "mine")
    assert (code, "has no checkpoint yet" in err) == (2, True), err


def test_a_name_of_two_things_must_be_said_outright(run_eval, environment_file: Path) -> None:
    write_run(environment_file.parent / "runs" / "smollm2-135m")
    code, _, err = run_eval(environment_file, "-m", "smollm2-135m", "--dry-run")
    assert (code, "run:smollm2-135m or model:smollm2-135m" in err) == (2, True), err
    for prefix, kind in (("run:", "run"), ("model:", "model")):
        _, out, _ = run_eval(environment_file, "-m", f"{prefix}smollm2-135m", "--dry-run", "--format", "json")
        assert json.loads(out)["settings"]["model"]["kind"] == kind


def test_a_run_of_control_says_where_its_evaluations_are(run_eval, environment_file: Path) -> None:
    write_run(environment_file.parent / "runs" / "walk", trainer="torch_ppo")
    code, _, err = run_eval(environment_file, "-m", "walk")
    assert (code, "metrics.jsonl" in err) == (2, True), err
