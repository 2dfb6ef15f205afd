"""check_ledger passes a run whose journal and rollouts agree, and fails on each planted disagreement."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos.contract_tests.ledger import segment_hash
from tinker_atropos.rollout.records import group_record, write_records
from tinker_atropos.run_folder import Manifest, write_atomically
from tinker_atropos.testing import LedgerViolated, check_ledger
from tinker_atropos.trainer import Checkpoint
from tinker_atropos.trajectory import Group, PolicyRef, Segment, TaskRef, Trajectory

PER_STEP = 2


def ordinal_of(group: Group) -> int:
    return int(group.id.partition("-")[2])


def make_group(ordinal: int, lineage: int, step: int, *, sampled: bool = True) -> Group:
    """Return a group of two trajectories of three tokens, each group with its own."""
    trajectories = []
    for member in range(2):
        mask = np.array([False, sampled, sampled])
        advantages = np.where(mask, np.float32(member - 0.5), np.float32(0))
        tokens = np.array([ordinal, member, lineage], np.int32)
        logprobs = np.array([0.0, -0.1, -0.3], np.float32)
        segment = Segment(tokens, logprobs, mask, advantages.astype(np.float32))
        ref = PolicyRef("run", lineage, step - 1, f"test://{lineage}/{step - 1}")
        trajectories.append(Trajectory((segment,), (float(member),), ("stop",), (ref,), ()))
    return Group(f"{lineage}-{ordinal:06d}", TaskRef("train", ordinal, ordinal), tuple(trajectories))


def hashes(groups: list[Group]) -> list[str]:
    return [segment_hash(t.segments[0]) for g in groups for t in g.trajectories if t.segments[0].mask.any()]


@dataclass
class Planted:
    """A journal and a run folder made by hand: `PER_STEP` groups a step, a manifest where one is saved."""

    root: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    model: str = "m0"
    lineage: int = 0
    next: int = 0
    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    bound: dict[str, Any] = field(
        default_factory=lambda: {"env": {"max_batches_offpolicy": 1}, "rollout": {"max_staleness": 0}}
    )

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    def event(self, name: str, step: int, **fields: Any) -> None:
        self.events.append({"time": 0.0, "event": name, "model": self.model, "step": step, **fields})

    def create(self, model: str) -> None:
        self.model = model
        self.event("create_model", 0)

    def groups(self, step: int, count: int = PER_STEP, **settings: Any) -> list[Group]:
        made = [make_group(self.next + place, self.lineage, step, **settings) for place in range(count)]
        self.next += count
        return made

    def train(self, step: int, **settings: Any) -> None:
        self.record(step, self.groups(step, **settings))

    def record(self, step: int, groups: list[Group]) -> None:
        self.event("forward_backward", step - 1, data=hashes(groups), loss="importance_sampling")
        self.event("optim_step", step)
        rows = [group_record(g, outcome="trained", step=step, ordinal=ordinal_of(g)) for g in groups]
        self.records.setdefault(step, []).extend(rows)
        self.consumed += [group.id for group in groups]

    def discard(self, step: int, reason: str = "equal_scores") -> None:
        (group,) = self.groups(step, 1)
        row = group_record(group, outcome="discarded", step=step, ordinal=ordinal_of(group), reason=reason)
        self.records.setdefault(step, []).append(row)

    def save(self, step: int, *, finished: bool = False, open: tuple[int, ...] = (), next: int | None = None) -> str:
        path = f"tinker://{self.model}/weights/step-{step}"
        self.event("save_state", step, path=path)
        self.event("save_sampler", step, path=path.replace("weights", "sampler_weights"))
        checkpoint = Checkpoint(f"step-{step}", step, path, path)
        cursor = {"next": self.next if next is None else next, "open": list(open)}
        manifest = Manifest("run", self.lineage, step, checkpoint, tuple(self.consumed), cursor, finished)
        self.consumed = []
        folder = self.root / "manifests"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step-{step:06d}.json", json.dumps(manifest.as_dict()).encode())
        return path

    def die_and_resume(self, path: str, step: int, next: int) -> None:
        """What a resumption does: later rollouts are put aside, a new model loads the state."""
        self.records = {number: rows for number, rows in self.records.items() if number <= step}
        self.consumed, self.next, self.lineage = [], next, self.lineage + 1
        self.create(f"m{self.lineage}")
        self.event("load_state", step, path=path, optimizer=True)

    def write(self, **config: Any) -> None:
        lines = [json.dumps({"seq": place, **event}) for place, event in enumerate(self.events)]
        self.journal.write_text("".join(f"{line}\n" for line in lines))
        (self.root / "rollouts").mkdir(exist_ok=True)
        for step, rows in self.records.items():
            write_records(self.root / "rollouts" / f"step-{step:06d}.jsonl.gz", rows)
        content = {"run": {"trainer": "tin-ker"}, "tin_ker": config, **self.bound}
        (self.root / "config.yaml").write_text(json.dumps(content))

    def check(self, **config: Any) -> Any:
        self.write(**config)
        return check_ledger(self.journal, self.root)

    def violation(self) -> str:
        with pytest.raises(LedgerViolated) as raised:
            self.check()
        return str(raised.value)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """A sound run of four steps, with a discarded group."""
    run = Planted(tmp_path)
    run.create("m0")
    for step in (1, 2, 3, 4):
        run.train(step)
        if step == 2:
            run.save(2)
            run.discard(3)
    run.save(4, finished=True)
    return run


@pytest.fixture
def resumed(tmp_path: Path) -> Planted:
    """A run that died after step 3 and 4 of its first lineage, and was continued from its manifest of step 2."""
    run = Planted(tmp_path)
    run.create("m0")
    run.train(1)
    run.train(2)
    path = run.save(2, open=(4,), next=5)
    run.train(3)
    run.train(4)
    run.die_and_resume(path, 2, 4)
    run.train(3)
    run.train(4)
    run.save(4, finished=True)
    return run


def test_a_sound_run_passes_and_is_counted(planted: Planted) -> None:
    ledger = planted.check()
    assert (ledger.steps, ledger.trained, dict(ledger.discarded), ledger.data) == (4, 8, {"equal_scores": 1}, 16)
    assert ledger.models == ("m0",)


def test_a_resumed_run_passes_without_the_dead_steps(resumed: Planted) -> None:
    ledger = resumed.check()
    assert (ledger.steps, ledger.trained, ledger.data, ledger.models) == (4, 8, 16, ("m0", "m1"))


def test_a_run_that_died_twice_at_one_step_passes(resumed: Planted) -> None:
    path = next(event["path"] for event in reversed(resumed.events) if event["event"] == "save_state")
    for _ in range(2):
        resumed.die_and_resume(path, 4, 8)
        resumed.train(5)
    resumed.save(5, finished=True)
    assert resumed.check().models == ("m0", "m1", "m3")


def test_rewinding_within_one_model_passes(planted: Planted) -> None:
    planted.train(5)
    path = next(event["path"] for event in planted.events if event["event"] == "save_state" and event["step"] == 4)
    del planted.records[5]
    planted.next, planted.consumed = 9, []
    planted.event("load_state", 4, path=path)
    planted.lineage = 1
    planted.train(5)
    planted.save(5, finished=True)
    assert planted.check().models == ("m0", "m0")


def test_a_batch_in_several_forward_backward_calls_passes(planted: Planted) -> None:
    first = next(event for event in planted.events if event["event"] == "forward_backward")
    place = planted.events.index(first)
    rest = {**first, "data": first["data"][1:]}
    planted.events[place : place + 1] = [{**first, "data": first["data"][:1]}, rest]
    planted.check()


def test_a_stopped_run_with_open_tasks_passes(tmp_path: Path) -> None:
    run = Planted(tmp_path)
    run.create("m0")
    run.train(1)
    run.save(1, open=(2, 3), next=4)
    run.check()


def test_segments_that_cannot_be_trained_on_are_not_missed(tmp_path: Path) -> None:
    run = Planted(tmp_path)
    run.create("m0")
    run.train(1)
    run.record(2, run.groups(2, sampled=False))
    run.save(2, finished=True)
    assert run.check().data == 4


def test_segments_beyond_the_trainers_limit_are_not_missed(planted: Planted) -> None:
    with pytest.raises(LedgerViolated, match="that its rollouts do not hold"):
        planted.check(max_token_trainer_length=2)
    for event in planted.events:
        if event["event"] == "forward_backward":
            event["data"] = []
    assert planted.check(max_token_trainer_length=2).data == 0


@pytest.mark.parametrize("torn", [b'{"seq": 99, "event": "optim', b"\x00\x00\x00", b"[]\n"])
def test_a_torn_last_line_is_tolerated(planted: Planted, torn: bytes) -> None:
    planted.write()
    with planted.journal.open("ab") as file:
        file.write(torn)
    check_ledger(planted.journal, planted.root)


def test_gradients_that_never_reached_an_optimiser_step_do_not_count(planted: Planted) -> None:
    planted.event("forward_backward", 4, data=hashes(planted.groups(5)), loss="importance_sampling")
    planted.check()


def forward(planted: Planted, step: int) -> dict[str, Any]:
    return [event for event in planted.events if event["event"] == "forward_backward"][step - 1]


def test_a_planted_loss_fails(planted: Planted) -> None:
    forward(planted, 2)["data"].pop()
    assert planted.violation() == "step 2: 1 data of its rollouts were not trained on: lost"


def test_a_planted_duplicate_fails(planted: Planted) -> None:
    data = forward(planted, 3)["data"]
    data.append(data[0])
    assert planted.violation() == "step 3: 1 data were trained on that its rollouts do not hold"


def test_a_batch_sent_twice_fails(planted: Planted) -> None:
    batch = forward(planted, 3)
    planted.events.insert(planted.events.index(batch), dict(batch))
    assert "step 3: 4 data were trained on" in planted.violation()


def test_a_datum_of_another_step_fails(planted: Planted) -> None:
    forward(planted, 3)["data"].append(forward(planted, 2)["data"].pop())
    assert planted.violation() == "step 2: 1 data of its rollouts were not trained on: lost"


def test_a_datum_that_no_rollout_holds_fails(planted: Planted) -> None:
    forward(planted, 4)["data"].append("0" * 64)
    assert "step 4: 1 data were trained on that its rollouts do not hold" in planted.violation()


@pytest.mark.parametrize("changed", ["tokens", "logprobs", "advantages"])
def test_a_rollout_that_differs_in_one_number_fails(planted: Planted, changed: str) -> None:
    planted.records[2][0]["trajectories"][0]["segments"][0][changed][1] += 1
    assert "step 2" in planted.violation()


def test_training_on_a_discarded_group_fails(planted: Planted) -> None:
    row = next(row for rows in planted.records.values() for row in rows if row["outcome"] == "discarded")
    forward(planted, 3)["data"] += hashes([make_group(row["ordinal"], 0, 3)])
    assert "step 3: 2 data were trained on" in planted.violation()


def test_a_step_taken_twice_fails(planted: Planted) -> None:
    planted.event("optim_step", 4)
    assert "optimiser step 4 was taken twice" in planted.violation()


def test_a_missing_step_fails(planted: Planted) -> None:
    planted.events = [event for event in planted.events if event["step"] != 3 or event["event"] != "optim_step"]
    assert "one is missing or doubled" in planted.violation()


def test_a_step_without_rollouts_fails(planted: Planted) -> None:
    del planted.records[4]
    assert "steps [4] stand in the journal or in the rollouts, not in both" in planted.violation()


def test_a_lost_task_fails(planted: Planted) -> None:
    planted.records[3] = [row for row in planted.records[3] if row["outcome"] == "trained"]
    assert planted.violation() == "tasks [4] of the run's order were given out and never ended: lost"


def test_a_task_given_out_after_the_last_that_ended_is_not_forgotten(planted: Planted) -> None:
    planted.save(4, finished=True, next=planted.next + 2)
    assert planted.violation() == "tasks [9, 10] of the run's order were given out and never ended: lost"


def test_a_task_that_ended_and_is_to_be_given_out_again_fails(planted: Planted) -> None:
    planted.save(4, open=(1,))
    assert "tasks [1] have ended, yet the manifest of step 4 gives them out again" in planted.violation()


def test_a_task_that_ended_twice_fails(planted: Planted) -> None:
    planted.records[4].append({**planted.records[4][0], "outcome": "discarded", "reason": "stale"})
    assert "ended twice" in planted.violation()


def test_a_group_discarded_without_a_reason_fails(planted: Planted) -> None:
    planted.records[3][0]["reason"] = ""
    assert planted.violation() == "groups ['0-000004'] were discarded without a reason"


def test_rollouts_of_a_dead_lineage_that_still_count_fail(resumed: Planted) -> None:
    dead = [make_group(ordinal, 0, 3) for ordinal in (4, 5)]
    resumed.records[3] = [group_record(g, outcome="trained", step=3, ordinal=ordinal_of(g)) for g in dead]
    assert "step 3: 4 data of its rollouts were not trained on: lost" in resumed.violation()


def test_a_resumption_that_loaded_an_older_state_fails(resumed: Planted) -> None:
    load = next(event for event in resumed.events if event["event"] == "load_state")
    load["path"] = "tinker://m0/weights/step-1"
    place = next(place for place, event in enumerate(resumed.events) if event["step"] == 2)
    resumed.events.insert(place, {"event": "save_state", "model": "m0", "step": 1, "path": load["path"], "time": 0.0})
    assert "one is missing or doubled" in resumed.violation()


def test_a_state_that_was_never_saved_fails(resumed: Planted) -> None:
    resumed.events = [event for event in resumed.events if event["event"] != "save_state"]
    assert "was loaded, but the journal never saw it saved" in resumed.violation()


def test_a_manifest_beyond_the_journal_fails(planted: Planted) -> None:
    planted.save(5, finished=True)
    assert planted.violation() == "the newest manifest is of step 5, the journal's surviving lineage has 4"


def test_a_manifest_that_lists_what_was_not_trained_fails(planted: Planted) -> None:
    planted.consumed = ["0-000099"]
    planted.save(4, finished=True)
    assert "manifests list the groups ['0-000099'] as consumed" in planted.violation()


def test_a_trained_group_that_no_manifest_lists_fails(planted: Planted) -> None:
    planted.train(5)
    lost = planted.consumed.pop()
    planted.save(5, finished=True)
    assert planted.violation() == f"groups ['{lost}'] were trained on by step 5, and no manifest lists them as consumed"


def test_a_task_that_ended_before_it_was_given_out_fails(planted: Planted) -> None:
    planted.consumed = ["0-000005", "0-000006", "0-000007", "0-000008"]
    planted.save(4, finished=True, next=8)
    assert "tasks [8] have ended by step 4, yet its manifest says that only the 8 tasks" in planted.violation()


def policies(planted: Planted, step: int) -> list[dict[str, Any]]:
    """The policies of the first trained group of a step; the data don't depend on them."""
    record = next(row for row in planted.records[step] if row["outcome"] == "trained")
    return [policy for trajectory in record["trajectories"] for policy in trajectory["policies"]]


