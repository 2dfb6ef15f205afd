"""pass@k, intervals and paired differences, against enumeration and over simulated pairs."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from tinker_atropos.evaluation.statistics import estimate, paired_difference, pass_at_k

PAIRS = 200
TASKS, SAMPLES = 50, 4


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [1] * passed + [0] * (samples - passed)
        for k in range(1, samples + 1):
            share = sum(any(subset) for subset in combinations(outcomes, k)) / comb(samples, k)
            assert pass_at_k(samples, passed, k) == pytest.approx(share)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_is_not_defined(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, passed, k)


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(PAIRS):
        found = estimate((random.random(20) < 0.4).astype(float).tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.4 <= found.high
    assert covered / PAIRS > 0.9  # 0.95 in the limit; twenty yes-or-no values are few


def test_equal_values_have_no_interval() -> None:
    assert estimate([0.0] * 9).low is None
    assert estimate([0.3]).high is None
    assert estimate([0.3]).mean == 0.3


def test_the_same_values_give_the_same_interval_within_their_range() -> None:
    values = [0.0, 1.0, 1.0, 1.0]
    assert estimate(values) == estimate(values)
    found = estimate(values)
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= 0.75 <= found.high <= 1.0


def simulated(random: np.random.Generator, better_by: float) -> tuple[list[float], list[float]]:
    """Mean rewards of two models on tasks of every difficulty, the second one better by so much where it can be."""
    rates = random.uniform(0.05, 0.75, TASKS)
    first = random.binomial(SAMPLES, rates) / SAMPLES
    second = random.binomial(SAMPLES, np.clip(rates + better_by, 0, 1)) / SAMPLES
    return first.tolist(), second.tolist()


def test_a_planted_difference_is_found_and_none_where_there_is_none() -> None:
    """The stated error rate is 5 %: 10 of 200 pairs without a difference; more than 18 come once in 200 such tests."""
    random = np.random.default_rng(0)
    false_alarms = sum(paired_difference(*simulated(random, 0.0)).shown for _ in range(PAIRS))
    found = [paired_difference(*simulated(random, 0.2)) for _ in range(PAIRS)]
    right = sum(one.shown and one.mean > 0 for one in found)
    print(f"false alarms {false_alarms} of {PAIRS}; a difference of 0.2 found {right} of {PAIRS}")
    assert false_alarms <= 18
    assert right >= 0.9 * PAIRS
    assert not any(one.shown and one.mean < 0 for one in found)


def test_few_differing_tasks_are_no_difference() -> None:
    """Where 4 of 50 tasks differ the bootstrap alone would be sure; an exact test of 4 signs can't be (p = 1/8)."""
    first = [0.0] * 50
    second = [1.0] * 4 + [0.0] * 46
    found = paired_difference(first, second)
    assert found.low is not None
    assert found.low > 0
    assert found.p == pytest.approx(0.125)
    assert not found.shown


def test_a_constant_difference_is_judged_by_its_signs() -> None:
    assert paired_difference([0.0] * 8, [1.0] * 8).shown
    assert not paired_difference([0.0] * 3, [1.0] * 3).shown
    assert not paired_difference([1.0] * 8, [1.0] * 8).shown
    assert paired_difference([1.0] * 8, [1.0] * 8).p == 1.0
