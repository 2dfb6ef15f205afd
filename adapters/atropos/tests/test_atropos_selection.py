"""Which groups make a batch: exact, first in first out, and never stuck where any choice exists."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_atropos_atropos.selection import choose, minimums, possible

sizes = st.lists(st.integers(1, 9), max_size=9)


def best(sizes: list[int], target: int) -> list[int] | None:
    """By trying all: the choice that takes each as early as it can."""
    found = [
        [place in chosen for place in range(len(sizes))]
        for count in range(1, len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
        if sum(sizes[place] for place in chosen) == target
    ]
    return [place for place, taken in enumerate(max(found)) if taken] if found else None


@given(sizes=sizes, target=st.integers(1, 30))
def test_choice_is_exact_and_takes_the_oldest_it_can(sizes: list[int], target: int) -> None:
    found, expected = choose(sizes, target), best(sizes, target)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert sum(sizes[place] for place in found) == target
        # A shorter line that suffices is enough: nothing is waited for, and the oldest is in if it can be.
        assert found == best(sizes[: max(found) + 1], target)


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [
        ([2, 2, 2, 3], 6, [0, 1, 2]),
        ([3, 2, 2, 2], 6, [1, 2, 3]),
        ([3, 2, 2, 3], 6, [0, 3]),
        ([3, 3], 4, None),
        ([8], 4, None),
        ([], 4, None),
        ([16] * 100_000, 16 * 99_999, list(range(99_999))),
    ],
)
def test_choices(sizes: list[int], target: int, expected: list[int] | None) -> None:
    assert choose(sizes, target) == expected


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), target=st.integers(1, 40))
def test_possible_is_what_many_groups_of_each_size_could_sum_to(sizes: list[int], target: int) -> None:
    using = sizes[0]
    many = [size for size in set(sizes) for _ in range(target // size + 1)]
    reach = {using}
    for size in many:
        reach |= {sum_ + size for sum_ in reach if sum_ + size <= target}
    assert possible(sizes, target, using=using) == (target in reach)


def test_minimums_beyond_the_batch_are_scaled_and_floats_do_not_cost_a_sequence() -> None:
    assert minimums({0: 0.29}, 100) == {0: 29}
    assert minimums({0: 1.0, 1: 1.0}, 8) == {0: 4, 1: 4}
    assert minimums({0: 0.1}, 4) == {}
