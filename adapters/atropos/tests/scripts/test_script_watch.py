"""A silent script is named within 30 s by what it is at; a clock of the test's own."""

from __future__ import annotations

import pytest
from tinker_atropos.errors import RunError
from tinker_atropos_atropos.script_watch import QUIET_SECONDS, Limits, Seen, Watch


def watch(*names: str) -> Watch:
    return Watch(names or ("math",), Limits(startup=300, idle=600, log_lines=3), lambda name, n: [f"{name} said"], 0.0)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Seen(), "has not registered"),
        (Seen(registered=True), "registered and posted no group"),
        (Seen(registered=True, posted=3), "posted no further group"),
    ],
)
def test_the_stage_is_named_within_30_s_with_the_end_of_the_log(seen: Seen, said: str) -> None:
    one = watch()
    assert QUIET_SECONDS <= 30
    assert one.look(1.0, {"math": seen}, enough=False) == []
    (line,) = one.look(31.0, {"math": seen}, enough=False)
    assert said in line
    assert "math said" in line
    assert one.look(32.0, {"math": seen}, enough=False) == []


def test_it_is_said_again_at_doubling_intervals() -> None:
    one = watch()
    times = [now for now in range(290) if one.look(float(now), {}, enough=False)]
    assert times == [30, 60, 120, 240]


def test_progress_begins_the_count_anew() -> None:
    one = watch()
    for now in range(0, 5000, 20):
        assert one.look(float(now), {"math": Seen(True, now)}, enough=False) == []


def test_while_the_trainer_is_the_slow_one_nobody_complains() -> None:
    one = watch()
    for now in range(0, 10_000, 50):
        assert one.look(float(now), {"math": Seen(True, 3)}, enough=True) == []


def test_refused_groups_are_no_progress_and_their_reason_is_told() -> None:
    one = watch()
    seen = [Seen(True, 0, refused=n, last_refusal="422 tokens: expected int, got str") for n in range(400)]
    lines = [line for now in range(40) for line in one.look(float(now), {"math": seen[now]}, enough=False)]
    assert "refused 30 of its groups, the last because 422 tokens" in lines[0]
    with pytest.raises(RunError, match=r"(?s)startup_timeout 300.*refused.*math said"):
        one.look(301.0, {"math": seen[301]}, enough=False)


def test_a_script_that_never_registers_ends_the_run() -> None:
    with pytest.raises(RunError, match="has not registered"):
        watch("math", "gsm8k").look(300.0, {"gsm8k": Seen(True, 5)}, enough=False)


def test_one_that_falls_silent_while_another_works_is_named_and_harms_nothing() -> None:
    one = watch("math", "gsm8k")
    lines = []
    for now in range(0, 2000, 10):
        lines += one.look(float(now), {"math": Seen(True, 1), "gsm8k": Seen(True, now)}, enough=False)
    assert lines
    assert all(line.startswith("math") for line in lines)


def test_all_silent_for_long_ends_the_run() -> None:
    one = watch("math", "gsm8k")
    seen = {"math": Seen(True, 1), "gsm8k": Seen(True, 1)}
    one.look(0.0, seen, enough=False)
    with pytest.raises(RunError, match=r"math, gsm8k posted nothing for 600 s"):
        one.look(601.0, seen, enough=False)
