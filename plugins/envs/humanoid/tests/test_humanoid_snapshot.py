"""A snapshot continues bit for bit, in another process as in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos.errors import CheckpointError
from tinker_atropos_humanoid.locomotion import LOCOMOTION_IDS, make_locomotion


def drive(env: Any, steps: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    low, high = env.single_action_space.low, env.single_action_space.high
    taken = []
    for _ in range(steps):
        observations, rewards, terminated, truncated, infos = env.step(rng.uniform(low, high, env.action_space.shape))
        taken.append((observations, rewards, terminated, truncated, infos["x_position"]))
    return taken


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("id", LOCOMOTION_IDS)
def test_it_continues_exactly(id: str, autoreset: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_envs": 3, "autoreset": autoreset, "max_episode_steps": 40}
    env = make_locomotion(id, **settings)
    env.reset(seed=0)
    last = drive(env, 39, seed=1)[-1][0]  # in step 40 some episodes end, so the generators and lengths matter
    np.savez(tmp_path / "snapshot.npz", allow_pickle=False, **env.snapshot())
    expected = drive(env, 60, seed=2)

    other = make_locomotion(id, **settings)
    other.reset(seed=99)
    drive(other, 5, seed=3)
    with np.load(tmp_path / "snapshot.npz") as snapshot:
        assert np.array_equal(other.restore(dict(snapshot)), last)
    for step, again in zip(expected, drive(other, 60, seed=2), strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(step, again, strict=True))
    assert any((terminated | truncated).any() for _, _, terminated, truncated, _ in expected)


def test_a_snapshot_restores_without_a_reset_before_it() -> None:
    env = make_locomotion("Hopper-v5", num_envs=2)
    env.reset(seed=0)
    fresh = make_locomotion("Hopper-v5", num_envs=2)
    fresh.restore(env.snapshot())
    assert np.array_equal(drive(env, 5, 0)[-1][0], drive(fresh, 5, 0)[-1][0])
    assert fresh.np_random_seed == (-1, -1)


def test_the_snapshot_is_not_changed_by_going_on() -> None:
    env = make_locomotion("Hopper-v5", num_envs=2)
    env.reset(seed=0)
    snapshot = env.snapshot()
    before = {name: value.copy() for name, value in snapshot.items()}
    drive(env, 30, 0)
    assert all(np.array_equal(snapshot[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("id", "settings", "said"),
    [
        ("Walker2d-v5", {"num_envs": 2}, "is of Hopper-v5, and this is Walker2d-v5"),
        ("Hopper-v5", {"num_envs": 3}, r"have shape \(2, .*env.num_envs"),
        ("Hopper-v5", {"num_envs": 2, "exclude_current_positions_from_observation": False}, "observations have shape"),
    ],
)
def test_another_environments_snapshot_is_refused(id: str, settings: dict[str, Any], said: str) -> None:
    env = make_locomotion("Hopper-v5", num_envs=2)
    env.reset(seed=0)
    with pytest.raises(CheckpointError, match=said):
        make_locomotion(id, **settings).restore(env.snapshot())


def test_an_incomplete_snapshot_is_refused() -> None:
    env = make_locomotion("Hopper-v5", num_envs=2)
    env.reset(seed=0)
    snapshot = env.snapshot()
    del snapshot["random"]
    with pytest.raises(CheckpointError, match="lacks random"):
        env.restore(snapshot)
