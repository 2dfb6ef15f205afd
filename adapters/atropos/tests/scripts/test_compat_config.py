"""The original's configuration: its names, files and defaults; nothing that is written is dropped without a word."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tinker_atropos.config import TinkerAtroposConfig
from tinker_atropos.errors import ConfigError
from tinker_atropos_atropos.compat_config import FLAT
from tinker_atropos_atropos.launch import load_config, parse_args

FILE = """
env:
  group_size: 4
  batch_size: 32
  tokenizer_name: "Qwen/Qwen3-8B"
  use_wandb: false
  max_token_length: 300
  total_steps: 7
  difficulty: hard
openai:
  - model_name: "Qwen/Qwen3-8B"
    base_url: "http://localhost:8001/v1"
    timeout: 60
tinker:
  lora_rank: 8
  learning_rate: 4e-5
  wandb_group: null
slurm: false
testing: false
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


def test_the_defaults_are_the_originals() -> None:
    config = TinkerAtroposConfig()
    assert config.base_model == config.openai[0].model_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.group_size, config.batch_size, config.num_steps, config.lora_rank) == (16, 128, 50, 32)
    assert (config.learning_rate, config.max_token_trainer_length, config.max_token_env_length) == (4e-5, 2048, 256)
    assert (config.atropos_api_url, config.inference_api_url) == ("http://localhost:8000", "http://localhost:8001")
    assert len(config.wandb_run_suffix) == 4


def test_a_file_is_read_and_its_flat_names_follow(file: Path) -> None:
    config = TinkerAtroposConfig.from_yaml(file)
    assert (config.base_model, config.group_size, config.num_steps) == ("Qwen/Qwen3-8B", 4, 7)
    assert (config.lora_rank, config.learning_rate, config.use_wandb) == (8, 4e-5, False)
    assert config.openai[0].server_type == "sglang"


def test_an_environments_own_keys_are_kept(file: Path) -> None:
    content = TinkerAtroposConfig.from_yaml(file).to_dict()
    assert content["env"]["difficulty"] == "hard"
    assert content["openai"][0]["timeout"] == 60


def test_to_dict_makes_the_same_configuration_again(file: Path) -> None:
    config = TinkerAtroposConfig.from_yaml(file)
    assert TinkerAtroposConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("url", "stripped"),
    [
        ("http://localhost:8001/v1", "http://localhost:8001"),
        ("http://localhost:8001/v1/", "http://localhost:8001"),
        ("http://localhost:8011", "http://localhost:8011"),
        ("http://localhost:8100/custom", "http://localhost:8100/custom"),
    ],
)
def test_only_a_whole_v1_is_taken_off_an_address(url: str, stripped: str) -> None:
    assert TinkerAtroposConfig(openai={"model_name": "m", "base_url": url}).inference_api_url == stripped


def test_every_flat_name_can_be_given_set_and_read() -> None:
    for name in FLAT:
        value = getattr(TinkerAtroposConfig(), name)
        other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v * 2, str: lambda v: v + "x"}
        changed = other.get(type(value), lambda v: "x")(value)
        assert getattr(TinkerAtroposConfig(**{name: changed}), name) == changed
        config = TinkerAtroposConfig()
        setattr(config, name, changed)
        section, key = FLAT[name]
        assert getattr(config, name) == getattr(getattr(config, section), key) == changed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_rnk": 8}, "Did you mean 'lora_rank'"),
        ({"tinker": {"lora_rnk": 8}}, "lora_rnk"),
        ({"lora_rank": 8, "tinker": {"lora_rank": 4}}, "given twice"),
        ({"num_steps": 0}, "greater than or equal to 1"),
    ],
)
def test_what_nothing_reads_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TinkerAtroposConfig(**given)


def test_a_wrong_file_is_named_with_its_key(file: Path) -> None:
    file.write_text("tinker:\n  lora_rnk: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: tinker\.lora_rnk: unknown key\. Did you mean 'lora_rank'"):
        TinkerAtroposConfig.from_yaml(file)


def test_a_file_that_is_not_there_is_an_error_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TinkerAtroposConfig.from_yaml(tmp_path / "none.yaml")


def test_a_script_that_was_started_by_a_run_reads_what_was_written_for_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_ATROPOS_SCRIPT_CONFIG", str(file))
    assert TinkerAtroposConfig.from_yaml("configs/default.yaml").group_size == 4
    assert "does not exist" in capsys.readouterr().err
    own = tmp_path / "own.yaml"
    own.write_text("env: {group_size: 2}\n")
    assert TinkerAtroposConfig.from_yaml(own).group_size == 2


def test_every_flag_takes_effect(file: Path) -> None:
    flags = "--base-model M --lora-rank 64 --learning-rate 1e-3 --num-steps 9 --batch-size 8 --group-size 2"
    flags += " --wandb-project P --wandb-group G --no-wandb"
    config = load_config(parse_args(["--config", str(file), *flags.split()]))
    assert (config.base_model, config.env.tokenizer_name) == ("M", "M")
    assert (config.lora_rank, config.tinker.lora_rank, config.learning_rate) == (64, 64, 1e-3)
    assert (config.num_steps, config.batch_size, config.group_size) == (9, 8, 2)
    assert (config.wandb_project, config.wandb_group, config.use_wandb) == ("P", "G", False)


def test_the_originals_own_way_to_call_load_config() -> None:
    args = argparse.Namespace(config=None, lora_rank=4, no_wandb=False)
    assert load_config(args).lora_rank == 4
