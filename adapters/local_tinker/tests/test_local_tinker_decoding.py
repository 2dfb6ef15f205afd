"""Parts of the sampler by themselves: stop strings against a plain search, prompts in chunks, the scheduler's order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos.errors import UserError
from tinker_atropos_local_tinker import decode
from tinker_atropos_local_tinker.base_model import BaseModel, load_base_model
from tinker_atropos_local_tinker.decode import Decoding, Row, SampleParams
from tinker_atropos_local_tinker.draw import DrawParams, draw
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.sampler import Sampler, SampleResult
from tinker_atropos_local_tinker.stops import Stops, StopWatch, parse_stops
from tinker_atropos_local_tinker.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
LETTERS = [*TOKENIZER.encode("abcd\n!"), 258, 259, 260, 261, 256, *TOKENIZER.encode("é€")]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.sampled_from(LETTERS), max_size=30),
    sampled=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=120),
    stops=st.lists(st.text("abcd\n!é€", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_stop_string_is_found_where_a_plain_search_finds_it(
    prompt: list[int], sampled: list[int], stops: list[str]
) -> None:
    watch = StopWatch(Stops(strings=tuple(stops)), TOKENIZER, prompt)
    for i, token in enumerate(sampled):
        text = TOKENIZER.decode(sampled[: i + 1], skip_special_tokens=False)
        found = any(stop in text for stop in stops)
        assert watch.stopped_by(token) == found
        if found:
            return


def test_stops_come_in_every_shape() -> None:
    end = frozenset({2})
    assert parse_stops(None, end, 10) == Stops(ids=end)
    assert parse_stops([], end, 10) == Stops()
    assert parse_stops("x", end, 10) == Stops(strings=("x",))
    assert parse_stops(3, end, 10) == Stops(ids=frozenset({3}))
    assert parse_stops(["x", 3], end, 10) == Stops(frozenset({3}), ("x",))
    for wrong in (True, [None], [1.5], {"a": 1}, [10], [-1], ["x" * 2000]):
        with pytest.raises(UserError, match="stop"):
            parse_stops(wrong, end, 10)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match="diverged"):
        draw(torch.tensor([[0.0, float("nan")]]), [DrawParams()], [0.5])


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> BaseModel:
    return load_base_model("tiny", tiny_model, "cpu")


def ask(prompt: list[int], **changes: Any) -> SampleParams:
    fields: dict[str, Any] = {"samples": 1, "max_tokens": 12, "draw": DrawParams(), "stops": Stops(), "seed": 1}
    return SampleParams(prompt=prompt, **{**fields, **changes})


def finish(decoding: Decoding) -> None:
    while decoding.rows:
        decoding.advance()


def test_prompts_in_chunks_give_what_whole_prompts_give(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(5 * i + j) % 256 for i in range(20 + 3 * j)] for j in range(3)]
    found = []
    for chunk in (2048, 24):
        monkeypatch.setattr(decode, "PREFILL_TOKENS", chunk)
        decoding = Decoding(base, base.model)
        rows = [Row(ask(p, prompt_logprobs=True), 0, base) for p in prompts]
        scores = decoding.add([(row.params, [row]) for row in rows])
        finish(decoding)
        found.append((rows, scores))
    for a, b in zip(*(rows for rows, _ in found), strict=True):
        assert a.sequence.tokens == b.sequence.tokens
        np.testing.assert_allclose(a.sequence.logprobs, b.sequence.logprobs, atol=1e-4)
    for x, y in zip(*(scores for _, scores in found), strict=True):
        assert x is not None
        assert y is not None
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)


def test_rows_that_join_and_leave_do_not_disturb_the_others(base: BaseModel) -> None:
    alone = []
    prompts = [[7, 8, 9], list(range(40)), [100] * 11]
    for i, prompt in enumerate(prompts):
        decoding, row = Decoding(base, base.model), Row(ask(prompt, seed=i), 0, base)
        decoding.add([(row.params, [row])])
        finish(decoding)
        alone.append(row.sequence)
    decoding = Decoding(base, base.model)
    rows = [Row(ask(prompt, seed=i), 0, base) for i, prompt in enumerate(prompts)]
    brief = Row(ask([1] * 90, max_tokens=2), 0, base)  # the longest prompt leaves first
    decoding.add([(r.params, [r]) for r in (rows[0], brief)])
    decoding.advance()
    decoding.add([(rows[1].params, [rows[1]])])
    for _ in range(4):
        decoding.advance()
    decoding.add([(rows[2].params, [rows[2]])])
    finish(decoding)
    for row, want in zip(rows, alone, strict=True):
        assert row.sequence.tokens == want.tokens
        np.testing.assert_allclose(row.sequence.logprobs, want.logprobs, atol=1e-4)


def test_a_waiting_request_is_not_overtaken(base: BaseModel) -> None:
    sampler = Sampler(base, max_rows=4)
    order: list[str] = []
    left = threading.Semaphore(0)

    def submit(name: str, n: int, length: int) -> None:
        def done(result: SampleResult | BaseException) -> None:
            assert isinstance(result, SampleResult)
            order.append(name)
            left.release()

        sampler.submit(ask([1, 2], samples=n, max_tokens=length), Snapshot("base"), done)

    submit("first", 3, 100)
    submit("big", 4, 4)  # must wait for room, all of its samples
    for i in range(5):
        submit(f"small {i}", 1, 1)
    for _ in range(7):
        assert left.acquire(timeout=60)
    sampler.close()
    assert order[0] == "big"  # one of its samples at a time, beside the first request


def test_a_failure_reaches_its_request_and_the_sampler_goes_on(base: BaseModel) -> None:
    sampler = Sampler(base)
    results: list[Any] = []
    left = threading.Semaphore(0)

    def done(result: Any) -> None:
        results.append(result)
        left.release()

    sampler.submit(ask([10**6]), Snapshot("base"), done)  # unchecked: no such embedding
    assert left.acquire(timeout=60)
    sampler.submit(ask([1]), Snapshot("base"), done)
    assert left.acquire(timeout=60)
    sampler.close()
    assert isinstance(results[0], BaseException)
    assert isinstance(results[1], SampleResult)


def test_a_request_that_breaks_the_scheduler_does_not_stop_it(base: BaseModel) -> None:
    sampler = Sampler(base)
    results: list[Any] = []
    left = threading.Semaphore(0)

    def done(result: Any) -> None:
        results.append(result)
        left.release()

    broken: Any = None
    sampler.submit(ask([1], draw=broken, stops=broken), Snapshot("base"), done)
    sampler.submit(ask([1]), Snapshot("base"), done)
    for _ in range(2):
        assert left.acquire(timeout=60)
    sampler.close()
    assert isinstance(results[0], BaseException)
    assert isinstance(results[1], SampleResult)
