"""Proves from the server's own journal that every group was trained exactly once, or discarded with a reason."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinker_atropos.registry import normal
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run_folder import Manifest, RunFolder
from tinker_atropos.trajectory import Segment
from tinker_atropos.yaml_file import read_yaml


class LedgerViolated(AssertionError):
    """The journal and the run's rollouts disagree; the message names the step and the group."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the proof covered: optimiser steps, groups trained and discarded, and data of the surviving lineage."""

    steps: int
    trained: int
    discarded: Mapping[str, int]
    data: int
    models: tuple[str, ...]


def check_ledger(journal: Path, run: Path) -> Ledger:
    """Raise `LedgerViolated` unless the surviving weights of a run were trained on exactly what its rollouts say.

    `journal` is the append-only file of the Tinker server, `run` the run's folder. From the journal alone it derives
    the surviving lineage: the last model, and back through each `load_state` to the `save_state` it loaded. It then
    holds each optimiser step of that lineage equal, datum by datum (a hash over tokens, targets, log-probabilities and
    advantages), to the groups that the rollouts give for this step; every task of the run's order must have ended once,
    trained or discarded; the manifests must list what was trained, all of it and nothing else; and each trained turn
    must come from a policy of its group's own lineage, within the run's bound of staleness. A datum lost, doubled,
    planted or trained in another step fails. The run must be at rest, and have a manifest: finished, stopped, or
    rewound by the start of its resumption.
    """
    steps, models = _surviving(_read_journal(journal))
    if not steps:
        raise LedgerViolated(f"{journal}: the surviving lineage took no optimiser step, so there is nothing to prove")
    manifests = RunFolder(run).manifests()
    if not manifests:
        raise LedgerViolated(
            f"{run / 'manifests'} holds no whole manifest, so the run is not at rest: a run that was killed before its "
            "first one begins anew. Continue it with --resume, then check again"
        )
    records = _records(run)
    expected: dict[int, Counter[str]] = {}
    config = read_yaml(run / "config.yaml")
    limit = _length_limit(config)
    for record in records:
        if record["outcome"] == "trained":
            hashes = expected.setdefault(record["step"], Counter())
            hashes.update(_hashes(record, limit))
    _compare(steps, expected)
    _each_once(records, manifests[-1])
    _manifests_agree(manifests, records, len(steps))
    _fresh(records, _staleness_bound(config, run), manifests)
    return Ledger(
        steps=len(steps),
        trained=sum(record["outcome"] == "trained" for record in records),
        discarded=dict(Counter(record["reason"] for record in records if record["outcome"] == "discarded")),
        data=sum(sum(data.values()) for data in steps.values()),
        models=tuple(models),
    )


def datum_hash(tokens: Any, targets: Any, logprobs: Any, advantages: Any) -> str:
    """Return the SHA-256 of a datum: int32, int32, float32, float32, each behind its length in bytes (uint64, LE)."""
    digest = hashlib.sha256()
    for values, dtype in ((tokens, "<i4"), (targets, "<i4"), (logprobs, "<f4"), (advantages, "<f4")):
        raw = np.asarray(values).reshape(-1).astype(dtype).tobytes()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def segment_hash(segment: Segment) -> str:
    """Return the hash of the datum that a segment (with its trained advantages) becomes: shifted by one token."""
    mask = segment.mask[1:]
    assert segment.advantages is not None
    return datum_hash(
        segment.tokens[:-1],
        segment.tokens[1:],
        np.where(mask, segment.logprobs[1:], np.float32(0)),
        np.where(mask, segment.advantages[1:], np.float32(0)),
    )


def _read_journal(path: Path) -> list[dict[str, Any]]:
    events = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LedgerViolated(f"the journal {str(path)!r} can't be read: {error.strerror}") from None
    for raw in lines:
        try:
            event = json.loads(raw)
        except ValueError:
            continue  # torn by a power cut; whatever it would have said was not acknowledged
        if isinstance(event, dict) and "seq" in event:
            events.append(event)
    order = [event["seq"] for event in events]
    for place, number in enumerate(order):
        if number != place:
            raise LedgerViolated(
                f"{path}: the journal's numbers must rise by one; line {place} of them has {number!r}, so a line is "
                "missing, doubled or moved"
            )
    return events


