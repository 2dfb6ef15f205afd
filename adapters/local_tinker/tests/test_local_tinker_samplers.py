"""The samplers of one client: bounded in number and memory, the longest unused going first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker_atropos_local_tinker.answers import Gone, NotFound
from tinker_atropos_local_tinker.lora import Weights
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.samplers import SNAPSHOTS_KEPT, Samplers, SamplingSession

BASE = Snapshot("base")


def snapshot(key: str) -> Snapshot:
    return Snapshot(key, {"layer": Weights(torch.zeros(1, 64), torch.zeros(64, 1))})


def add(samplers: Samplers, name: str, session: str = "s", **fields: Any) -> SamplingSession:
    opened = SamplingSession(name, session, name, **fields)
    opened.requests.update(fields.pop("requests", {}))
    samplers.open(opened, snapshot(name))
    return opened


def test_the_longest_unused_sampler_goes_but_none_that_samples() -> None:
    samplers = Samplers(BASE, sessions_kept=3)
    running: Any = object()
    add(samplers, "sampling", requests={"r": running})
    for name in ("other client's", "old", "used"):
        add(samplers, name, "t" if name.startswith("other") else "s")
    samplers.get("old"), samplers.get("used")  # asked for after all, in this order
    assert samplers.open(SamplingSession("new", "s", "new"), snapshot("new")) == ["old"]
    assert samplers.ids("s") == ["sampling", "used", "new"]
    assert samplers.ids("t") == ["other client's"]
    with pytest.raises(NotFound, match="3 samplers of the same client"):
        samplers.get("old")
    samplers.close_session("s")
    add(samplers, "again")
    assert samplers.ids("s") == ["again"]


def test_weights_beyond_the_limit_go_but_the_last_ones_stay() -> None:
    samplers = Samplers(BASE, limit_bytes=1)
    opened = [add(samplers, str(i)) for i in range(SNAPSHOTS_KEPT + 2)]
    for session in opened[:2]:
        with pytest.raises(Gone, match="Save weights that you need for long by name"):
            samplers.snapshot(session)
    assert [samplers.snapshot(session).key for session in opened[2:]] == [s.sampler_id for s in opened[2:]]


def test_an_inflight_publication_lets_go_of_the_one_before() -> None:
    samplers = Samplers(BASE)
    first = add(samplers, "1", inflight_of="m")
    fixed = add(samplers, "fixed")
    add(samplers, "2", inflight_of="m")
    assert samplers.snapshot(first).key == "2"
    assert samplers.snapshot(fixed).key == "fixed"
    assert sorted(samplers._snapshots) == ["2", "fixed"]
