"""Shows a run: a live panel on a terminal, plain lines elsewhere. Data go to stdout, notices to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tinker_atropos.terminal import printable
from tinker_atropos.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from rich.live import Live


class Progress(Protocol):
    """What a run tells while it goes on."""

    def say(self, text: str) -> None:
        """Show one notice: a wait, a retry, a stage."""
        ...

    def step(self, metrics: Mapping[str, float], total: int) -> None:
        """Show a finished step."""
        ...

    def rollout(self, title: str, trajectory: Trajectory) -> None:
        """Show one real rollout."""
        ...

    def close(self) -> None:
        """Stop showing."""
        ...


class PlainProgress:
    """Lines."""

    def __init__(self, out: TextIO | None = None, notices: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notices = notices or sys.stderr
        self._eta = _Eta()

    def say(self, text: str) -> None:
        """Write a notice to stderr."""
        print(printable(text), file=self._notices, flush=True)

    def step(self, metrics: Mapping[str, float], total: int) -> None:
        """Write one line."""
        print(step_line(metrics, total, self._eta.after(metrics, total)), file=self._out, flush=True)

    def rollout(self, title: str, trajectory: Trajectory) -> None:
        """Write the conversation, indented."""
        print(f"  {printable(title)}", file=self._out)
        for line in rollout_lines(trajectory):
            print(f"    {line}", file=self._out)
        self._out.flush()

    def close(self) -> None:
        """Nothing to stop."""


class PanelProgress:
    """A panel that stays at the foot of the terminal while lines pass above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        # Notices belong to stderr: where that is no terminal they go there, and the panel leaves it alone.
        self._notices = None if sys.stderr is not None and sys.stderr.isatty() else sys.stderr
        self._live: Live = Live(
            console=self._console, refresh_per_second=4, transient=False, redirect_stderr=self._notices is None
        )
        self._live.start()
        self._eta = _Eta()
        self._sample: list[str] = []
        self._notice = ""
        self._metrics: dict[str, float] = {}
        self._total = 0
        self._draw()

    def say(self, text: str) -> None:
        """Show a notice in the panel and leave it above."""
        self._notice = printable(text)
        if self._notices is not None:
            print(self._notice, file=self._notices, flush=True)
        else:
            self._console.print(self._notice, style="dim", markup=False, highlight=False)
        self._draw()

    def step(self, metrics: Mapping[str, float], total: int) -> None:
        """Update the figures; those of the newest evaluation stay until the next."""
        evaluated = {name: value for name, value in self._metrics.items() if name.startswith("eval/")}
        self._metrics, self._total, self._notice = {**evaluated, **metrics}, total, ""
        self._eta.after(metrics, total)
        self._draw()

    def rollout(self, title: str, trajectory: Trajectory) -> None:
        """Show a conversation in the panel; the one before it moves up, out of the panel."""
        before, self._sample = self._sample, [printable(title), *(f"  {line}" for line in rollout_lines(trajectory))]
        for line in before:
            self._console.print(line, style="cyan", markup=False, highlight=False)
        self._draw()

    def close(self) -> None:
        """Leave the panel as it is and give the terminal back."""
        self._live.stop()

    def _draw(self) -> None:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, value in figures(self._metrics, self._total, self._eta.left):
            grid.add_row(Text(name, style="bold"), Text(value))
        for line in self._sample:
            grid.add_row("", Text(line, style="cyan", overflow="ellipsis", no_wrap=True))
        if self._notice:
            grid.add_row("", Text(self._notice, style="yellow"))
        self._live.update(Panel(grid, title="tinker-atropos run"))


class _Eta:
    """Seconds left, by the median-like pace of the steps seen in this process."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._last = time.monotonic()
        self.left: float | None = None

    def after(self, metrics: Mapping[str, float], total: int) -> float | None:
        now = time.monotonic()
        self._times.append(now - self._last)
        self._last = now
        recent = sorted(self._times[-16:])
        self.left = recent[len(recent) // 2] * max(0.0, total - metrics.get("step", 0))
        return self.left


def figures(metrics: Mapping[str, float], total: int, left: float | None) -> Sequence[tuple[str, str]]:
    """Return what the panel shows, name and value."""
    if not metrics:
        return [("step", "starting …")]
    rows = [("step", f"{int(metrics['step'])} / {total}")]
    for name, key, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("eval reward", "eval/reward", "{:.3f}"),
        ("loss", "loss", "{:+.4f}"),
        ("tokens/s", "tokens/per_second", "{:.0f}"),
        ("staleness", "staleness/mean", "{:.2f}"),
        ("trainer busy", "trainer/busy", "{:.0%}"),
    ):
        if key in metrics:
            rows.append((name, form.format(metrics[key])))
    if left is not None:
        rows.append(("time left", duration(left)))
    return rows


def step_line(metrics: Mapping[str, float], total: int, left: float | None) -> str:
    """Return a step as one line."""
    return "  ".join(f"{name} {value}" for name, value in figures(metrics, total, left))


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rollout_lines(trajectory: Trajectory, width: int = 100, most: int = 8) -> list[str]:
    """Return a conversation as a few short lines, and its reward. What a model wrote can't steer the terminal."""
    lines = [line for message in trajectory.messages for line in _message_lines(message, width)]
    if len(lines) > most:
        lines = [*lines[: most // 2], "…", *lines[-most // 2 :]]
    ended = trajectory.finish_reasons[-1] if trajectory.finish_reasons else "no turn"
    return [*lines, f"reward {trajectory.reward:g} ({ended})"]


def _message_lines(message: Message, width: int) -> list[str]:
    content: Any = message.get("content")
    text = content if isinstance(content, str) else str(content)
    # Cut before spelling out: no more of a long answer is looked at than is shown.
    parts = text.strip("\n").split("\n") or [""]
    role = printable(str(message.get("role", "text"))[:20]).replace("\n", " ")
    shown = [_cut(printable(part[: width + 1]).expandtabs(4), width) for part in parts]
    return [f"{role}: {shown[0]}", *(f"  {part}" for part in shown[1:])]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def make_progress() -> Progress:
    """Return a panel where stdout is a terminal that can redraw, else lines."""
    redraws = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return PanelProgress() if redraws and sys.stdout is not None and sys.stdout.isatty() else PlainProgress()
