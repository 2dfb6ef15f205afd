"""Says what a silent script is at, and when that has lasted too long. Knows no process and no clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinker_atropos.errors import RunError

QUIET_SECONDS = 30.0
"""After these a silent script is named, then at doubling intervals."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the trajectory API saw of one environment: groups that it took, and that it refused with the last reason."""

    registered: bool = False
    posted: int = 0
    refused: int = 0
    last_refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: to register, then to post a first group; without a group; lines of a log that an error shows."""

    startup: float
    idle: float
    log_lines: int


@dataclass(slots=True)
class _Silence:
    mark: tuple[bool, int]
    since: float
    due: float


class Watch:
    """Call `look` again and again; `tail(name, lines)` gives the last lines of a script's log, None: there is none."""

    def __init__(
        self, names: Sequence[str], limits: Limits, tail: Callable[[str, int], Sequence[str]] | None, now: float
    ) -> None:
        self._limits, self._tail = limits, tail
        self._silences = {name: _Silence((False, 0), now, QUIET_SECONDS) for name in names}

    def look(self, now: float, seen: Mapping[str, Seen], *, enough: bool) -> list[str]:
        """Return lines to show. `enough`: the trainer has a batch waiting, so nobody waits for a script.

        Raises `RunError` where a script did not come up in time, or all of them are silent for too long.
        """
        lines: list[str] = []
        overdue: list[str] = []
        for name, silence in self._silences.items():
            facts = seen.get(name, Seen())
            mark = (facts.registered, facts.posted)
            if enough or mark != silence.mark:
                silence.mark, silence.since, silence.due = mark, now, QUIET_SECONDS
            silent = now - silence.since
            if silent >= silence.due:
                silence.due *= 2
                lines.append(f"{name} {stage(facts)} for {silent:.0f} s{_refusals(facts)}{self._last_line(name)}")
            if facts.posted and silent >= self._limits.idle:
                overdue.append(name)
            elif not facts.posted and silent >= self._limits.startup:
                raise RunError(
                    f"{name} {stage(facts)} for {silent:.0f} s, longer than env.startup_timeout "
                    f"{self._limits.startup:g}{_refusals(facts)}{self._log(name)}"
                )
        if overdue and len(overdue) == len(self._silences):
            name = overdue[0]
            facts = seen.get(name, Seen())
            raise RunError(
                f"{', '.join(overdue)} posted nothing for {self._limits.idle:g} s (env.idle_timeout) while the trainer "
                f"waits{_refusals(facts)}{self._log(name)}"
            )
        return lines

    def _last_line(self, name: str) -> str:
        if self._tail is None:
            return ""
        last = self._tail(name, 1)
        return f"; its log ends with: {last[-1]:.200}" if last else "; its log is empty"

    def _log(self, name: str) -> str:
        return "" if self._tail is None else log_words(self._tail(name, self._limits.log_lines))


def stage(facts: Seen) -> str:
    """Return what a script is at; goes before "for 30 s"."""
    if not facts.registered:
        return "has not registered (it loads its data and models first)"
    if not facts.posted:
        return "has registered and posted no group"
    return "has posted no further group"


def log_words(lines: Sequence[str]) -> str:
    """Return the end of a log for the end of a message."""
    return ". Its log ends with:\n" + "\n".join(f"  {line}" for line in lines) if lines else ". Its log is empty"


def _refusals(facts: Seen) -> str:
    if not facts.refused:
        return ""
    why = f", the last because {facts.last_refusal:.300}" if facts.last_refusal else ""
    return f"; the API refused {facts.refused} of its groups{why}"
