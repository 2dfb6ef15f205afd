"""Acting in NumPy: the learner's own distribution, reproducible draws, and snapshots that survive a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker_atropos.control import ControlSpaces
from tinker_atropos.errors import CheckpointError
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.inference import NumpyPolicy, open_snapshot
from tinker_atropos_torch_ppo.ppo import Learner
from tinker_atropos_torch_ppo.spaces import read_spaces


def learner(spaces: ControlSpaces, **settings) -> Learner:
    made = Learner(read_spaces(spaces), TorchPPOConfig(**settings), 5, torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.model.parameters():  # away from the careful first weights
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=made.generator))
    made.observations.merge(np.random.default_rng(0).normal(3, 2, (100, 5)))
    return made


@pytest.fixture(params=["continuous_spaces", "discrete_spaces"])
def spaces(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_policy_reports_the_log_probabilities_that_the_learner_computes(spaces, activation, any_ref):
    mine = learner(spaces, activation=activation, hidden_sizes=(16, 8))
    observations = np.random.default_rng(1).normal(3, 20, (50, 5)).astype(np.float32)  # some beyond the clip
    acted = NumpyPolicy(any_ref, mine.snapshot()).act(observations, np.random.default_rng(2))
    with torch.no_grad():
        normal = mine._normalize(observations)
        assert normal.abs().max() == 10
        logprobs, _ = mine.model.evaluate(normal, torch.from_numpy(acted.actions))
    np.testing.assert_allclose(acted.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    assert acted.logprobs.dtype == np.float32
    assert acted.actions.dtype == (np.int64 if acted.actions.ndim == 1 else np.float32)


def test_draws_repeat_with_the_generator_and_the_mode_needs_none(spaces, any_ref):
    policy = NumpyPolicy(any_ref, learner(spaces).snapshot())
    observations = np.ones((8, 5), np.float32)
    first, again = (policy.act(observations, np.random.default_rng(9)) for _ in range(2))
    np.testing.assert_array_equal(first.actions, again.actions)
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    mode = policy.act(observations, None)
    assert (mode.actions == mode.actions[0]).all()
    assert (mode.logprobs >= first.logprobs).all()


def test_draws_have_the_distribution_of_the_policy(spaces, any_ref):
    policy = NumpyPolicy(any_ref, learner(spaces).snapshot())
    observations = np.tile(np.full(5, 2.0, np.float32), (20_000, 1))
    acted = policy.act(observations, np.random.default_rng(0))
    if acted.actions.ndim == 1:
        for choice in np.unique(acted.actions):
            chance = np.exp(acted.logprobs[acted.actions == choice][0])
            assert (acted.actions == choice).mean() == pytest.approx(chance, abs=0.02)
    else:
        assert policy.snapshot.log_std is not None
        std = np.exp(policy.snapshot.log_std)
        np.testing.assert_allclose(acted.actions.std(0), std, rtol=0.03)
        mode = policy.act(observations[:1], None).actions[0]
        np.testing.assert_allclose((acted.actions.mean(0) - mode) / std, 0, atol=0.03)


def test_a_policy_serves_any_number_of_simulations_and_keeps_what_it_gave(spaces, any_ref):
    policy = NumpyPolicy(any_ref, learner(spaces).snapshot())
    observations = np.random.default_rng(3).normal(size=(6, 5)).astype(np.float32)
    whole = policy.act(observations, None).actions
    kept = whole.copy()
    halves = [policy.act(part, None).actions for part in (observations[:2], observations[2:])]
    np.testing.assert_allclose(np.concatenate(halves), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(whole, kept)


def test_observations_of_a_wrong_shape_are_refused(spaces, any_ref):
    with pytest.raises(ValueError, match=r"shape \(3, 4\).*\(5,\)"):
        NumpyPolicy(any_ref, learner(spaces).snapshot()).act(np.ones((3, 4), np.float32), None)


def test_training_never_changes_a_snapshot(spaces, any_ref):
    mine = learner(spaces)
    snapshot = mine.snapshot()
    before = snapshot.to_bytes()
    with torch.no_grad():
        for parameter in mine.model.parameters():
            parameter.add_(1.0)
    mine.observations.merge(np.ones((10, 5)))
    assert snapshot.to_bytes() == before


def test_a_snapshot_survives_a_file(spaces, any_ref, tmp_path):
    mine = NumpyPolicy(any_ref, learner(spaces).snapshot())
    path = tmp_path / "a b" / "policy.npz"
    path.parent.mkdir()
    path.write_bytes(mine.snapshot.to_bytes())
    read = NumpyPolicy(any_ref, open_snapshot(path.as_uri()))
    observations = np.random.default_rng(4).normal(size=(6, 5)).astype(np.float32)
    np.testing.assert_array_equal(read.act(observations, None).actions, mine.act(observations, None).actions)
    assert read.snapshot.shape == mine.snapshot.shape


def test_a_missing_damaged_or_distant_snapshot_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="can't be read"):
        open_snapshot((tmp_path / "none.npz").as_uri())
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    with pytest.raises(CheckpointError, match="damaged"):
        open_snapshot((tmp_path / "bad.npz").as_uri())
    with pytest.raises(CheckpointError, match="not kept on this machine"):
        open_snapshot("memory://run/0/3")
