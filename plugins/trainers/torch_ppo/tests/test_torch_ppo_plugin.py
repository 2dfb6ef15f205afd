"""The plugin's description: light to import, honest about its settings, able to open a saved policy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tinker_atropos_torch_ppo as plugin
from pydantic import ValidationError
from tinker_atropos.errors import ConfigError
from tinker_atropos_torch_ppo.config import TorchPPOConfig


def test_describing_the_trainer_imports_no_torch():
    code = (
        "import sys, tinker_atropos_torch_ppo as p\n"
        "spec = p.trainer_spec(); spec.check(spec.config(), None); spec.quote(spec.config(), None)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_learns_control():
    spec = plugin.trainer_spec()
    assert (spec.name, spec.kinds) == ("torch_ppo", frozenset({"control"}))
    fields = spec.config.model_fields
    assert {"steps_per_update", "schedule", "total_env_steps"} <= set(fields)
    assert all(field.description for field in fields.values())


def test_a_model_name_is_refused():
    check = plugin.trainer_spec().check
    assert check is not None
    with pytest.raises(ConfigError, match=r"'gpt'.*hidden_sizes"):
        check(TorchPPOConfig(), "gpt")


def test_what_has_no_effect_is_said():
    unused = plugin.trainer_spec().unused
    assert unused is not None
    assert set(unused(TorchPPOConfig())) == {"correction"}
    assert unused(TorchPPOConfig(schedule="async")) == {}


def test_a_resolved_file_has_nothing_to_say_of_what_has_no_effect():
    from tinker_atropos.config import load

    pytest.importorskip("gymnasium")
    asked = [("run.env", "gymnasium", "--env"), ("run.trainer", "torch_ppo", "--trainer")]
    first = load(None, asked)
    assert load(None, [], base=first.as_dict()).unused == {}
    with pytest.raises(ConfigError, match=r"has no effect here: schedule=sync"):
        load(None, [*asked, ("torch_ppo.correction", "vtrace", "--set torch_ppo.correction")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"gamma": 1.5}, {"learning_rate": 0}, {"learning_rate": float("nan")}, {"minibatches": 0}, {"device": "tpu"},
        {"hidden_sizes": (64, 0)}, {"activation": "gelu"}, {"schedule": "later"}, {"no_such_key": 1},
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError):
        TorchPPOConfig(**wrong)


async def test_a_saved_policy_opens_without_its_trainer(run_spec, discrete_spaces):
    from tinker_atropos.trajectory import PolicyRef

    spec = plugin.trainer_spec()
    config = TorchPPOConfig(device="cpu")
    trainer: Any = spec.make(config)
    try:
        now = await trainer.start(run_spec(), discrete_spaces, None)
        kept = await trainer.save("start")
    finally:
        await trainer.close()
    policy: Any = await spec.open_policy(PolicyRef("run", 0, 0, kept.weights), config)
    observations = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    np.testing.assert_array_equal(policy.act(observations, None).actions, now.policy.act(observations, None).actions)
