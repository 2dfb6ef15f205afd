"""A run shows itself as a panel on a terminal and as lines elsewhere; nothing a model says can steer the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest
from tinker_atropos.progress import PlainProgress, _Eta, duration, figures, make_progress, rollout_lines, step_line
from tinker_atropos.terminal import one_line, printable
from tinker_atropos.trajectory import Trajectory

METRICS = {"step": 3, "reward/mean": 0.25, "loss": -0.5, "tokens/per_second": 1234.5, "trainer/busy": 0.5}
HOSTILE = "\x1b]0;title\x07\x1b[31mred\x1b[2J\r\x08\x9b31m \u202egnp.exe\u2066"


def trajectory(*contents: Any, role: str = "assistant") -> Trajectory:
    messages = tuple({"role": role, "content": content} for content in contents)
    return Trajectory((), (1.0,), ("stop",), (), messages)


def test_plain_progress_puts_data_on_stdout_and_notices_on_stderr() -> None:
    out, notices = io.StringIO(), io.StringIO()
    progress = PlainProgress(out, notices)
    progress.say("waiting")
    progress.step(METRICS, 10)
    progress.rollout("step 3, task 1", trajectory("an answer"))
    assert notices.getvalue() == "waiting\n"
    first, *rest = out.getvalue().splitlines()
    assert first.startswith("step 3 / 10  reward 0.250  loss -0.5000  tokens/s 1234  trainer busy 50%  time left ")
    assert rest == ["  step 3, task 1", "    assistant: an answer", "    reward 1 (stop)"]


def test_figures_before_the_first_step_and_without_some_metrics() -> None:
    assert figures({}, 10, None) == [("step", "starting …")]
    assert step_line({"step": 1}, 2, None) == "step 1 / 2"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (7300, "2 h 01 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_models_text_carries_no_control_or_escape_sequence() -> None:
    out, notices = io.StringIO(), io.StringIO()
    progress = PlainProgress(out, notices)
    progress.rollout(HOSTILE, trajectory(HOSTILE, [{"type": "text", "text": HOSTILE}], None, role=HOSTILE))
    progress.say(HOSTILE)
    shown = out.getvalue() + notices.getvalue()
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert "\\x1b[31mred" in shown
    assert "\\u202egnp" in shown


def test_printable_keeps_what_people_write() -> None:
    for text in ("žluťoučký kůň 🐎", "نیم‌فاصله", "a\tb\nc", "日本語"):
        assert printable(text) == text
    assert printable("a\u00a0b\u2028\ud800") == "a b\\u2028\\ud800"
    assert one_line(" a\r\n b\x1b ") == "a b\\x1b"


def test_a_long_conversation_is_cut_to_a_few_lines() -> None:
    lines = rollout_lines(trajectory("\n".join(f"line {n}" for n in range(50)), "x" * 5000))
    assert len(lines) == 10
    assert lines[4] == "…"
    assert max(len(line) for line in lines) <= 115


def test_a_trajectory_of_no_turn_is_shown_all_the_same() -> None:
    assert rollout_lines(Trajectory((), (), (), (), ())) == ["reward 0 (no turn)"]


def test_lines_where_stdout_is_no_terminal_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(), PlainProgress)
    monkeypatch.setattr(sys, "stdout", None)
    progress = make_progress()
    progress.step(METRICS, 10)


PROGRAM = """
import sys, time
from tinker_atropos.progress import make_progress
from tinker_atropos.trajectory import Trajectory

def rollout(text):
    return Trajectory((), (1.0,), ("stop",), (), ({"role": "assistant", "content": text},))

progress = make_progress()
print(type(progress).__name__, file=sys.stderr)
progress.say("starting the trainer")
for number in range(3):
    progress.rollout(f"test problem {number + 1}", rollout(f"answer {number} \\x1b[2J" + "word " * 60))
progress.step({"step": 1, "reward/mean": 0.25, "eval/reward": 0.125}, 2)
sys.stdin.readline()
progress.step({"step": 2, "reward/mean": 0.75}, 2)
progress.close()
"""


def on_a_terminal(
    term: str = "xterm-256color", *, stderr: int | None = None, program: str = PROGRAM, **environment: str
) -> str:
    """Run the program on a pseudo-terminal, make that narrower in the middle; return all that it wrote."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    settings = {
        key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=side,
        stdout=side,
        stderr=side if stderr is None else stderr,
        env={**settings, "TERM": term, **environment},
        start_new_session=True,
    )
    os.close(side)
    seen, answered, deadline = b"", False, time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side was closed
            break
        if not part:
            break
        seen += part
        if not answered and b"0.250" in seen:
            fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
            process.send_signal(signal.SIGWINCH)
            os.write(main, b"\n")
            answered = True
    os.close(main)
    assert process.wait(timeout=10) == 0
    return seen.decode()