def test_a_group_older_than_the_runs_bound_fails(planted: Planted) -> None:
    policies(planted, 4)[1]["step"] = 2
    assert planted.violation() == "step 4: group 0-000007 is 1 steps old; the run allows 0"
    planted.bound["rollout"]["max_staleness"] = None
    planted.check()
    policies(planted, 4)[0]["step"] = 1
    assert planted.violation() == "step 4: group 0-000007 is 2 steps old; the run allows 1"
    planted.bound = {}
    assert "names neither rollout.max_staleness nor env.max_batches_offpolicy" in planted.violation()


def test_a_policy_that_came_after_the_step_fails(planted: Planted) -> None:
    policies(planted, 2)[0]["step"] = 2
    assert "sampled by the policy of step 2, which came later" in planted.violation()


def test_a_policy_of_another_lineage_fails(resumed: Planted) -> None:
    policies(resumed, 4)[0]["lineage"] = 0
    assert resumed.violation() == "step 4: group 1-000006 was sampled by policies of the lineages [0]"


def test_a_record_in_the_file_of_another_step_fails(planted: Planted) -> None:
    planted.records[2][0]["step"] = 3
    assert "step-000002.jsonl.gz: group 0-000002 says it ended with step 3" in planted.violation()


def test_a_run_without_a_manifest_is_not_at_rest(tmp_path: Path) -> None:
    run = Planted(tmp_path)
    run.create("m0")
    run.train(1)
    assert "holds no whole manifest, so the run is not at rest" in run.violation()
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "step-000001.json").write_text("{")
    assert "holds no whole manifest" in run.violation()


@pytest.mark.parametrize("change", ["missing", "doubled", "moved"])
def test_a_journal_that_was_edited_fails(planted: Planted, change: str) -> None:
    planted.write()
    lines = planted.journal.read_text().splitlines(keepends=True)
    lines = {
        "missing": [*lines[:2], *lines[3:]],
        "doubled": [*lines[:3], *lines[2:]],
        "moved": [*lines[:2], lines[3], lines[2], *lines[4:]],
    }[change]
    planted.journal.write_text("".join(lines))
    with pytest.raises(LedgerViolated, match="must rise by one"):
        check_ledger(planted.journal, planted.root)


def test_nothing_to_prove_fails(tmp_path: Path) -> None:
    with pytest.raises(LedgerViolated, match="can't be read"):
        check_ledger(tmp_path / "journal.jsonl", tmp_path)
    run = Planted(tmp_path)
    assert run.violation() == "the journal holds no model"
    run.create("m0")
    assert "took no optimiser step" in run.violation()
