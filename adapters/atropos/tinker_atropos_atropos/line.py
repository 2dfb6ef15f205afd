"""The groups that wait, by size and environment, in order of arrival. Every question of a poll is answered at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tinker_atropos_atropos.roster import Load
from tinker_atropos_atropos.selection import choose


@dataclass(slots=True)
class Waiting:
    """One group in line. `leased`: the API has taken it out of the State already."""

    id: str
    sequences: int
    env: int | None
    size: int
    arrival: int
    leased: bool = False


class Line:
    """Groups in order of arrival, with their sums kept up to date."""

    def __init__(self) -> None:
        self._groups: dict[str, Waiting] = {}
        self._by_env: Counter[int | None] = Counter()
        self._sizes: Counter[int] = Counter()
        self._env_sizes: dict[int | None, Counter[int]] = {}
        self.sequences = 0
        self.bytes = 0
        self._fruitless = False

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, id: object) -> bool:
        return id in self._groups

    def add(self, group: Waiting) -> None:
        """Put a group at the end of the line."""
        self._groups[group.id] = group
        self._count(group, 1)
        self._fruitless = False

    def put_back(self, groups: Iterable[Waiting]) -> None:
        """Put groups where they stood, by arrival; whatever was leased stands in line as if it had never been."""
        for group in groups:
            self._groups[group.id] = group
            self._count(group, 1)
        self._groups = {group.id: group for group in sorted(self._groups.values(), key=_arrival)}
        for group in self._groups.values():
            group.leased = False
        self._fruitless = False

    def remove(self, id: str) -> Waiting | None:
        """Take a group out of the line; None if it is not in it."""
        group = self._groups.pop(id, None)
        if group is not None:
            self._count(group, -1)
        return group

    def to_lease(self, ids: Collection[str]) -> int:
        """Return how many of the oldest that are not leased must be, so that all of `ids` are."""
        wanted = {id for id in ids if not self._groups[id].leased}
        passed = 0
        for group in self._groups.values():
            if not wanted:
                break
            if not group.leased:
                passed += 1
                wanted.discard(group.id)
        return passed

    def mark_leased(self, id: str) -> None:
        """Note that a group in line has been taken out of the State."""
        self._groups[id].leased = True

    def ids(self) -> list[str]:
        """Return the ids of all, oldest first."""
        return list(self._groups)

    def load(self, env: int) -> Load:
        """Return what waits, as environment `env` sees it."""
        others = {number: count for number, count in self._by_env.items() if number != env and count > 0}
        return Load(
            self._by_env[env], others, max(self._sizes, default=1), max(self._env_sizes.get(env, ()), default=1)
        )

    def odd(self, env: int, group_size: int) -> int:
        """Return how many sequences of an environment are short of a whole number of its groups."""
        return self._by_env[env] % group_size

    def waiting_of(self, env: int) -> int:
        """Return how many sequences of an environment wait."""
        return self._by_env[env]

    def beyond(self, sequences: int) -> list[str]:
        """Return the ids of groups that have more sequences than that."""
        return [group.id for group in self._groups.values() if group.sequences > sequences]

    def batch(self, size: int, owed: Mapping[int, int]) -> list[str] | None:
        """Return the ids of the next batch of exactly `size` sequences, or None while there is none.

        What `owed` promises an environment comes first, the rest in order of arrival. Nothing is looked at twice: a
        look that found nothing is not repeated until a group has arrived.
        """
        if self.sequences < size or self._fruitless:
            return None
        groups = list(self._groups.values())
        if owed:
            groups = _owed_first(groups, owed)
        places = choose([group.sequences for group in groups], size)
        if places is None:
            self._fruitless = True
            return None
        return [group.id for group in sorted((groups[place] for place in places), key=_arrival)]

    def changed(self) -> None:
        """Look again: the size of a batch, or who is owed what, has changed."""
        self._fruitless = False

    def _count(self, group: Waiting, sign: int) -> None:
        self.sequences += sign * group.sequences
        self.bytes += sign * group.size
        self._by_env[group.env] += sign * group.sequences
        sizes = self._env_sizes.setdefault(group.env, Counter())
        for counter in (self._sizes, sizes):
            counter[group.sequences] += sign
            if not counter[group.sequences]:
                del counter[group.sequences]


def _owed_first(groups: list[Waiting], owed: Mapping[int, int]) -> list[Waiting]:
    left = dict(owed)
    first, then = [], []
    for group in groups:
        if group.env is not None and left.get(group.env, 0) > 0:
            left[group.env] -= group.sequences
            first.append(group)
        else:
            then.append(group)
    return first + then


def _arrival(group: Waiting) -> int:
    return group.arrival
