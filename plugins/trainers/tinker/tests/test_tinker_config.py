from __future__ import annotations

from typing import Any

import pytest
from tinker_atropos.config import validate
from tinker_atropos.errors import ConfigError
from tinker_atropos_tinker.config import TinkerConfig


def config(**values: Any) -> TinkerConfig:
    return validate(TinkerConfig, values, path="tinker")


def test_every_field_has_a_description() -> None:
    assert [name for name, field in TinkerConfig.model_fields.items() if not field.description] == []


def test_all_keys_of_the_original_are_accepted() -> None:
    made = config(
        lora_rank=16,
        learning_rate=4e-5,
        max_token_trainer_length=2048,
        checkpoint_dir="x",
        save_checkpoint_interval=3,
        wandb_project="p",
        wandb_group="g",
        wandb_run_name="n",
        wandb_run_suffix="s",
        tool_call_parser="hermes",
    )
    assert made.lora_rank == 16


def test_a_learning_rate_of_zero_is_allowed() -> None:
    assert config(learning_rate=0).learning_rate == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_rank", 0),
        ("learning_rate", -1e-5),
        ("beta1", 1.0),
        ("eps", 0.0),
        ("grad_clip_norm", -1.0),
        ("checkpoint_ttl_seconds", 60),
        ("logprob_mismatch_warning", 0.0),
        ("max_token_trainer_length", 1),
        ("advantage", "gae"),
        ("local_threads", 0),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_path(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"tinker.{key}"):
        config(**{"local": True, key: value})


@pytest.mark.parametrize("loss", ["ppo", "cispo", "dro", "typo"])
def test_a_loss_that_is_not_implemented_is_refused_with_those_that_are(loss: str) -> None:
    with pytest.raises(ConfigError, match=rf"{loss}.*importance_sampling"):
        config(loss=loss)


def test_a_key_would_not_travel_in_clear() -> None:
    assert config(base_url="http://127.0.0.1:8000/").base_url == "http://127.0.0.1:8000"
    with pytest.raises(ConfigError, match="https://"):
        config(base_url="http://example.org")
    with pytest.raises(ConfigError, match="no address"):
        config(base_url="example.org")


def test_local_and_a_base_url_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="drop one"):
        config(local=True, base_url="https://example.org")
    with pytest.raises(ConfigError, match="local_threads"):
        config(local_threads=2)
