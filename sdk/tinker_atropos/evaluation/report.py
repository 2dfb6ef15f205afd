"""From the records of an evaluation to its figures, as JSON-ready values and as lines to read. Asks nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinker_atropos.evaluation.folder import Record
from tinker_atropos.evaluation.statistics import LEVEL, Estimate, estimate, pass_at_k

CORRECT = "correct"
"""The metric by which an environment says itself whether an episode passed, where the user names no threshold."""

ROUNDING = 1e-9  # a reward that is a sum of weighted terms may miss the threshold by this


def by_task(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Return the whole episodes of each task, in order of their sample."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record["task"], record["sample"])):
        if not record.get("failed"):
            found.setdefault(record["task"], []).append(record)
    return found


def summary(
    settings: Mapping[str, Any],
    records: Iterable[Record],
    *,
    threshold: float,
    failed: Mapping[str, int],
    given: bool = False,
) -> dict[str, Any]:
    """Return the figures. Means are over tasks, each the mean of its samples; a failed episode counts in none of them.

    An episode passes by its metric `correct` where all have one, else, or where `given` says that the user named the
    threshold, by its reward.

    Raises `ValueError` where there is no whole episode.
    """
    tasks = by_task(records)
    whole = [record for samples in tasks.values() for record in samples]
    if not whole:
        raise ValueError("no whole episode to report on")
    finishes = Counter(str(record["finishes"][-1]) for record in whole)
    by_metric = not given and all(CORRECT in record["metrics"] for record in whole)
    passed = _is_correct if by_metric else lambda record: bool(record["reward"] >= threshold - ROUNDING)
    expected = settings["tasks"] * settings["samples"]
    return {
        "environment": settings["environment"]["reference"],
        "model": settings["model"],
        "split": settings["split"],
        "seed": settings["seed"],
        "sampling": settings["sampling"],
        "tasks": len(tasks),
        "samples": settings["samples"],
        "episodes": len(whole),
        "missing": expected - len(whole),
        "failed": dict(failed),
        "level": LEVEL,
        "reward": _estimate(_means(tasks, lambda record: record["reward"])),
        "pass_by": CORRECT if by_metric else "reward",
        "pass_threshold": threshold,
        "largest_reward": max(record["reward"] for record in whole),
        "pass": {str(k): found for k in range(1, settings["samples"] + 1) if (found := _pass(tasks, k, passed))},
        "metrics": _metrics(tasks, whole),
        "finish_reasons": dict(sorted(finishes.items())),
        "truncated": sum(bool(record["truncated"] or record["finish_reasons"][-1] == "length") for record in whole),
        "turns": sum(len(record["rewards"]) for record in whole),
        "tokens": {kind: _tokens(whole, kind) for kind in ("prompt", "sampled")},
    }


def _means(tasks: Mapping[int, Sequence[Record]], value: Any) -> list[float]:
    return [sum(map(value, samples)) / len(samples) for samples in tasks.values()]


def _is_correct(record: Record) -> bool:
    return bool(record["metrics"][CORRECT] >= 1 - ROUNDING)


def _pass(tasks: Mapping[int, Sequence[Record]], k: int, passed: Callable[[Record], bool]) -> dict[str, Any] | None:
    """Return pass@k over the tasks that have k whole samples, None where none has."""
    rates = [pass_at_k(len(samples), sum(map(passed, samples)), k) for samples in tasks.values() if len(samples) >= k]
    return _estimate(rates) if rates else None


def _metrics(tasks: Mapping[int, Sequence[Record]], whole: Sequence[Record]) -> dict[str, Any]:
    found = {}
    for name in sorted({name for record in whole for name in record["metrics"]}):
        per_task = [
            sum(values) / len(values)
            for samples in tasks.values()
            if (values := [float(record["metrics"][name]) for record in samples if name in record["metrics"]])
        ]
        found[name] = _estimate(per_task)
    return found


def _tokens(whole: Sequence[Record], kind: str) -> dict[str, float] | None:
    counts = [record["tokens"][kind] for record in whole]
    if any(count is None for count in counts):
        return None
    return {"total": sum(counts), "per_episode": sum(counts) / len(counts)}


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    found: Estimate = estimate(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "tasks": found.tasks}


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as an aligned table."""
    rows = [("measure", "mean", f"{report['level']:.0%} interval", "tasks")]
    rows.append(("reward", *_cells(report["reward"])))
    rows += [(f"pass@{k}", *_cells(entry)) for k, entry in report["pass"].items()]
    rows += [(name, *_cells(entry)) for name, entry in report["metrics"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    episodes = report["episodes"]
    share = f" ({report['truncated'] / episodes:.0%})"
    said = [
        f"{report['environment']}, split {report['split']}: {report['tasks']} tasks x {report['samples']} samples, "
        f"{episodes} episodes, seed {report['seed']}, temperature {report['sampling']['temperature']:g}",
        "",
        table[0].upper(),
        *table[1:],
        "",
        f"pass            {_pass_rule(report)}",
        "finish reasons  " + ", ".join(f"{reason} {number}" for reason, number in report["finish_reasons"].items()),
        f"truncated       {report['truncated']}{share if report['truncated'] else ''}",
        "tokens          " + _token_line(report["tokens"]),
    ]
    if report["missing"]:
        causes = ", ".join(f"{cause} {number}" for cause, number in report["failed"].items()) or "not asked yet"
        said.append(f"missing         {report['missing']} episodes ({causes}); no figure counts them")
    return said


def _pass_rule(report: Mapping[str, Any]) -> str:
    if report["pass_by"] == CORRECT:
        return f"metric {CORRECT!r} is 1"
    threshold, largest = report["pass_threshold"], report["largest_reward"]
    rule = f"reward >= {threshold:g}"
    if largest >= threshold - ROUNDING:
        return rule
    return (
        f"{rule}; warning: no reward reached it, the largest is {largest:g}. If an answer that earns less is right, "
        "name the reward from which one passes with --pass-threshold"
    )


def _cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    interval = "none: all alike" if entry["tasks"] > 1 else "none: one task"
    if entry["low"] is not None:
        interval = f"{entry['low']:.3f} to {entry['high']:.3f}"
    return f"{entry['mean']:.3f}", interval, str(entry["tasks"])


def _token_line(tokens: Mapping[str, Any]) -> str:
    parts = [
        f"{kind} "
        + (
            "not counted by the endpoint"
            if found is None
            else f"{found['total']:,} ({found['per_episode']:.1f} an episode)"
        )
        for kind, found in tokens.items()
    ]
    return ", ".join(parts)
