"""Which groups make the next batch: exactly so many sequences, first in first out. It knows sizes and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence


def choose(sizes: Sequence[int], target: int) -> list[int] | None:
    """Return the places of the sizes that sum to `target` exactly, or None where none do.

    Of all such choices the one that takes each size as early as it can: the first is left out only if no choice holds
    it, and so on. Sizes are positive.
    """
    places: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if total + size > target:
            break
        places.append(place)
        total += size
        if total == target:
            return places
    else:
        if total < target:
            return None
    return _choose_exactly(sizes, target)


def _choose_exactly(sizes: Sequence[int], target: int) -> list[int] | None:
    # Bit n of a number says whether n can be summed; the greatest common divisor keeps these numbers short.
    unit = math.gcd(*sizes)
    if target % unit:
        return None
    goal = target // unit
    scaled = [size // unit for size in sizes]
    limit = (1 << goal + 1) - 1
    reach = 1
    for place, size in enumerate(scaled):
        reach |= reach << size & limit
        if reach >> goal & 1:
            scaled = scaled[: place + 1]
            break
    else:
        return None
    after = [1]  # after[-1 - i]: what can be summed from the sizes behind place i
    for size in reversed(scaled[1:]):
        after.append(after[-1] | after[-1] << size & limit)
    places = []
    for place, size in enumerate(scaled):
        behind = after.pop()
        if size <= goal and behind >> (goal - size) & 1:
            places.append(place)
            goal -= size
    return places


def possible(sizes: Iterable[int], target: int, using: int | None = None) -> bool:
    """Return whether any number of groups of these sizes sum to `target`, with one of size `using` among them."""
    rest = target - (using or 0)
    if rest < 0:
        return False
    known = {size for size in sizes if 0 < size <= rest} | ({using} if using is not None and using <= rest else set())
    if rest == 0 or any(rest % size == 0 for size in known):
        return True
    if not known or rest % math.gcd(*known):
        return False
    limit = (1 << rest + 1) - 1
    reach = 1
    for size in known:
        step = size
        while step <= rest:  # doubling: after each turn any number of this size up to twice as many
            reach |= reach << step & limit
            step *= 2
    return bool(reach >> rest & 1)


def minimums(allocations: Mapping[int, float], batch_size: int) -> dict[int, int]:
    """Return how many sequences of a batch each environment is owed; scaled down where they exceed the batch."""
    total = sum(allocations.values())
    scale = 1 / total if total > 1 else 1.0
    # The epsilon keeps 0.29 of 100 at 29, which floats make 28.999….
    owed = {env: int(batch_size * share * scale + 1e-9) for env, share in allocations.items()}
    return {env: count for env, count in owed.items() if count > 0}
