"""The benchmark's record of episodes: its v4 returns are those of Gymnasium's Humanoid-v4 for the same movements."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from tinker_atropos.registry import load_file

pytest.importorskip("mujoco.batch")
gymnasium = pytest.importorskip("gymnasium")

RECORDED = Path(__file__).parents[1] / "benchmarks" / "recorded_humanoid.py"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_v4_returns_are_gymnasiums(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_ATROPOS_EPISODES", str(tmp_path))
    spec = load_file(f"{RECORDED}:env")
    ours = spec.make(spec.config(num_envs=1, threads=1))
    peer = gymnasium.make("Humanoid-v4")
    ours.reset(seed=5)
    peer.reset(seed=5)
    total, returns = 0.0, []
    for action in np.random.default_rng(0).uniform(-0.1, 0.1, (150, 17)).astype(np.float32):
        ours.step(action[None])
        _, reward, terminated, truncated, _ = peer.step(action)
        total += reward
        if terminated or truncated:
            returns.append(total)
            total = 0.0
            peer.reset()
    ours.close()
    peer.close()
    (file,) = tmp_path.glob("episodes-*.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(returns) >= 4
    np.testing.assert_allclose([float(row["return_v4"]) for row in rows], returns, atol=1e-3)
    assert all(float(row["return_v5"]) < float(row["return_v4"]) - 5 for row in rows)
