"""What the trainer's side of a run needs of whatever makes its groups; knows neither episodes nor foreign scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos.trajectory import Group, TaskRef


@dataclass(frozen=True, slots=True, eq=False)
class Discarded:
    """A task that ended without being trained on. `group` is what there was of it; `ordinal` its place in the run."""

    id: str
    task: TaskRef
    reason: str
    group: Group | None
    ordinal: int


class GroupSource(Protocol):
    """The producer of a run's groups: it puts them into the state, and hears what became of each.

    An ordinal is a group's place in the run's order; every one below the cursor's `next` has ended or is listed as
    open there.
    """

    async def run(self) -> None:
        """Produce until cancelled; raises a `RunError` where going on makes no sense."""
        ...

    def policy_changed(self) -> None:
        """A newer policy was adopted."""
        ...

    def wanted(self, groups: Sequence[Group]) -> int:
        """Return how many groups more the next batch surely needs beside these; 0: it is whole."""
        ...

    def unfit(self, group: Group) -> str:
        """Return why a group is not to be trained on, beyond what holds for all; "" if it is fit."""
        ...

    def ordinal(self, id: str) -> int:
        """Return the place in the run's order of a group that the trainer holds."""
        ...

    def taken(self, groups: Sequence[Group]) -> None:
        """The trainer took these into a step."""
        ...

    def discard(self, group: Group, reason: str) -> None:
        """A group ends without being trained on. Raises a `RunError` after too many in a row."""
        ...

    def consumed(self, group: Group) -> None:
        """A group was trained on."""
        ...

    def take_discarded(self) -> list[Discarded]:
        """Return what was discarded since the last call; their tasks stay open until `recorded`."""
        ...

    def recorded(self, discarded: Iterable[Discarded]) -> None:
        """Discarded tasks were written down, so a checkpoint may count them as ended."""
        ...

    def take_failures(self) -> Counter[str]:
        """Return how many tries of episodes failed since the last call, by cause."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """Return numbers of the source's own for the next line of metrics."""
        ...

    def tally(self) -> str:
        """Say how many groups are in flight, and what became of those that ended since the last step."""
        ...

    def cursor(self) -> dict[str, Any]:
        """Return a JSON-ready cursor of the run's order."""
        ...

    def unfinished(self, pending: Sequence[Group]) -> list[Discarded]:
        """Return those of the state's pending groups that end here, with the run, and are made anew on a resume."""
        ...