def _surviving(events: Sequence[Mapping[str, Any]]) -> tuple[dict[int, Counter[str]], list[str]]:
    """Return what each optimiser step of the surviving lineage trained on, and its models, oldest first."""
    # A state that was opened without its optimiser is not trained on: that is how weights are downloaded.
    trained = [
        event
        for event in events
        if event["event"] in ("optim_step", "create_model")
        or (event["event"] == "load_state" and event.get("optimizer", True))
    ]
    if not trained:
        raise LedgerViolated("the journal holds no model")
    model, until = trained[-1]["model"], events[-1]["seq"] + 1
    steps: dict[int, Counter[str]] = {}
    models = [model]
    while True:
        own = [event for event in events if event["model"] == model and event["seq"] < until]
        loads = [place for place, event in enumerate(own) if event["event"] == "load_state"]
        tail = own[loads[-1] + 1 :] if loads else own
        pending: Counter[str] = Counter()
        for event in tail:
            if event["event"] == "forward_backward":
                pending.update(event["data"])
            elif event["event"] == "optim_step":
                if event["step"] in steps:
                    raise LedgerViolated(f"optimiser step {event['step']} was taken twice in the surviving lineage")
                steps[event["step"]], pending = pending, Counter()
        if not loads:
            return steps, models
        path = own[loads[-1]]["path"]
        saves = [
            e for e in events if e["event"] == "save_state" and e["path"] == path and e["seq"] < own[loads[-1]]["seq"]
        ]
        if not saves:
            raise LedgerViolated(f"{path} was loaded, but the journal never saw it saved")
        model, until = saves[-1]["model"], saves[-1]["seq"]
        models.insert(0, model)


def _records(run: Path) -> list[dict[str, Any]]:
    """Return what the rollouts of the surviving lineage hold, each record in the file of its own step."""
    records = []
    for path in sorted((run / "rollouts").glob("step-*.jsonl.gz")):
        for record in read_records(path):
            if path.name != f"step-{record['step']:06d}.jsonl.gz":
                raise LedgerViolated(f"{path}: group {record['group']} says it ended with step {record['step']}")
            records.append(record)
    return records


def _hashes(record: Mapping[str, Any], limit: int | None) -> Iterable[str]:
    for trajectory in record["trajectories"]:
        for segment in trajectory["segments"]:
            if segment["advantages"] is None:
                raise LedgerViolated(f"step {record['step']}: group {record['group']} was trained without advantages")
            if not any(segment["mask"][1:]) or (limit is not None and len(segment["tokens"]) > limit):
                continue  # nothing in it is trained on
            yield segment_hash(
                Segment(
                    np.asarray(segment["tokens"], np.int32),
                    np.asarray(segment["logprobs"], np.float32),
                    np.asarray(segment["mask"], bool),
                    np.asarray(segment["advantages"], np.float32),
                )
            )


def _compare(steps: Mapping[int, Counter[str]], expected: Mapping[int, Counter[str]]) -> None:
    if sorted(steps) != list(range(1, len(steps) + 1)):
        raise LedgerViolated(
            f"the surviving lineage has the optimiser steps {sorted(steps)}; one is missing or doubled"
        )
    if sorted(expected) != sorted(steps):
        extra = sorted(set(expected) ^ set(steps))
        raise LedgerViolated(f"steps {extra} stand in the journal or in the rollouts, not in both")
    for step in sorted(steps):
        lost, planted = expected[step] - steps[step], steps[step] - expected[step]
        if lost:
            raise LedgerViolated(f"step {step}: {lost.total()} data of its rollouts were not trained on: lost")
        if planted:
            raise LedgerViolated(f"step {step}: {planted.total()} data were trained on that its rollouts do not hold")


