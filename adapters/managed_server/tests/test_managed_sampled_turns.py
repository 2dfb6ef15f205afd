"""The journal: what is proven of a sequence, and what is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos import PolicyRef, Sample
from tinker_atropos_managed_server.sampled_turns import SampledTurns

END = 99


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def turn(tokens, *, step=0, reason="stop", base=0.0):
    logprobs = -(base + step + 0.01 * (1 + np.arange(len(tokens)))).astype(np.float32)
    return Sample(ids(*tokens), logprobs, reason, PolicyRef("run", 0, step, f"fake://{step}"))


@pytest.fixture
def journal():
    return SampledTurns(1_000_000)


def shown(proven):
    return proven.mask.astype(int).tolist()


def test_a_turn_is_proven_after_its_whole_prompt(journal):
    sample = turn([5, 6, END])
    journal.add(ids(1, 2, 3), sample, 2)
    proven = journal.prove(ids(1, 2, 3, 5, 6, END))
    assert shown(proven) == [0, 0, 0, 1, 1, 1]
    assert proven.logprobs.tolist() == [0, 0, 0, *sample.logprobs.tolist()]
    assert (proven.policies, proven.finish_reasons) == ((sample.ref,), ("stop",))


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ([1, 2, 5, 6, END, 10], [0, 0, 1, 1, 1, 0]),  # the template's newline after the end of turn
        ([1, 2, 5, 6], [0, 0, 1, 1]),  # the end of turn is dropped
        ([1, 2, 5, 6, 10, 11], [0, 0, 1, 1, 0, 0]),  # and something else stands there
        ([1, 2, 5], [0, 0, 1]),  # cut off by the client
        ([1, 2], [0, 0]),
        ([1, 2, 5, 7, 6, END], [0] * 6),  # tokenised anew: it differs in the middle
        ([1, 2, 56, END], [0] * 4),
        ([0, 2, 5, 6, END], [0] * 5),  # another prompt
        ([1, 2, 3, 5, 6, END], [0] * 6),
        ([], []),
    ],
)
def test_what_clients_do_to_a_turn(journal, sequence, expected):
    journal.add(ids(1, 2), turn([5, 6, END]), 2)
    assert shown(journal.prove(ids(*sequence))) == expected


def test_every_turn_of_a_conversation_needs_its_own_whole_prefix(journal):
    journal.add(ids(1, 2), turn([5, END], step=1), 1)
    journal.add(ids(1, 2, 5, END, 10, 3), turn([7, 8], step=2, reason="length"), 2)
    proven = journal.prove(ids(1, 2, 5, END, 10, 3, 7, 8, END))
    assert shown(proven) == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert [ref.step for ref in proven.policies] == [1, 2]
    assert proven.finish_reasons == ("stop", "length")
    # With the first turn changed, the second has another prefix.
    assert not journal.prove(ids(1, 2, 6, END, 10, 3, 7, 8, END)).mask.any()
    # A stripped thought: the second turn was sampled after the stripped text, and only it is proven there.
    journal.add(ids(1, 2, 40, END, 3), turn([9, END], step=3), 1)
    assert shown(journal.prove(ids(1, 2, 40, END, 3, 9, END))) == [0, 0, 0, 0, 0, 1, 1]


def test_samples_of_one_prompt_that_share_a_beginning_are_told_apart(journal):
    group = [turn([5, END], base=1), turn([5, 6, END], base=2), turn([5, 6, 7], base=3, reason="length")]
    for sample in group:
        journal.add(ids(1, 2), sample, len(sample.tokens) - (sample.stop_reason == "stop"))
    for sample in group:
        proven = journal.prove(np.concatenate([ids(1, 2), sample.tokens]))
        assert proven.logprobs[2:].tolist() == sample.logprobs.tolist()
        assert len(proven.policies) == 1


def test_equal_tokens_of_two_policies_are_the_oldest_unless_the_logprobs_tell(journal):
    old, new = turn([5, 6, END], step=1), turn([5, 6, END], step=2)
    journal.add(ids(1), new, 2)
    journal.add(ids(1), old, 2)  # sampled by the older policy, and finished last
    journal.add(ids(1), new, 2)
    sequence = ids(1, 5, 6, END)
    assert journal.prove(sequence).policies == (old.ref,)
    for sample in (old, new):
        sent = np.concatenate([np.ones(1, dtype=np.float32), sample.logprobs])
        for padded in (None, 3):  # a client may pad the end of turn with 1.0
            if padded is not None:
                sent[padded] = 1.0
            proven = journal.prove(sequence, sent)
            assert (proven.policies, proven.logprobs[1:].tolist()) == ((sample.ref,), sample.logprobs.tolist())
    for nothing in (np.nan, 1.0, -np.inf):
        assert journal.prove(sequence, np.full(4, nothing, dtype=np.float32)).policies == (old.ref,)
    assert journal.prove(ids(1, 5, 6)).policies == (old.ref,)
    assert journal.prove(ids(1, 5)).policies == (old.ref,)  # cut off inside the turn


def test_a_turn_of_nothing_but_its_end_is_proven_and_hides_no_other(journal):
    journal.add(ids(1), turn([END]), 0)
    journal.add(ids(1), turn([5, END], step=1), 1)
    assert shown(journal.prove(ids(1, END, 10))) == [0, 1, 0]
    assert journal.prove(ids(1, 5, END)).policies[0].step == 1
    assert journal.prove(ids(1, 10)).policies == ()


def test_a_token_without_a_logprob_is_not_proven(journal):
    sample = turn([5, 6, END])
    sample.logprobs[1] = np.nan
    journal.add(ids(1), sample, 2)
    proven = journal.prove(ids(1, 5, 6, END))
    assert shown(proven) == [0, 1, 0, 1]
    assert np.isfinite(proven.logprobs).all()


def test_the_oldest_turns_are_forgotten_first_and_the_budget_holds():
    journal = SampledTurns(20_000)
    for step in range(200):
        journal.add(ids(*range(step, step + 40)), turn([5, 6, END], step=step), 2)
        assert journal.tokens <= 20_000
    assert 0 < journal.turns < 200
    assert journal.prove(ids(*range(199, 239), 5, 6, END)).policies[0].step == 199
    assert journal.prove(ids(*range(40), 5, 6, END)).policies == ()
    for _ in range(200):
        journal.add(ids(1), turn(range(9000)), 9000)
    assert journal.tokens <= 20_000


def test_nothing_is_remembered_without_a_budget():
    journal = SampledTurns(0)
    journal.add(ids(1), turn([5, END]), 1)
    assert (journal.turns, journal.tokens) == (0, 0)
    assert not journal.prove(ids(1, 5, END)).mask.any()


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), dtype=np.int32), np.array([1.5])])
def test_what_is_no_sequence_of_tokens_is_refused(journal, tokens):
    with pytest.raises(ValueError, match="expected int32"):
        journal.prove(tokens)


token = st.integers(0, 3)
sequences = st.lists(token, max_size=7)


@settings(max_examples=300, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.lists(token, min_size=1, max_size=5), st.lists(token, min_size=1, max_size=4), st.integers(0, 1)),
        max_size=12,
    ),
    sequence=sequences,
)
def test_what_is_proven_was_sampled_there_and_what_was_sampled_whole_is_proven(turns, sequence):
    """Beside a plain search, over so few tokens that everything collides with everything."""
    journal = SampledTurns(1_000_000)
    for number, (prompt, sampled, dropped) in enumerate(turns):
        journal.add(ids(*prompt), turn(sampled, step=number), max(len(sampled) - dropped, 0))
    proven = journal.prove(ids(*sequence))
    assert proven.mask.shape == proven.logprobs.shape == (len(sequence),)
    assert not proven.logprobs[~proven.mask].any()
    assert len(proven.policies) == len(proven.finish_reasons)
    whole = [(p, s) for p, s, _ in turns if sequence[: len(p) + len(s)] == p + s]
    for place in np.flatnonzero(proven.mask):
        by = [
            (prompt, sampled)
            for number, (prompt, sampled, _) in enumerate(turns)
            if len(prompt) <= place < len(prompt) + len(sampled)
            and sequence[: place + 1] == (prompt + sampled)[: place + 1]
            and turn(sampled, step=number).logprobs[place - len(prompt)] == proven.logprobs[place]
        ]
        assert by, "a proven token was sampled by some turn after exactly these tokens, with this log-probability"
    for prompt, sampled in whole:
        covered = proven.mask[len(prompt) : len(prompt) + len(sampled)]
        assert covered.any(), "a turn that is there whole is proven, by itself or by one that overlaps it"
    if whole:
        assert proven.policies


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(1, 60))
def test_a_long_conversation_is_proven_turn_by_turn(data, length):
    journal = SampledTurns(1_000_000)
    sequence: list[int] = []
    expected: list[int] = []
    for step in range(data.draw(st.integers(1, 6))):
        seen = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=length))
        said = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=length))
        sequence += seen
        journal.add(ids(*sequence), turn([*said, END], step=step), len(said))
        sequence += [*said, END]
        expected += [0] * len(seen) + [1] * (len(said) + 1)
    proven = journal.prove(ids(*sequence))
    assert shown(proven) == expected
    assert [ref.step for ref in proven.policies] == list(range(len(proven.policies)))
