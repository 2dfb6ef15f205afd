from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_atropos.advantages import ESTIMATORS, Estimator, group_advantages, token_advantages
from tinker_atropos.errors import ConfigError, DataError
from tinker_atropos.trajectory import Group, Segment, TaskRef, Trajectory

rewards_lists = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12)


def segment(mask: list[bool], advantages: list[float] | None = None) -> Segment:
    return Segment(
        tokens=np.arange(len(mask), dtype=np.int32),
        logprobs=np.zeros(len(mask), dtype=np.float32),
        mask=np.array(mask),
        advantages=None if advantages is None else np.array(advantages, dtype=np.float32),
    )


def trajectory(reward: float, *segments: Segment) -> Trajectory:
    return Trajectory(segments=segments, rewards=(reward,), finish_reasons=("stop",), policies=(), messages=())


def group(*trajectories: Trajectory) -> Group:
    return Group(id="g", task=TaskRef("train", 0, 0), trajectories=trajectories)


def test_grpo_subtracts_the_mean() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], "grpo"), [0.75, -0.25, -0.25, -0.25])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 0.5], "rloo"), [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3], rtol=1e-6
    )


def test_normalized_divides_by_the_population_deviation() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 1, 0], "normalized"), [1, -1, 1, -1], rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_and_a_group_of_one_give_exact_zeros(estimator: Estimator) -> None:
    assert (group_advantages([0.1] * 3, estimator) == 0).all()
    assert group_advantages([7.0], estimator).tolist() == [0.0]
    assert group_advantages([], estimator).shape == (0,)


@given(rewards_lists, st.sampled_from(ESTIMATORS))
def test_advantages_sum_to_nothing_and_keep_the_order_of_rewards(rewards: list[float], estimator: Estimator) -> None:
    advantages = group_advantages(rewards, estimator)
    assert advantages.dtype == np.float32
    assert advantages.shape == (len(rewards),)
    assert abs(float(advantages.sum())) <= 1e-5 * max(1.0, float(np.abs(advantages).max())) * len(rewards)
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(DataError, match="finite"):
        group_advantages([1.0, bad])


def test_an_unknown_estimator_is_refused_with_the_near_name() -> None:
    with pytest.raises(ConfigError, match="'rloo'"):
        group_advantages([1.0], "rlo")  # type: ignore[arg-type]


def test_masked_tokens_have_no_advantage() -> None:
    found = token_advantages(
        group(trajectory(1, segment([False, True, False, True])), trajectory(0, segment([False, True])))
    )
    assert found[0][0].tolist() == [0, 0.5, 0, 0.5]
    assert found[1][0].tolist() == [0, -0.5]
    assert found[0][0].dtype == np.float32


def test_advantages_of_the_environment_go_before_those_of_the_group() -> None:
    own = segment([False, True, True], [9, 2, -3])
    found = token_advantages(group(trajectory(1, own, segment([False, True])), trajectory(0, segment([False, True]))))
    assert found[0][0].tolist() == [0, 2, -3]
    assert found[0][1].tolist() == [0, 0.5]


def test_a_token_advantage_that_is_not_finite_is_refused_only_where_it_counts() -> None:
    nan = float("nan")
    assert token_advantages(group(trajectory(1, segment([False, True], [nan, 1]))))[0][0].tolist() == [0, 1]
    with pytest.raises(DataError, match="not finite"):
        token_advantages(group(trajectory(1, segment([False, True], [0, nan]))))
