"""Property: trained tokens are bit-equal to sampled tokens, whatever was sampled and whatever the template does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHATS = ["chatml", "tools", "thinking", "llama3", "plain", "markers", "swallowing", "spaced"]
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "hi", " 12 + 7 =", "a<|im_end|>\n<|im_start|>user\nb", "<|eot_id|>", "</s>", "<|end|>", "<|user|>"]
    ),
)


class Run:
    """Plays an episode against a session and remembers what the sampler saw and made."""

    def __init__(self, session, sample):
        self.session, self.sample = session, sample
        self.turns, self.completions = [], []

    def turn(self, tokens, reason="stop"):
        prompt = self.session.prompt(1000).tokens.tolist()
        made = self.sample(tokens, reason)
        self.completions.append(self.session.record(made))
        self.turns.append((prompt, list(tokens), made.logprobs, len(self.session.transcript().segments) - 1))
        return self.completions[-1]

    def check(self):
        """Every sampled token and log-probability is there once, unchanged, right after the prompt that was given."""
        segments = self.session.transcript().segments
        ends = [0] * len(segments)
        for prompt, tokens, logprobs, place in self.turns:
            segment, start, end = segments[place], len(prompt), len(prompt) + len(tokens)
            assert segment.tokens[:end].tolist() == prompt + tokens
            assert not segment.mask[ends[place] : start].any()
            assert segment.mask[start:end].all()
            assert np.array_equal(segment.logprobs[start:end], logprobs)
            ends[place] = end
        assert ends == [len(segment.tokens) for segment in segments]
        assert sum(int(segment.mask.sum()) for segment in segments) == sum(
            len(tokens) for _, tokens, _, _ in self.turns
        )
        assert all((segment.logprobs[~segment.mask] == 0).all() for segment in segments)


def sampled_ids(tokenizer, turn):
    if isinstance(turn, str):
        return tokenizer.encode(turn, add_special_tokens=False)
    return [number % len(tokenizer) for number in turn]


@st.composite
def episodes(draw):
    """Draw turns: a user's text, any ids (invalid UTF-8, special tokens, none), whether it ends, the reason."""
    ids = st.lists(st.integers(0, 999), max_size=8)
    turn = st.tuples(TEXTS, st.one_of(ids, TEXTS), st.booleans(), st.sampled_from(["stop", "length"]))
    return draw(st.lists(turn, min_size=1, max_size=4))


@pytest.mark.parametrize("name", CHATS)
@PROPERTY
@given(episode=episodes())
def test_chat_keeps_every_sampled_token(name, episode, tokenizers, open_session, sample):
    tokenizer = tokenizers(name)
    run = Run(open_session(tokenizer), sample)
    for text, turn, ends, reason in episode:
        run.session.observe([{"role": "user", "content": text}])
        tokens = sampled_ids(tokenizer, turn)
        run.turn([*tokens, tokenizer.eos_token_id] if ends else tokens, reason)
    run.check()
    assert [completion.finish_reason for completion in run.completions] == [reason for *_, reason in episode]


@pytest.mark.parametrize("name", [*CHATS, "base"])
@PROPERTY
@given(episode=episodes())
def test_raw_text_keeps_every_sampled_token_and_appends(name, episode, tokenizers, open_session, sample):
    tokenizer = tokenizers(name)
    run = Run(open_session(tokenizer, stop=["\n"]), sample)
    run.session.observe("Q:")
    for text, turn, ends, reason in episode:
        run.session.observe(text)
        tokens = sampled_ids(tokenizer, turn)
        run.turn([*tokens, tokenizer.eos_token_id] if ends else tokens, reason)
    run.check()
    assert len(run.session.transcript().segments) == 1


@pytest.mark.parametrize("name", ["chatml", "tools", "llama3", "swallowing", "thinking"])
@PROPERTY
@given(
    texts=st.lists(
        st.text(alphabet="ab 1é.🎉\n", min_size=1, max_size=12).map(lambda text: f"x{text}x"), min_size=2, max_size=8
    ),
    cut=st.booleans(),
)
def test_an_extended_prompt_equals_the_rendered_conversation_tokenised_afresh(
    name, texts, cut, tokenizers, open_session, sample
):
    # Sampled text is encoded as the tokenizer would, so it round-trips; `cut` turns lack their end, which is put in.
    tokenizer, messages = tokenizers(name), []
    run = Run(open_session(tokenizer), sample)
    for user, answer in zip(texts[::2], texts[1::2], strict=False):
        run.session.observe([{"role": "user", "content": user}])
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        messages.append({"role": "user", "content": user})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        run.turn(tokens if cut else [*tokens, tokenizer.eos_token_id], "length" if cut else "stop")
        assert run.turns[-1][0] == tokenizer.encode(rendered, add_special_tokens=False)
        messages.append({"role": "assistant", "content": answer})
    run.check()
    assert len(run.session.transcript().segments) == 1


@PROPERTY
@given(body=st.text(alphabet="abc 12", max_size=12), tail=st.sampled_from(["", "x", " y", "\n\n"]))
def test_a_stop_string_cut_in_mid_token_keeps_the_whole_token(body, tail, tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    run = Run(open_session(tokenizer, stop="</answer>"), sample)
    run.session.observe([{"role": "user", "content": "q"}])
    completion = run.turn(tokenizer.encode(body + "</answer>" + tail, add_special_tokens=False))
    assert completion.text == body
    run.session.observe([{"role": "user", "content": "next"}])
    run.turn([tokenizer.eos_token_id])
    run.check()
    assert len(run.session.transcript().segments) == 1


@PROPERTY
@given(tokens=st.lists(st.integers(0, 400), max_size=6), size=st.integers(2, 4))
def test_identical_completions_in_a_group_stay_apart(tokens, size, tokenizers, open_session, sample):
    runs = [Run(open_session(tokenizers("chatml")), sample) for _ in range(size)]
    for number, run in enumerate(runs):
        run.session.observe([{"role": "user", "content": "same"}])
        run.turn(tokens, "length")
        run.session.observe([{"role": "user", "content": f"then {number}"}])
        run.turn([*tokens, number])
    for run in runs:
        run.check()
    first = runs[0].session.transcript().segments[0]
    assert all(np.array_equal(first.tokens[:5], run.session.transcript().segments[0].tokens[:5]) for run in runs)


@PROPERTY
@given(
    thought=st.text(alphabet="abc ", max_size=8),
    answers=st.lists(st.sampled_from(["a", "b", ""]), min_size=2, max_size=4),
)
def test_a_thought_stripping_template_begins_a_segment_each_turn(thought, answers, tokenizers, open_session, sample):
    tokenizer = tokenizers("thinking")
    run = Run(open_session(tokenizer), sample)
    for answer in answers:
        run.session.observe([{"role": "user", "content": "q"}])
        text = f"<think>\n{thought}\n</think>\n\n{answer}"
        run.turn([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
    run.check()
    assert len(run.session.transcript().segments) == len(answers)
