"""The learning rate where the user sets none: by the model's family and hidden size."""

from __future__ import annotations

from tinker_atropos.errors import ConfigError

from tinker_atropos_tinker.config import TinkerConfig

LOCAL = 5e-4
"""What SmolLM2-135M learns few-shot sums with (GRPO, rank 16, batches of 64)."""

REFERENCE = 8e-5
REFERENCE_HIDDEN = 4096
"""tinker-cookbook's GSM8K recipe (`recipes/math_rl`, README): Qwen3.5-9B, hidden size 4096, learning rate 8e-5."""

_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}
"""How the best LoRA rate falls with the hidden size, as tinker-cookbook calibrated it (`hyperparam_utils.get_lr`)."""

_HIDDEN_SIZES = {
    "Qwen/Qwen3-4B-Instruct-2507": 2560,
    "Qwen/Qwen3-8B": 4096,
    "Qwen/Qwen3-8B-Base": 4096,
    "Qwen/Qwen3-30B-A3B": 2048,
    "Qwen/Qwen3-30B-A3B-Base": 2048,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 2048,
    "Qwen/Qwen3-32B": 5120,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 4096,
    "Qwen/Qwen3.5-4B": 2560,
    "Qwen/Qwen3.5-9B": 4096,
    "Qwen/Qwen3.5-9B-Base": 4096,
    "Qwen/Qwen3.5-27B": 5120,
    "Qwen/Qwen3.5-35B-A3B": 2048,
    "Qwen/Qwen3.5-35B-A3B-Base": 2048,
    "Qwen/Qwen3.6-27B": 5120,
    "Qwen/Qwen3.6-35B-A3B": 2048,
    "meta-llama/Llama-3.2-1B": 2048,
    "meta-llama/Llama-3.2-3B": 3072,
    "meta-llama/Llama-3.1-8B": 4096,
    "meta-llama/Llama-3.1-8B-Instruct": 4096,
    "meta-llama/Llama-3.1-70B": 8192,
    "meta-llama/Llama-3.3-70B-Instruct": 8192,
}


def learning_rate(config: TinkerConfig, model: str) -> float:
    """Return the configured rate, else the default of the model.

    Hosted: `8e-5 * (4096 / hidden)^e`, with `e` 0.0775 for Qwen and 0.781 for Llama: the rate of a published GSM8K run,
    carried over to another size as tinker-cookbook carries rates over. (Its own `get_lr` starts from `5e-4 * (2000 /
    hidden)^e`, tuned for supervised training; its reinforcement learning recipes use 1e-5 to 1e-4.) Local: 5e-4. Raises
    `ConfigError` for a hosted model of which the family or the size is not known.
    """
    if config.learning_rate is not None:
        return config.learning_rate
    if config.local:
        return LOCAL
    hidden = _HIDDEN_SIZES.get(model.split(":")[0])
    exponent = next((value for family, value in _EXPONENTS.items() if family in model.lower()), None)
    if hidden is None or exponent is None:
        raise ConfigError(
            f"tinker.learning_rate: there is no default for the model {model!r}; set one (--learning-rate 4e-5 is a "
            "cautious start for LoRA)"
        )
    return float(REFERENCE * (REFERENCE_HIDDEN / hidden) ** exponent)
