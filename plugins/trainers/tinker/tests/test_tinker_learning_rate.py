from __future__ import annotations

import pytest
from tinker_atropos.errors import ConfigError
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.learning_rate import learning_rate


def test_what_the_user_sets_goes_first() -> None:
    assert learning_rate(TinkerConfig(learning_rate=0.0), "Qwen/Qwen3-8B") == 0.0
    assert learning_rate(TinkerConfig(local=True, learning_rate=1e-3), "smollm2-135m") == 1e-3


def test_the_reference_model_keeps_its_published_rate() -> None:
    assert learning_rate(TinkerConfig(), "Qwen/Qwen3.5-9B") == pytest.approx(8e-5)


def test_a_smaller_model_of_a_family_learns_faster() -> None:
    qwen = [learning_rate(TinkerConfig(), name) for name in ("Qwen/Qwen3-32B", "Qwen/Qwen3-4B-Instruct-2507")]
    assert qwen[0] < 8e-5 < qwen[1] < 1e-4
    assert learning_rate(TinkerConfig(), "meta-llama/Llama-3.2-1B") == pytest.approx(8e-5 * 2**0.781)


def test_a_variant_behind_a_colon_is_the_same_model() -> None:
    assert learning_rate(TinkerConfig(), "Qwen/Qwen3-8B:long") == learning_rate(TinkerConfig(), "Qwen/Qwen3-8B")


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--learning-rate"):
        learning_rate(TinkerConfig(), "Qwen/Qwen9-1T")