def _each_once(records: Sequence[Mapping[str, Any]], manifest: Manifest) -> None:
    ended = Counter(record["ordinal"] for record in records)
    doubled = sorted(ordinal for ordinal, count in ended.items() if count > 1)
    if doubled:
        raise LedgerViolated(f"tasks {doubled[:8]} of the run's order ended twice in the surviving lineage")
    ids = Counter(record["group"] for record in records)
    twice = sorted(id for id, count in ids.items() if count > 1)
    if twice:
        raise LedgerViolated(f"groups {twice[:8]} stand in the rollouts twice")
    unexplained = [record["group"] for record in records if record["outcome"] != "trained" and not record["reason"]]
    if unexplained:
        raise LedgerViolated(f"groups {unexplained[:8]} were discarded without a reason")
    left_open, given_out = set(manifest.cursor["open"]), manifest.cursor["next"]
    missing = sorted(set(range(given_out)) - set(ended) - left_open)
    if missing:
        raise LedgerViolated(f"tasks {missing[:8]} of the run's order were given out and never ended: lost")
    early = sorted(r["ordinal"] for r in records if r["ordinal"] >= given_out and r["step"] <= manifest.step)
    if early:
        raise LedgerViolated(
            f"tasks {early[:8]} have ended by step {manifest.step}, yet its manifest says that only the {given_out} "
            "tasks before them were given out"
        )
    again = sorted(r["ordinal"] for r in records if r["ordinal"] in left_open and r["step"] <= manifest.step)
    if again:
        raise LedgerViolated(
            f"tasks {again[:8]} have ended, yet the manifest of step {manifest.step} gives them out again"
        )


def _manifests_agree(manifests: Sequence[Manifest], records: Sequence[Mapping[str, Any]], steps: int) -> None:
    """The run's own checkpoints must claim what the journal proves, no more and no less."""
    newest = manifests[-1]
    if newest.step > steps or (newest.finished and newest.step != steps):
        raise LedgerViolated(
            f"the newest manifest is of step {newest.step}, the journal's surviving lineage has {steps}"
        )
    trained = {record["group"] for record in records if record["outcome"] == "trained"}
    claimed = Counter(id for manifest in manifests for id in manifest.consumed)
    wrong = sorted(id for id, count in claimed.items() if count > 1 or id not in trained)
    if wrong:
        raise LedgerViolated(f"manifests list the groups {wrong[:8]} as consumed that were not trained exactly once")
    due = {record["group"] for record in records if record["outcome"] == "trained" and record["step"] <= newest.step}
    untold = sorted(due - set(claimed))
    if untold:
        raise LedgerViolated(
            f"groups {untold[:8]} were trained on by step {newest.step}, and no manifest lists them as consumed"
        )


def _fresh(records: Sequence[Mapping[str, Any]], bound: int, manifests: Sequence[Manifest]) -> None:
    """Each trained turn was sampled by a policy that the weights had been, at most `bound` optimiser steps before."""
    for record in records:
        if record["outcome"] != "trained":
            continue
        newest, id = record["step"] - 1, record["group"]
        policies = [policy for trajectory in record["trajectories"] for policy in trajectory["policies"]]
        foreign = sorted({p["lineage"] for p in policies if not _was(p, id, record["step"], manifests)})
        if foreign:
            raise LedgerViolated(f"step {newest + 1}: group {id} was sampled by policies of the lineages {foreign}")
        steps = [policy["step"] for policy in policies]
        if steps and newest - min(steps) > bound:
            raise LedgerViolated(
                f"step {newest + 1}: group {id} is {newest - min(steps)} steps old; the run allows {bound}"
            )
        if steps and max(steps) > newest:
            raise LedgerViolated(
                f"step {newest + 1}: group {id} was sampled by the policy of step {max(steps)}, which came later"
            )


def _was(policy: Mapping[str, Any], id: str, step: int, manifests: Sequence[Manifest]) -> bool:
    """Whether a policy is of the lineage that trained the group, or one that this came from.

    A group that was rolled out here names its lineage in its id; one that was handed in may be of an older one.
    """
    lineage, dash, ordinal = id.partition("-")
    if dash and lineage.isdecimal() and ordinal.isdecimal():
        return str(policy["lineage"]) == lineage
    manifest = next((manifest for manifest in manifests if manifest.step >= step), None)
    if manifest is None or policy["lineage"] == manifest.lineage:
        return True
    return any(policy["lineage"] == old and policy["step"] <= last for old, last in manifest.ancestry)


def _staleness_bound(config: Mapping[str, Any], run: Path) -> int:
    bound = (config.get("rollout") or {}).get("max_staleness")
    bound = (config.get("env") or {}).get("max_batches_offpolicy") if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise LedgerViolated(
            f"{run / 'config.yaml'}: names neither rollout.max_staleness nor env.max_batches_offpolicy, which bound "
            "the staleness; a run writes both there"
        )
    return bound


def _length_limit(config: Mapping[str, Any]) -> int | None:
    trainer = config.get(normal(str((config.get("run") or {}).get("trainer")))) or {}
    limit = trainer.get("max_token_trainer_length")
    return int(limit) if limit is not None else None
