"""Sampled turns on disk: what an endpoint knew before it died it knows again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinker_atropos import PolicyRef, Sample
from tinker_atropos_managed_server.sampled_turns import SampledTurns
from tinker_atropos_managed_server.turn_records import TurnRecord, TurnRecords

REF = PolicyRef("run", 1, 7, "file:///weights", expires=12.5)


def turn(seed: int, prompt: int = 5, length: int = 4) -> TurnRecord:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, length).astype(np.int32)
    sample = Sample(tokens, -rng.random(length).astype(np.float32), "stop", REF)
    return TurnRecord(rng.integers(0, 1000, prompt).astype(np.int32), sample, length - 1)


def sequence(record: TurnRecord) -> np.ndarray:
    return np.concatenate([record.prompt, record.sample.tokens])


def test_a_journal_that_begins_again_proves_what_was_sampled_before(tmp_path: Path) -> None:
    records = [turn(seed) for seed in range(20)]
    first = SampledTurns(10_000_000, TurnRecords(tmp_path, 1_000_000))
    for record in records:
        first.add(record.prompt, record.sample, record.kept)
    again = SampledTurns(10_000_000, TurnRecords(tmp_path, 1_000_000))  # nothing was closed: as after kill -9
    assert again.turns == 20
    for record in records:
        before, after = first.prove(sequence(record)), again.prove(sequence(record))
        assert after.policies == before.policies == (REF,)
        np.testing.assert_array_equal(after.logprobs, before.logprobs)
        np.testing.assert_array_equal(after.mask, before.mask)


@pytest.mark.parametrize("lost", [1, 11, 12, 13, 60])
def test_a_record_that_was_cut_off_hides_no_later_one(tmp_path: Path, lost: int) -> None:
    records = TurnRecords(tmp_path, 1_000_000)
    for seed in range(3):
        records.add(turn(seed))
    records.close()
    file = tmp_path / "turns.bin"
    file.write_bytes(file.read_bytes()[:-lost])
    records = TurnRecords(tmp_path, 1_000_000)
    assert len(list(records.read())) == 2
    records.add(turn(9))
    records.close()
    kept = list(TurnRecords(tmp_path, 1_000_000).read())
    assert [len(kept), kept[-1].sample.tokens.tolist()] == [3, turn(9).sample.tokens.tolist()]


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    records = TurnRecords(tmp_path, 1_000_000)
    for seed in range(3):
        records.add(turn(seed))
    records.close()
    file = tmp_path / "turns.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    assert len(list(TurnRecords(tmp_path, 1_000_000).read())) == 1


def test_the_files_stay_within_twice_the_budget(tmp_path: Path) -> None:
    budget = 2000
    records = TurnRecords(tmp_path, budget)
    for seed in range(300):
        records.add(turn(seed, prompt=20, length=20))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * budget * 4 + 1000
    kept = list(TurnRecords(tmp_path, budget).read())
    assert kept[-1].sample.tokens.tolist() == turn(299, 20, 20).sample.tokens.tolist()
    assert len(kept) >= 10
