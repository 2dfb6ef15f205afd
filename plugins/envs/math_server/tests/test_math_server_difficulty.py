"""Success rates: what they leave out, and that a snapshot brings them back whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import CheckpointError, Group, TaskRef, Trajectory
from tinker_atropos.environment_state import EnvironmentState, why_skipped
from tinker_atropos_math_server.config import MathServerConfig
from tinker_atropos_math_server.difficulty import SuccessRates
from tinker_atropos_math_server.environment import FilteredEnvironment, MathServerEnvironment, make

FIXTURE = str(Path(__file__).parent / "math_server_fixture.jsonl")


def group(index: int, *right: bool) -> Group:
    trajectories = tuple(Trajectory((), (float(r),), ("stop",), (), (), {"correct": float(r)}) for r in right)
    return Group(f"0-{index}", TaskRef("train", index, 0), trajectories)


def filtered(**settings: Any) -> FilteredEnvironment:
    made = make(MathServerConfig(dataset=FIXTURE, success_window=4, **settings))
    assert isinstance(made, FilteredEnvironment)
    return made


def test_problems_outside_the_bounds_are_left_out_once_there_are_enough_answers() -> None:
    environment = filtered(min_success=0.2, max_success=0.8, success_retry=0.0)
    environment.ended(
        [group(0, True, True, True), group(1, False, False, False, False), group(2, True, False, True, False)]
    )
    skipped = [environment.skip(TaskRef("train", index, 7)) for index in range(4)]
    assert skipped == ["", "too_hard", "", ""]
    environment.ended([group(0, True)])
    assert environment.skip(TaskRef("train", 0, 7)) == "too_easy"
    assert environment.skip(TaskRef("train", 8, 7)) == "too_easy"  # the same problem, a pass later
    environment.ended([group(0, False, False)])  # the window moves on: two of four
    assert environment.skip(TaskRef("train", 0, 7)) == ""


def test_a_problem_left_out_is_tried_again_at_a_share_of_its_turns_that_its_seed_decides() -> None:
    environment = filtered(max_success=0.8, success_retry=0.25)
    environment.ended([group(0, True, True, True, True)])
    played = [environment.skip(TaskRef("train", 0, seed)) == "" for seed in range(2000)]
    assert np.mean(played) == pytest.approx(0.25, abs=0.05)
    assert played == [environment.skip(TaskRef("train", 0, seed)) == "" for seed in range(2000)]


def test_a_snapshot_brings_the_rates_back() -> None:
    one, other = filtered(max_success=0.8), filtered(max_success=0.8)
    one.ended([group(index, *([True] * (index + 1)), False) for index in range(8)])
    other.restore(json.loads(json.dumps(one.snapshot())))
    assert other.snapshot() == one.snapshot()
    for environment in (one, other):
        environment.ended([group(3, True, True, True)])
    assert other.snapshot() == one.snapshot()
    assert EnvironmentState(one).lasts


@pytest.mark.parametrize(
    "state", [{}, {"version": 2, "answers": {}}, {"version": 1, "answers": {"a": "02"}}, {"version": 1, "answers": 3}]
)
def test_a_damaged_snapshot_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="success rates that can't be read"):
        SuccessRates(low=None, high=0.5).restore(state)


def test_without_bounds_nothing_is_learned_or_left_out() -> None:
    environment = make(MathServerConfig(dataset=FIXTURE))
    assert type(environment) is MathServerEnvironment
    assert not EnvironmentState(environment).lasts
    assert why_skipped(environment, TaskRef("train", 0, 0)) == ""
