from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos.errors import TrainerError
from tinker_atropos.trajectory import Batch, Group, PolicyRef, Segment, TaskRef, Trajectory
from tinker_atropos_tinker.datums import (
    NO_TRAINED_TOKEN,
    TOO_LONG,
    policy_datum,
    reason_left_out,
    to_tinker,
    training_data,
)


def segment(tokens: list[int], mask: list[bool], advantages: list[float] | None = None) -> Segment:
    marked = np.array(mask)
    return Segment(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.where(marked, np.float32(-0.5), np.float32(0)),
        mask=marked,
        advantages=None if advantages is None else np.array(advantages, dtype=np.float32),
    )


def trajectory(reward: float, *segments: Segment, step: int = 0) -> Trajectory:
    ref = PolicyRef("run", 0, step, "tinker://x")
    return Trajectory(segments=segments, rewards=(reward,), finish_reasons=("stop",), policies=(ref,), messages=())


def batch(*trajectories: Trajectory, step: int = 0) -> Batch:
    return Batch(step, (Group("g", TaskRef("train", 0, 0), trajectories),))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    length = draw(st.integers(2, 30))
    tokens = draw(st.lists(st.integers(0, 50_000), min_size=length, max_size=length))
    mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
    return segment(tokens, mask)


@given(st.lists(segments(), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=4, max_size=4))
@settings(deadline=None)
def test_the_tokens_trained_on_are_bit_equal_to_those_sampled(made: list[Segment], rewards: list[int]) -> None:
    given_batch = batch(*(trajectory(float(r), s) for s, r in zip(made, rewards, strict=False)))
    data = training_data(given_batch, "grpo", None)
    trained = [s for s in made if s.mask.any()]
    assert len(data.datums) == len(trained)
    for datum, source in zip(to_tinker(data.datums), trained, strict=True):
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        assert datum.model_input.to_ints() == source.tokens[:-1].tolist()
        assert targets.tolist() == source.tokens[1:].tolist()
        assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
        np.testing.assert_array_equal(datum.loss_fn_inputs["logprobs"].to_numpy(), source.logprobs[1:])
        assert (datum.loss_fn_inputs["advantages"].to_numpy()[~source.mask[1:]] == 0).all()


def test_advantages_of_a_group_reach_the_sampled_tokens() -> None:
    data = training_data(
        batch(
            trajectory(1, segment([1, 2, 3], [False, True, True])),
            trajectory(0, segment([1, 2, 4], [False, False, True])),
        ),
        "grpo",
        None,
    )
    assert [datum.advantages.tolist() for datum in data.datums] == [[0.5, 0.5], [0, -0.5]]
    assert data.tokens == 3


def test_advantages_of_the_environment_are_honoured() -> None:
    own = segment([1, 2, 3], [False, True, True], [7, 2, -1])
    data = training_data(batch(trajectory(1, own), trajectory(0, segment([1, 2], [False, True]))), "grpo", None)
    assert data.datums[0].advantages.tolist() == [2, -1]


def test_what_is_left_out_is_counted_and_its_advantages_are_zero() -> None:
    data = training_data(
        batch(
            trajectory(1, segment([1, 2, 3, 4], [False, True, True, True]), segment([1, 2], [False, True])),
            trajectory(0, segment([1, 2], [False, False])),
        ),
        "grpo",
        3,
    )
    assert data.left_out == {TOO_LONG: 1, NO_TRAINED_TOKEN: 1}
    assert len(data.datums) == 1
    assert data.advantages[0][0][0].tolist() == [0, 0, 0, 0]
    assert data.advantages[0][0][1].tolist() == [0, 0.5]


def test_the_limit_itself_still_fits() -> None:
    assert reason_left_out(segment([1, 2, 3], [False, True, True]), 3) is None


def test_a_group_that_scores_alike_is_trained_on_with_zeros() -> None:
    data = training_data(batch(*(trajectory(1, segment([1, 2], [False, True])) for _ in range(3))), "rloo", None)
    assert len(data.datums) == 3
    assert not any(datum.advantages.any() for datum in data.datums)


def test_only_trajectories_of_the_current_policy_are_fresh() -> None:
    made = segment([1, 2], [False, True])
    data = training_data(batch(trajectory(1, made, step=4), trajectory(0, made, step=5), step=5), "grpo", None)
    assert [datum.fresh for datum in data.datums] == [False, True]


def test_a_first_token_can_not_be_trained_on() -> None:
    with pytest.raises(TrainerError, match="first token"):
        policy_datum(segment([1, 2], [True, True]), np.zeros(2, dtype=np.float32), fresh=True)


def test_a_broken_log_probability_is_refused() -> None:
    broken = replace(segment([1, 2], [False, True]), logprobs=np.array([0, np.nan], dtype=np.float32))
    with pytest.raises(TrainerError, match="not finite"):
        policy_datum(broken, np.zeros(2, dtype=np.float32), fresh=True)
