"""A journal on a disk that is full: no line is half there, and nothing is trained that it does not tell of."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos_local_tinker.journal import Journal, JournalError, read_journal

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux's prlimit to fill a disk")


@contextlib.contextmanager
def room_for(path: Path, more: int, process: int = 0) -> Iterator[None]:
    """Let a process (0: this one) write `more` bytes to the end of `path`, as a full disk would."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (path.stat().st_size + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)


def test_a_line_that_finds_no_room_is_taken_back_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("create_model", "m", 0)
    before = journal.path.read_bytes()
    with room_for(journal.path, 10):
        for _ in range(2):
            with pytest.raises(JournalError, match="make room"):
                journal.write("optim_step", "m", 1)
    assert journal.path.read_bytes() == before
    journal.write("optim_step", "m", 2)
    journal.close()
    assert [(line["seq"], line["step"]) for line in read_journal(journal.path)] == [(0, 0), (1, 2)]


@pytest.mark.parametrize("failing", ["forward_backward", "optim_step"])
def test_what_is_not_in_the_journal_is_not_trained_on(server: Any, training: Any, sft_datum: Any, failing: str) -> None:
    from tinker import RequestFailedError, types

    journal, datum, adam = server.store / "journal.jsonl", sft_datum([1, 2, 3, 4]), types.AdamParams(learning_rate=0.05)

    def loss() -> float:
        return float(training.forward([datum], "cross_entropy").result().metrics["loss:sum"])

    def train() -> Any:
        return training.forward_backward([datum], "cross_entropy")

    train().result()
    training.optim_step(adam).result()
    path, good = training.save_state("good").result().path, loss()
    if failing == "optim_step":
        train().result()
    with room_for(journal, 10, server.pid):
        doing = training.optim_step(adam) if failing == "optim_step" else train()
        with pytest.raises(RequestFailedError, match="can't be written") as caught:
            doing.result()
    assert caught.value.category == "server"
    for request in (lambda: training.optim_step(adam), lambda: training.save_state("bad")):
        with pytest.raises(RequestFailedError, match=f"not in the journal .{failing}"):
            request().result()
    training.load_state_with_optimizer(path).result()
    assert loss() == good
    train().result()
    training.optim_step(adam).result()
    lines = list(read_journal(journal))
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    steps = [line["step"] for line in lines if line["model"] == training.model_id and line["event"] == "optim_step"]
    assert steps == [1, 2]
