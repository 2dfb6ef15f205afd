"""Means with bootstrap intervals, pass@k, and paired differences. Pure functions; they know no environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Of every interval, and one minus the error rate of a comparison."""

RESAMPLES = 10_000
SEED = 0
MOST_EXACT = 12
"""Up to so many differences other than 0 every sign is tried."""

_CHUNK = 2_000_000  # indices drawn at a time, to bound the memory

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its interval; None where fewer than two tasks, or no spread, leave nothing to resample."""

    mean: float
    low: float | None
    high: float | None
    tasks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired differences, its interval, and the p-value of the sign-flip test.

    `shown` is True where the interval leaves 0 out and p is below 1 - `LEVEL`.
    """

    mean: float
    low: float | None
    high: float | None
    p: float
    tasks: int
    shown: bool


def estimate(per_task: Sequence[float]) -> Estimate:
    """Return the mean of values of one task each, with a percentile bootstrap interval over tasks.

    The resampled means are spread by sqrt(n / (n - 1)) about the mean: without it the interval of a few tasks is too
    narrow (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 3.2). It is cut at the smallest
    and the largest value. The seed is fixed: the same values give the same interval.
    """
    values = np.asarray(per_task, np.float64)
    if not len(values):
        raise ValueError("no values to estimate from")
    mean = float(values.mean())
    if len(values) < 2 or bool((values == values[0]).all()):
        return Estimate(mean, None, None, len(values))
    low, high = np.quantile(_resampled_means(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    least, most = float(values.min()), float(values.max())
    return Estimate(mean, max(least, float(low)), min(most, float(high)), len(values))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that one of `k` samples, drawn without replacement from these, passes.

    1 - C(samples - passed, k) / C(samples, k), the unbiased estimator of Chen et al., "Evaluating Large Language Models
    Trained on Code", 2021, equation 1.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples is not defined")
    if samples - passed < k:
        return 1.0
    below = np.arange(samples - passed + 1, samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / below))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return how much `second` is above `first`, task by task: `first[i]` and `second[i]` belong to one task.

    The interval is the percentile bootstrap's of `estimate`, over the differences. A difference counts as shown only
    where a sign-flip test agrees: that holds its error rate also where few tasks differ and a bootstrap is too sure.
    """
    values = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    found = estimate(values.tolist())
    p = _sign_flip(values)
    # Without spread there is nothing to resample; the test decides alone.
    outside = found.low is None or found.high is None or found.low > 0 or found.high < 0
    return Difference(found.mean, found.low, found.high, p, len(values), bool(outside and p < 1 - LEVEL))


def _resampled_means(values: Values) -> Values:
    random = np.random.default_rng(SEED)
    size = len(values)
    rows = max(1, _CHUNK // size)
    means = np.concatenate(
        [
            values[random.integers(0, size, (min(rows, RESAMPLES - done), size))].mean(axis=1)
            for done in range(0, RESAMPLES, rows)
        ]
    )
    centre = values.mean()
    return np.asarray(centre + (means - centre) * np.sqrt(size / (size - 1)), np.float64)


def _sign_flip(values: Values) -> float:
    """Return the two-sided p-value of "each difference might as well have the other sign".

    Exact for few differences; else from `RESAMPLES` random signs, the observed ones counted in.
    """
    differing = values[values != 0]
    if not len(differing):
        return 1.0
    observed = abs(float(differing.sum())) * (1 - 1e-12)  # rounding must not make the observed sum rarer than itself
    if len(differing) <= MOST_EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=len(differing))))
        return float((np.abs(signs @ differing) >= observed).mean())
    random = np.random.default_rng(SEED)
    rows = max(1, _CHUNK // len(differing))
    reached = 0
    for done in range(0, RESAMPLES, rows):
        flips = random.integers(0, 2, (min(rows, RESAMPLES - done), len(differing)), dtype=np.int8)
        reached += int((np.abs((2.0 * flips - 1.0) @ differing) >= observed).sum())
    return (1 + reached) / (1 + RESAMPLES)