def test_the_panel_on_a_terminal_shows_everything_and_gives_the_terminal_back() -> None:
    shown = on_a_terminal()
    assert "PanelProgress" in shown
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    last = shown[shown.rindex("tinker-atropos run") :]
    assert "2 / 2" in last
    assert "0.750" in last
    assert "0.125" in last  # the evaluation of the step before
    for number in range(3):
        assert f"test problem {number + 1}" in shown
        assert f"answer {number} \\x1b[2J" in shown
    assert "\x1b[2J" not in shown
    assert "starting the trainer" in shown


def lines_of(shown: str) -> list[str]:
    """The lines that were written to a terminal, those that it overwrote as well."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_the_panel_leaves_room_for_what_the_terminal_echoes_and_steps_stay_above() -> None:
    shown = on_a_terminal()
    plain = lines_of(shown)
    borders = {len(line) for line in plain if line.startswith("╭")}
    assert borders == {97, 47}  # of 100 and of 50 columns
    assert [line.split("  ")[0] for line in plain if line.startswith("step ")] == ["step 1 / 2", "step 2 / 2"]


THREADS = """
import threading
from tinker_atropos.progress import make_progress
from tinker_atropos.trajectory import Trajectory

progress = make_progress()

def work(name):
    for number in range(20):
        progress.say(f"<{name} {number}>")
        text = f"<first {name} {number}>\\n<second {name} {number}>"
        progress.rollout(f"<title {name} {number}>", Trajectory((), (1.0,), ("stop",), (), ({"content": text},)))

threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
progress.step({"step": 1, "reward/mean": 0.25}, 2)
sys.stdin.readline()
progress.close()
"""


def test_notices_and_conversations_of_several_threads_stay_whole() -> None:
    shown = on_a_terminal(program="import sys\n" + THREADS)
    plain = lines_of(shown)
    above = [line.strip() for line in plain if line[0] not in "╭│╰"]
    for name in "abc":
        assert sum(line.startswith(f"<{name} ") for line in above) == 20
    titles = [place for place, line in enumerate(above) if line.startswith("<title")]
    assert len(titles) == 59  # the last is still in the panel
    for place in titles:
        mark = above[place].removeprefix("<title")
        assert above[place + 1 : place + 4] == [f"text: <first{mark}", f"<second{mark}", "reward 1 (stop)"]


def test_a_reader_who_has_gone_is_said_once_and_the_run_goes_on() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    notices = io.StringIO()
    out = os.fdopen(writing, "w")
    progress = PlainProgress(out, notices)
    for _ in range(2):
        progress.step(METRICS, 10)
        progress.rollout("title", trajectory("an answer"))
    assert notices.getvalue().count("stdout is closed") == 1
    with contextlib.suppress(BrokenPipeError):
        out.close()
    progress = PlainProgress(out, out)  # both closed, in this process
    progress.say("nobody hears it")
    progress.step(METRICS, 10)


def test_no_color_means_none() -> None:
    shown = on_a_terminal(NO_COLOR="1")
    assert "PanelProgress" in shown
    assert not [code for code in ("\x1b[36m", "\x1b[33m", "\x1b[2;36m") if code in shown]
    assert "2 / 2" in shown


def test_a_dumb_terminal_gets_plain_lines() -> None:
    shown = on_a_terminal("dumb")
    assert "PlainProgress" in shown
    assert "\x1b" not in shown
    assert "step 2 / 2  reward 0.750" in shown


def test_notices_go_to_stderr_where_that_is_a_file(tmp_path: Any) -> None:
    with (tmp_path / "notices").open("w") as file:
        shown = on_a_terminal(stderr=file.fileno())
    assert (tmp_path / "notices").read_text() == "PanelProgress\nstarting the trainer\n"
    assert "2 / 2" in shown


def test_the_time_left_keeps_no_more_steps_than_it_looks_at() -> None:
    eta = _Eta()
    for step in range(1, 101):
        eta.after({"step": step}, 200)
    assert len(eta._times) == 16
