"""Shows a run: a live panel on a terminal, plain lines elsewhere. Data go to stdout, notices to stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tinker_atropos.terminal import printable
from tinker_atropos.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel


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
    """Lines. A reader who goes away (`| head -1`, a closed terminal) does not end the run."""

    def __init__(self, out: TextIO | None = None, notices: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notices = notices or sys.stderr
        self._closed = False
        self._eta = _Eta()

    def say(self, text: str) -> None:
        """Write a notice to stderr."""
        with suppress(OSError, ValueError):
            print(printable(text), file=self._notices, flush=True)

    def step(self, metrics: Mapping[str, float], total: int) -> None:
        """Write one line."""
        self._write(step_line(metrics, total, self._eta.after(metrics, total)))

    def rollout(self, title: str, trajectory: Trajectory) -> None:
        """Write the conversation, indented."""
        self._write("\n".join([f"  {printable(title)}", *(f"    {line}" for line in rollout_lines(trajectory))]))

    def close(self) -> None:
        """Nothing to stop."""

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            print(text, file=self._out, flush=True)
        except (OSError, ValueError) as error:  # ValueError: closed within this process
            self._closed = True
            self.say(f"stdout is closed ({error}); the run goes on, and its figures are in its metrics.jsonl")


class PanelProgress:
    """A panel that stays at the foot of the terminal while lines pass above it. Any thread may call it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        # Notices belong to stderr: where that is no terminal they go there, and the panel leaves it alone.
        self._notices = None if sys.stderr is not None and sys.stderr.isatty() else sys.stderr
        # It draws only when told to: a refresh of its own would come between the parts of what is printed.
        self._live: Live = Live(
            self, console=self._console, auto_refresh=False, transient=False, redirect_stderr=self._notices is None
        )
        self._lock = threading.RLock()
        self._eta = _Eta()
        self._sample: list[str] = []
        self._notice = ""
        self._metrics: dict[str, float] = {}
        self._total = 0
        self._live.start()
        self._draw()

    def say(self, text: str) -> None:
        """Show a notice in the panel and leave it above."""
        with self._lock:
            self._notice = printable(text)
            if self._notices is not None:
                with suppress(OSError, ValueError):
                    print(self._notice, file=self._notices, flush=True)
                self._draw()
            else:
                self._draw(self._notice, style="dim")

    def step(self, metrics: Mapping[str, float], total: int) -> None:
        """Update the figures, and leave the step's line above; those of the newest evaluation stay until the next."""
        with self._lock:
            evaluated = {name: value for name, value in self._metrics.items() if name.startswith("eval/")}
            self._metrics, self._total, self._notice = {**evaluated, **metrics}, total, ""
            self._draw(step_line(metrics, total, self._eta.after(metrics, total)))

    def rollout(self, title: str, trajectory: Trajectory) -> None:
        """Show a conversation in the panel; the one before it moves up, out of the panel."""
        with self._lock:
            before, self._sample = (
                self._sample,
                [printable(title), *(f"  {line}" for line in rollout_lines(trajectory))],
            )
            self._draw("\n".join(before), style="cyan")

    def close(self) -> None:
        """Leave the panel as it is and give the terminal back."""
        with self._lock, suppress(OSError):
            self._live.stop()

    def __rich__(self) -> Panel:
        """Return the panel of this moment. Takes no lock: rich calls it under its own, from whatever thread prints."""
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
        # The terminal itself writes `^C` behind the panel: without room for it the line would wrap.
        return Panel(grid, title="tinker-atropos run", width=max(20, self._console.width - 3))

    def _draw(self, above: str = "", style: str | None = None) -> None:
        """Show the panel as it is now, and above it a text that stays, in one print."""
        with suppress(OSError):  # the terminal was closed; the run goes on
            if above:
                self._console.print(above, style=style, markup=False, highlight=False)
            else:
                self._live.refresh()


class _Eta:
    """Seconds left, by the median-like pace of the steps seen in this process."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=16)
        self._last = time.monotonic()
        self.left: float | None = None

    def after(self, metrics: Mapping[str, float], total: int) -> float | None:
        now = time.monotonic()
        self._times.append(now - self._last)
        self._last = now
        recent = sorted(self._times)
        self.left = recent[len(recent) // 2] * max(0.0, total - metrics.get("step", 0))
        return self.left


def figures(metrics: Mapping[str, float], total: int, left: float | None) -> Sequence[tuple[str, str]]:
    """Return what the panel shows, name and value."""
    if not metrics:
        return [("step", "starting …")]
    rows = [("step", f"{int(metrics['step'])} / {total}")]
    for name, key, form in (
        ("env steps", "env_steps", "{:,.0f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("return", "episode/return", "{:.2f}"),
        ("eval reward", "eval/reward", "{:.3f}"),
        ("eval return", "eval/return", "{:.2f}"),
        ("loss", "loss", "{:+.4f}"),
        ("tokens/s", "tokens/per_second", "{:.0f}"),
        ("env steps/s", "env_steps/per_second", "{:,.0f}"),
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
