"""Benchmarks of control: both sides run alike, a missed target is an exit code, and docs are written only if asked."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def benchmark(name: str) -> Any:
    found = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    sys.modules[found.name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("score", "code"), [(717.0, 0), (700.0, 1)])
def test_a_return_below_the_target_is_an_exit_code_and_no_curve_is_drawn_unasked(monkeypatch, capsys, score, code):
    learning = benchmark("control_learning")
    learned = learning.Learned(1, 9.0, 1_001_472, [1.0], [score], [score + 60])
    monkeypatch.setattr(learning, "train", lambda *_: learned)
    monkeypatch.setattr(learning, "draw", lambda *_: pytest.fail("nobody asked for a curve"))
    monkeypatch.setattr(sys, "argv", ["control_learning.py", "--seeds", "1"])
    assert learning.main() == code
    said = capsys.readouterr().out
    assert ("MISSED" in said) == bool(code)
    assert "OPENBLAS_NUM_THREADS=" in said


def test_both_sides_of_the_comparison_get_the_same_environment(monkeypatch, tmp_path):
    learning = benchmark("control_learning")
    environments: list[Any] = []

    def seen(*_: Any, env: Any = None, **__: Any) -> Any:
        environments.append(env)
        raise KeyboardInterrupt

    monkeypatch.setattr(learning.subprocess, "run", seen)
    with pytest.raises(KeyboardInterrupt):
        learning.train(ROOT / "configs" / "cartpole.yaml", 1, [], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learning.cleanrl(learning.parsed(["--cleanrl", str(tmp_path)]))
    ours, theirs = environments
    ours.pop("TINKER_ATROPOS_EPISODES")
    assert ours == theirs


@pytest.mark.parametrize(("busy", "rate", "code"), [(0.99, 0.95, 0), (0.99, 0.8, 1), (0.5, 0.95, 1)])
def test_a_missed_overlap_is_an_exit_code(monkeypatch, capsys, busy, rate, code):
    pytest.importorskip("torch")
    overlap = benchmark("control_overlap")
    monkeypatch.setattr(overlap, "rate_from_memory", lambda *_: 1.0)
    monkeypatch.setattr(overlap, "rate_of_run", lambda *_: (busy, rate, 1.0))
    monkeypatch.setattr(overlap.Watch, "blocked", lambda self: 0.0)
    monkeypatch.setattr(sys, "argv", ["control_overlap.py"])
    assert overlap.main() == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)
