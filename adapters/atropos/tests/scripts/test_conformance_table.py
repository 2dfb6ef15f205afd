"""What `make conformance` says of Atropos scripts: a case passes only with enough that is proven, a skip lists all."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[4] / "conformance" / "atropos_scripts.py"


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return runpy.run_path(str(FILE), run_name="atropos_scripts")


@pytest.mark.parametrize(
    ("proven", "unproven", "trained", "passes"),
    [(100, 0, 50, True), (80, 20, 50, True), (79, 21, 50, False), (1, 5000, 1, False), (0, 0, 0, False)],
)
def test_a_case_passes_with_its_least_share_proven(
    table: dict[str, Any], proven: int, unproven: int, trained: int, passes: bool
) -> None:
    case = table["Case"]("a", "something", ("a.py",), least_proven=0.8)
    outcome = table["Outcome"](case, 0, 1.0, steps=case.steps, scripts=Counter(a_0=4))
    outcome.tokens["trained"] = trained
    outcome.wanted.update(proven=proven, unproven=unproven)
    assert outcome.passed is passes


def test_without_a_checkout_every_case_that_is_skipped_is_named(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ATROPOS_CHECKOUT", raising=False)
    monkeypatch.setattr("sys.argv", [str(FILE)])
    assert table["main"]() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"SKIPPED {case.name}: ") for line in lines) for case in table["CASES"])
    assert "ATROPOS_CHECKOUT=/path/to/atropos" in lines[-1]
