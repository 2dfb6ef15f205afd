"""The original's trainer and launcher: the run that they begin, and the exit codes that they end with."""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.config import TinkerAtroposConfig
from tinker_atropos.errors import ConfigError
from tinker_atropos.trainer import TinkerAtroposTrainer
from tinker_atropos_atropos import launch
from tinker_atropos_atropos.compat_trainer import ignored, resolve, sections

ROOT = Path(__file__).parents[4]


def test_the_trainer_has_the_originals_attributes() -> None:
    config = TinkerAtroposConfig(base_model="m", lora_rank=4, num_steps=3)
    trainer = TinkerAtroposTrainer(config=config)
    assert (trainer.base_model, trainer.lora_rank, trainer.num_steps) == ("m", 4, 3)
    assert (trainer.config, trainer.atropos_api_url) == (config, "http://localhost:8000")


def test_the_run_is_the_one_that_the_file_asks_for() -> None:
    given = TinkerAtroposConfig(
        base_model="m",
        lora_rank=4,
        group_size=4,
        batch_size=8,
        num_steps=3,
        save_checkpoint_interval=2,
        openai={"model_name": "m", "base_url": "http://localhost:8123/v1"},
        atropos_api_url="http://localhost:8777",
        wandb_project="p",
    )
    config = resolve(given, [("trainer.local", True, "--local")])
    assert (config.environment_spec.name, config.environment_spec.kind) == ("atropos", "external")
    assert (config.environment.api_url, config.environment.endpoint_port) == ("http://localhost:8777", 8123)
    assert (config.environment.wandb_project, config.model) == ("p", "m")
    assert (config.env.group_size, config.env.batch_size, config.env.total_steps) == (4, 8, 3)
    assert (config.trainer.lora_rank, config.trainer.learning_rate, config.trainer.local) == (4, 4e-5, True)
    assert (config.trainer.save_checkpoint_interval, config.trainer.max_token_trainer_length) == (2, 2048)
    assert (config.env.max_token_length, config.max_staleness) == (2048, 3)


def test_sections_of_this_project_may_stand_beside() -> None:
    config = TinkerAtroposConfig(**{"run": {"name": "mine"}, "rollout": {"max_staleness": 0}})
    assert (resolve(config).name, resolve(config).max_staleness) == ("mine", 0)


def test_every_flag_changes_the_run_or_is_said_to_have_no_effect() -> None:
    flags = "--base-model M --lora-rank 64 --learning-rate 1e-3 --num-steps 9 --batch-size 8 --group-size 2"
    flags += " --wandb-project P --wandb-group G --no-wandb --local --name N --output O --set rollout.max_staleness=1"
    args = launch.parse_args(flags.split())
    given = launch.load_config(args)
    config = resolve(given, launch.own_overrides(args))
    assert (config.model, config.trainer.lora_rank, config.trainer.learning_rate) == ("M", 64, 1e-3)
    assert (config.env.total_steps, config.env.batch_size, config.env.group_size) == (9, 8, 2)
    assert (config.environment.wandb_project, config.environment.wandb_group) == ("P", "G")
    assert (config.trainer.local, config.name, config.run.output, config.max_staleness) == (True, "N", Path("O"), 1)
    assert list(ignored(given)) == ["env.use_wandb"]


def test_what_the_original_reads_elsewhere_has_a_home_or_is_said_to_be_ignored() -> None:
    given = TinkerAtroposConfig(
        tinker={"checkpoint_dir": "kept", "tool_call_parser": "llama3_json"}, slurm=True, testing=True
    )
    config = resolve(given)
    assert (config.environment.checkpoint_dir, config.adapter.tool_parser) == (Path("kept"), "llama3_json")
    assert list(ignored(given)) == ["slurm", "testing"]
    unset = resolve(TinkerAtroposConfig())
    assert (unset.environment.checkpoint_dir, unset.adapter.tool_parser) == (None, "auto")
    assert ignored(TinkerAtroposConfig()) == {}
    with pytest.raises(ConfigError, match=r"managed_server\.tool_parser"):
        resolve(TinkerAtroposConfig(tinker={"tool_call_parser": "pythonic"}))


async def test_what_is_ignored_is_said_when_the_run_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def finishes(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr("tinker_atropos.run.run", finishes)
    await TinkerAtroposTrainer(TinkerAtroposConfig(slurm=True)).run([("trainer.local", True, "--local")])
    said = capsys.readouterr()
    assert "note: slurm has no effect: everything runs on this machine" in said.out + said.err


def test_trained_groups_leave_the_api_before_the_end_by_default() -> None:
    assert resolve(TinkerAtroposConfig()).trainer.save_checkpoint_interval == 10


@pytest.mark.parametrize("url", ["http://inference.example:8001/v1", "http://localhost:0x1/v1"])
def test_inference_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="on loopback"):
        sections(TinkerAtroposConfig(openai={"model_name": "m", "base_url": url}))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost/v1", "names no port"),
        ("http://localhost:0/v1", "names no port"),
        ("https://localhost:8001/v1", "without TLS"),
    ],
)
def test_inference_is_served_where_clients_ask_or_not_at_all(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        sections(TinkerAtroposConfig(openai={"model_name": "m", "base_url": url}))
    assert "http://localhost:8001/v1" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config", "none.yaml"], "none.yaml"),
        (["--num-steps", "0"], "total_steps"),
        (["--batch-size", "10", "--group-size", "4"], "multiple of env.group_size"),
        (["--set", "tinker.lora_rnk=3"], "lora_rnk"),
    ],
)
def test_what_was_typed_wrong_is_said_and_ends_with_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*flags, "--local"]) == 2
    assert said in capsys.readouterr().err


def test_a_token_in_an_address_is_refused_and_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "env: {rollout_server_url: 'https://:s3cret@api.example:8000'}\n"
        "openai: {model_name: m, base_url: 'http://u:s3cret@localhost:8001/v1'}\n"
    )
    assert launch.main(["--config", str(file), "--local", "--output", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert "TINKER_ATROPOS_API_TOKEN" in said.err
    assert "https://…@api.example:8000" in said.err
    assert "s3cret" not in said.out + said.err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_ends_with_1_and_claims_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the step was lost")

    monkeypatch.setattr("tinker_atropos.run.run", fails)
    assert launch.main(["--local"]) == 1
    said = capsys.readouterr()
    assert "the step was lost" in said.err
    assert "complete" not in said.out + said.err


def test_the_file_at_the_root_is_the_adapters_launcher() -> None:
    module = runpy.run_path(str(ROOT / "launch_training.py"), run_name="launch_training")
    assert module["main"] is launch.main
    assert module["load_config"] is launch.load_config
    lines = (ROOT / "launch_training.py").read_text().splitlines()
    assert len(lines) <= 12


@pytest.mark.parametrize(
    ("module", "name"),
    [("config", "TinkerAtroposConfig"), ("config", "TinkerConfig"), ("trainer", "TinkerAtroposTrainer")],
)
def test_without_the_adapter_the_import_says_what_to_install(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos.compat.entry_points", lambda group: [])
    with pytest.raises(ImportError, match="pip install tinker-atropos-atropos"):
        getattr(importlib.import_module(f"tinker_atropos.{module}"), name)


def test_other_names_are_no_names_of_these_modules() -> None:
    assert not hasattr(importlib.import_module("tinker_atropos.config"), "Nothing")
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from tinker_atropos.trainer import Nothing")


def test_importing_the_modules_loads_no_adapter() -> None:
    code = "import sys, tinker_atropos.config, tinker_atropos.trainer; print('tinker_atropos_atropos' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
