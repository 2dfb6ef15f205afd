"""A snapshot continues bit for bit, in another process and in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos.errors import CheckpointError
from tinker_atropos_humanoid.locomotion import LOCOMOTION_IDS, make_locomotion


def actions_of(env: Any, steps: int, seed: int) -> Any:
    low, high = env.single_action_space.low, env.single_action_space.high
    return np.random.default_rng(seed).uniform(low, high, (steps, *env.action_space.shape))


def stepped(env: Any, action: Any) -> Any:
    observations, rewards, terminated, truncated, infos = env.step(action)
    return observations, rewards, terminated, truncated, infos["x_position"]


def drive(env: Any, steps: int, seed: int) -> list[Any]:
    return [stepped(env, action) for action in actions_of(env, steps, seed)]


CONTINUE = """
import json, sys
import numpy as np
from tinker_atropos_humanoid.locomotion import make_locomotion

folder, cases = sys.argv[1], json.loads(sys.argv[2])
for place, (id, settings) in enumerate(cases):
    env = make_locomotion(id, **settings)
    with np.load(f"{folder}/snapshot-{place}.npz") as snapshot:
        parts = {"last": env.restore(dict(snapshot))}
    for step, action in enumerate(np.load(f"{folder}/actions-{place}.npy")):
        observations, rewards, terminated, truncated, infos = env.step(action)
        parts |= {f"{step}-{name}": values for name, values in (
            ("observations", observations), ("rewards", rewards), ("terminated", terminated), ("truncated", truncated),
            ("x", infos["x_position"]),
        )}
    np.savez(f"{folder}/found-{place}.npz", **parts)
"""


def test_it_continues_exactly_in_another_process(tmp_path: Path) -> None:
    """All tasks and autoreset modes in one process, with another number of threads too."""
    cases: list[tuple[str, dict[str, Any]]] = [
        (id, {"num_envs": 3, "autoreset": autoreset, "max_episode_steps": 40, "threads": 1})
        for id in LOCOMOTION_IDS
        for autoreset in ("same_step", "next_step")
    ]
    expected = []
    for place, (id, settings) in enumerate(cases):
        env = make_locomotion(id, **{**settings, "threads": 2})
        env.reset(seed=0)
        last = drive(env, 39, seed=1)[-1][0]  # in step 40 some episodes end, so generators and lengths matter
        np.savez(tmp_path / f"snapshot-{place}.npz", allow_pickle=False, **env.snapshot())
        actions = actions_of(env, 60, seed=2)
        np.save(tmp_path / f"actions-{place}.npy", actions)
        steps = [stepped(env, action) for action in actions]
        assert any((terminated | truncated).any() for _, _, terminated, truncated, _ in steps)
        expected.append((last, steps))
    command = [sys.executable, "-c", CONTINUE, str(tmp_path), json.dumps(cases)]
    subprocess.run(command, check=True, timeout=300)
    for place, (last, steps) in enumerate(expected):
        with np.load(tmp_path / f"found-{place}.npz") as found:
            assert np.array_equal(found["last"], last), cases[place]
            for step, values in enumerate(steps):
                for name, value in zip(
                    ("observations", "rewards", "terminated", "truncated", "x"), values, strict=True
                ):
                    assert np.array_equal(found[f"{step}-{name}"], value), (cases[place], step, name)


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
