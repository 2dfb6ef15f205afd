"""Sampled turns on disk: what an endpoint knew before it died it knows again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("lost", [1, 11, 12, 13, 60, 200])
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


def test_a_damaged_record_is_passed_over_and_those_behind_it_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "turns.bin"
    records = TurnRecords(tmp_path, 1_000_000)
    ends = [0]
    for seed in range(3):
        records.add(turn(seed))
        ends.append(file.stat().st_size)
    records.close()
    whole = file.read_bytes()
    for place in range(ends[1], ends[2]):  # each byte of the second one: magic, length, checksum, bodies
        content = bytearray(whole)
        content[place] ^= 255
        file.write_bytes(content)
        assert [one.sample.tokens.tolist() for one in TurnRecords(tmp_path, 1_000_000).read()] == [
            turn(seed).sample.tokens.tolist() for seed in (0, 2)
        ]
    records = TurnRecords(tmp_path, 1_000_000)
    records.add(turn(9))
    records.close()
    assert file.read_bytes().startswith(content)
    assert [one.sample.tokens.tolist() for one in TurnRecords(tmp_path, 1_000_000).read()] == [
        turn(seed).sample.tokens.tolist() for seed in (0, 2, 9)
    ]


def test_a_prompt_is_stored_once_for_all_its_samples(tmp_path: Path) -> None:
    records = TurnRecords(tmp_path, 1_000_000)
    prompt = np.arange(10_000, dtype=np.int32)
    for seed in range(16):
        records.add(TurnRecord(prompt, turn(seed).sample, 3))
        if seed == 7:  # a restart knows which prompts the file holds
            records.close()
            records = TurnRecords(tmp_path, 1_000_000)
    records.close()
    assert (tmp_path / "turns.bin").stat().st_size < 2 * prompt.nbytes
    kept = list(records.read())
    assert len(kept) == 16
    assert all(np.array_equal(one.prompt, prompt) for one in kept)


def test_the_files_know_all_that_a_journal_of_their_budget_remembers(tmp_path: Path) -> None:
    budget = 60_000
    journal = SampledTurns(budget, TurnRecords(tmp_path, budget))
    for group in range(40):
        prompt = np.arange(group, group + 3000, dtype=np.int32)
        for member in range(16):
            journal.add(prompt, turn(100 * group + member, length=30).sample, 29)
        again = SampledTurns(budget, TurnRecords(tmp_path, budget))
        assert again.turns >= journal.turns
        assert again.forgotten == 0
    assert journal.forgotten == 40 * 16 - journal.turns > 0


class FullDisk:
    """A fake of a file on a disk that has room for `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def close(self) -> None:
        self.file.close()


def test_a_full_disk_is_logged_once_and_counted_and_later_turns_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = TurnRecords(tmp_path, 1_000_000)
    journal = SampledTurns(1_000_000, records)

    def add(seed: int) -> None:
        journal.add(turn(seed).prompt, turn(seed).sample, turn(seed).kept)

    add(0)
    for seed in (1, 2):
        records._file = FullDisk(records._opened(), 50)  # type: ignore[assignment]
        add(seed)
    assert (records.lost, journal.unrecorded, journal.turns) == (2, 2, 3)
    assert [record.levelname for record in caplog.records if "can't be written" in record.message] == ["WARNING"]
    add(3)
    assert [one.sample.tokens.tolist() for one in records.read()] == [
        turn(seed).sample.tokens.tolist() for seed in (0, 3)
    ]


async def test_no_room_on_the_disk_costs_no_answer(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    served = await serve("chatml", "hello<|im_end|>", settings={"records": folder})
    folder.rmdir()
    folder.write_text("a file where the folder was")
    for _ in range(3):
        status, _ = await served.post("/generate", {"input_ids": [5, 6], "sampling_params": {"n": 2}})
        assert status == 200
    assert served.endpoint.seen()["unrecorded"] == 6
    assert served.endpoint.seen()["answered"] == 3


async def test_what_was_forgotten_can_be_seen(serve: Any) -> None:
    served = await serve("chatml", "hello<|im_end|>", journal_tokens=0)
    await served.post("/generate", {"input_ids": [5, 6], "sampling_params": {"n": 2}})
    assert served.endpoint.seen()["forgotten"] == 2
    assert "unrecorded" not in served.endpoint.seen()


def test_the_files_stay_within_twice_the_budget(tmp_path: Path) -> None:
    budget = 2000
    records = TurnRecords(tmp_path, budget)
    for seed in range(300):
        records.add(turn(seed, prompt=20, length=20))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * budget * 4 + 1000
    kept = list(TurnRecords(tmp_path, budget).read())
    assert kept[-1].sample.tokens.tolist() == turn(299, 20, 20).sample.tokens.tolist()
    assert len(kept) >= 10
