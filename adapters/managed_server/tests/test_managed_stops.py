"""Stops: which forms are accepted, what the sampler gets, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tinker_atropos import ConfigError
from tinker_atropos_managed_server.stops import first_stop, parse_stop
from tinker_atropos_managed_server.vocabulary import Vocabulary


@pytest.fixture
def vocabulary(tokenizers):
    return Vocabulary(tokenizers("chatml"))


def test_absent_means_the_models_own_end_and_empty_means_none(vocabulary):
    assert parse_stop(None, vocabulary, [401]).sampler is None
    assert parse_stop(None, vocabulary, [401]).ids == {401}
    assert parse_stop([], vocabulary, [401]).sampler == []
    assert parse_stop([], vocabulary, [401]).ids == frozenset()


def test_text_ids_and_lists_become_one_kind_of_list(vocabulary):
    end = vocabulary.specials["<|im_end|>"]
    start = vocabulary.specials["<|im_start|>"]
    cases: list[tuple[Any, list[str] | list[int]]] = [
        ("\n", ["\n"]),
        (7, [7]),
        ([7, 7], [7]),
        ("<|im_end|>", [end]),
        (["<|im_end|>", start, 7], [end, start, 7]),
        (["\n", "\n"], ["\n"]),
        (["\n", "<|im_end|>"], ["\n", "<|im_end|>"]),
        (("\n", end), ["\n", "<|im_end|>"]),
    ]
    for stop, sampler in cases:
        assert parse_stop(stop, vocabulary, [end]).sampler == sampler


def test_a_special_token_beside_text_is_known_by_id_too(vocabulary):
    stops = parse_stop(["\n", "<|im_end|>"], vocabulary, [])
    assert stops.ids == {vocabulary.specials["<|im_end|>"]}
    assert stops.strings == ("\n", "<|im_end|>")


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("", r"stop: ''"),
        (["a", ""], r"stop\[1\]: ''"),
        (-1, "stop: -1 is no token id"),
        ([10_000], r"stop\[0\]: 10000 is no token id .* 0 to \d+"),
        (True, r"stop: expected text.* True \(bool\)"),
        ([1.5], r"stop\[0\]: expected text"),
        ({"a"}, "stop: expected text"),
        (b"a", "stop: expected text"),
        (["\n", 7], "mixes text"),
    ],
)
def test_what_cannot_be_a_stop_is_refused(stop, says, vocabulary):
    with pytest.raises(ConfigError, match=says):
        parse_stop(stop, vocabulary, [])


def test_the_first_stop_in_a_text_is_found(vocabulary):
    assert first_stop("a;b,c", [",", ";"]) == (1, ";")
    assert first_stop("abc", [","]) is None
    assert first_stop("abc", []) is None


def test_a_stop_id_is_cut_from_the_text(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    tokens = tokenizer.encode("hello.", add_special_tokens=False)
    session = open_session(tokenizer, stop=tokens[-1])
    session.observe([{"role": "user", "content": "hi"}])
    assert session.prompt(9).stop == [tokens[-1]]
    assert session.record(sample(tokens)).text == "hello"


def test_the_ids_that_end_a_turn_come_from_everything_that_states_them(tokenizers, open_session, sample, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    tokenizer = tokenizers("llama3")
    tokenizer.name_or_path = str(tmp_path)
    try:
        session = open_session(tokenizer, end_of_turn=["<|end_header_id|>"])
    finally:
        tokenizer.name_or_path = ""
    session.observe([{"role": "user", "content": "hi"}])
    vocab = tokenizer.get_vocab()
    for end in (5, 6, vocab["<|eot_id|>"], vocab["<|end_header_id|>"]):
        session.prompt(9)
        session.record(sample([20, end]))
    assert session.unproven_stops == 0


def test_an_unknown_end_of_turn_is_refused(tokenizers, open_session):
    with pytest.raises(ConfigError, match=r"end_of_turn: '<\|nope\|>'"):
        open_session(tokenizers("chatml"), end_of_turn=["<|nope|>"])
