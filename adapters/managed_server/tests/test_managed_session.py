"""One episode: how prompts extend, where segments split, what the environment reads, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tinker_atropos import ConfigError, ContextOverflow, PluginError, PolicyUnavailable, RunError

USER = [{"role": "user", "content": "hi"}]


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(tokenizer, tokens):
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def say(session, sample, tokenizer, text, reason="stop"):
    session.prompt(100)
    return session.record(sample(ids(tokenizer, text), reason))


def test_a_turn_that_ends_itself_gets_no_second_end(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    completion = say(session, sample, tokenizer, "hello<|im_end|>")
    session.observe([{"role": "user", "content": "again"}])
    assert completion.text == "hello"
    assert completion.tokens == len(ids(tokenizer, "hello<|im_end|>"))
    assert text_of(tokenizer, session.prompt(100).tokens) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_cut_by_its_length_gets_an_end_that_is_not_trained(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    assert say(session, sample, tokenizer, "hello", "length").finish_reason == "length"
    session.observe([{"role": "user", "content": "again"}])
    say(session, sample, tokenizer, "ok<|im_end|>")
    (segment,) = session.transcript().segments
    assert "hello<|im_end|>\n<|im_start|>user\nagain" in text_of(tokenizer, segment.tokens)
    assert text_of(tokenizer, segment.tokens[segment.mask]) == "hellook<|im_end|>"


def test_length_stays_length_though_the_text_looks_finished(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    completion = say(session, sample, tokenizer, "hello<|im_end|>", "length")
    assert (completion.text, completion.finish_reason, completion.truncated) == ("hello", "length", True)
    session.observe(USER)
    assert "<|im_end|><|im_end|>" not in text_of(tokenizer, session.prompt(100).tokens)


@pytest.mark.parametrize("turn", ["<|im_end|>", ""])
def test_empty_completions_after_each_other(turn, tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    for _ in range(2):
        assert say(session, sample, tokenizer, turn).text == ""
        session.observe(USER)
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, session.prompt(100).tokens) == (wanted + "<|im_end|>\n") * 2 + wanted
    assert len(session.transcript().segments) == 1


def test_special_tokens_that_were_sampled_stay_visible(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    assert say(session, sample, tokenizer, "a<|im_start|>b<|im_end|>").text == "a<|im_start|>b"
    session.observe(USER)
    assert text_of(tokenizer, session.prompt(10).tokens).count("a<|im_start|>b<|im_end|>\n<|im_start|>user") == 1
    say(session, sample, tokenizer, "c")
    assert len(session.transcript().segments) == 1


def test_a_rerendered_tool_call_begins_a_segment(tokenizers, open_session, sample):
    tokenizer = tokenizers("tools")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    session = open_session(tokenizer)
    session.observe(USER, [tool])
    first = session.prompt(100).tokens
    assert '"add"' in text_of(tokenizer, first)
    say(session, sample, tokenizer, 'so <tool_call>{"a":  1}<|im_end|>')
    session.observe([{"role": "tool", "content": "1"}])
    say(session, sample, tokenizer, "one<|im_end|>")
    before, after = session.transcript().segments
    assert text_of(tokenizer, before.tokens[before.mask]) == 'so <tool_call>{"a":  1}<|im_end|>'
    assert text_of(tokenizer, after.tokens[after.mask]) == "one<|im_end|>"
    assert '<tool_call>{"a": 1}<|im_end|>\n<|im_start|>tool' in text_of(tokenizer, after.tokens)


def test_a_tool_call_that_the_template_leaves_alone_extends(tokenizers, open_session, sample):
    tokenizer = tokenizers("tools")
    session = open_session(tokenizer)
    session.observe(USER)
    say(session, sample, tokenizer, '<tool_call>{"a": 1}<|im_end|>')
    session.observe([{"role": "tool", "content": "1"}])
    say(session, sample, tokenizer, "one<|im_end|>")
    assert len(session.transcript().segments) == 1


def test_other_tools_than_before_begin_a_segment(tokenizers, open_session, sample):
    tokenizer = tokenizers("tools")
    session = open_session(tokenizer)
    session.observe(USER, [{"name": "a"}])
    say(session, sample, tokenizer, "x<|im_end|>")
    session.observe(USER)  # None keeps them
    say(session, sample, tokenizer, "y<|im_end|>")
    session.observe(USER, [{"name": "b"}])
    say(session, sample, tokenizer, "z<|im_end|>")
    assert len(session.transcript().segments) == 2


def test_thoughts_extend_through_tool_results_and_split_at_the_next_user(tokenizers, open_session, sample):
    tokenizer = tokenizers("thinking")
    session = open_session(tokenizer)
    session.observe(USER)
    say(session, sample, tokenizer, "<think>\nhm\n</think>\n\ncall<|im_end|>")
    session.observe([{"role": "tool", "content": "1"}])
    say(session, sample, tokenizer, "<think>\nso\n</think>\n\none<|im_end|>")
    assert len(session.transcript().segments) == 1
    session.observe(USER)
    say(session, sample, tokenizer, "bye<|im_end|>")
    first, second = session.transcript().segments
    assert text_of(tokenizer, first.tokens).count("<think>") == 2
    assert "<think>" not in text_of(tokenizer, second.tokens)
    assert not second.mask[: -len(ids(tokenizer, "bye<|im_end|>"))].any()


def test_thinking_is_switched_by_configuration(tokenizers, open_session):
    tokenizer = tokenizers("thinking")
    for config in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking_": 1}}):
        session = open_session(tokenizer, **config)
        session.observe(USER)
        off = "enable_thinking" in config
        assert text_of(tokenizer, session.prompt(9).tokens).endswith("</think>\n\n") is off


def test_trimmed_whitespace_begins_a_segment(tokenizers, open_session, sample):
    tokenizer = tokenizers("llama3")
    session = open_session(tokenizer)
    session.observe(USER)
    say(session, sample, tokenizer, "hello \n<|eot_id|>")
    session.observe(USER)
    say(session, sample, tokenizer, "hello<|eot_id|>")
    session.observe(USER)
    say(session, sample, tokenizer, "bye<|eot_id|>")
    assert [text_of(tokenizer, s.tokens[s.mask]) for s in session.transcript().segments] == [
        "hello \n<|eot_id|>",
        "hello<|eot_id|>bye<|eot_id|>",
    ]


def test_a_next_role_marker_that_ends_a_turn_is_not_doubled(tokenizers, open_session, sample):
    tokenizer = tokenizers("markers")
    session = open_session(tokenizer)
    session.observe(USER)
    assert say(session, sample, tokenizer, "hello<|user|>").text == "hello"
    session.observe(USER)
    assert text_of(tokenizer, session.prompt(9).tokens) == (
        "<|user|>\nhi<|assistant|>\nhello<|user|>\nhi<|assistant|>\n"
    )
    say(session, sample, tokenizer, "cut", "length")
    session.observe(USER)
    assert text_of(tokenizer, session.prompt(9).tokens).endswith("cut<|user|>\nhi<|assistant|>\n")


def test_an_assistant_message_of_the_environment_is_not_trained(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    shot = [*USER, {"role": "assistant", "content": "example"}, {"role": "user", "content": "now you"}]
    session.observe(shot)
    say(session, sample, tokenizer, "mine<|im_end|>")
    session.observe([{"role": "assistant", "content": "added"}, *USER])
    say(session, sample, tokenizer, "more<|im_end|>")
    transcript = session.transcript()
    (segment,) = transcript.segments
    assert text_of(tokenizer, segment.tokens[segment.mask]) == "mine<|im_end|>more<|im_end|>"
    assert [message["content"] for message in transcript.messages] == [
        "hi", "example", "now you", "mine", "added", "hi", "more",
    ]  # fmt: skip


def test_words_that_carry_their_space_keep_it(tokenizers, open_session, sample):
    tokenizer = tokenizers("spaced")
    session = open_session(tokenizer)
    session.observe(USER)
    assert say(session, sample, tokenizer, "The fox</s>").text == " The fox"
    session.observe(USER)
    say(session, sample, tokenizer, "It</s>")
    assert len(session.transcript().segments) == 1


def test_raw_text_is_taken_as_it_is(tokenizers, open_session, sample):
    tokenizer = tokenizers("base")
    session = open_session(tokenizer, stop="\n")
    session.observe("1 + 1 = 2\n")
    session.observe("2 + 2 =")
    end = tokenizer.eos_token_id
    first, second = ids(tokenizer, "1 + 1 = 2\n"), ids(tokenizer, "2 + 2 =")
    assert session.prompt(4).tokens.tolist() == [end, *first, *second]
    assert say(session, sample, tokenizer, " 4\n\n").text == " 4"
    session.observe("<|endoftext|>3")
    assert session.prompt(4).tokens.tolist() == [
        end, *first, *second, *ids(tokenizer, " 4\n\n"), end, *ids(tokenizer, "3")
    ]  # fmt: skip
    assert session.transcript().messages[-1] == {"role": "user", "content": "<|endoftext|>3"}


def test_raw_text_that_brings_its_beginning_gets_no_second(tokenizers, open_session):
    session = open_session(tokenizers("llama3"))
    session.observe("<|begin_of_text|>hi")
    assert session.prompt(4).tokens.tolist().count(tokenizers("llama3").bos_token_id) == 1


def test_messages_and_raw_text_do_not_mix(tokenizers, open_session):
    session = open_session(tokenizers("chatml"))
    session.observe(())
    session.observe("raw")
    session.observe(())  # nothing is no message
    with pytest.raises(PluginError, match="messages after raw text"):
        session.observe(USER)
    other = open_session(tokenizers("chatml"))
    other.observe(USER)
    with pytest.raises(PluginError, match="raw text after messages"):
        other.observe("raw")


@pytest.mark.parametrize("observation", [[{"content": "x"}], ["x"], [{"role": 1, "content": "x"}]])
def test_a_message_without_a_role_is_refused(observation, tokenizers, open_session):
    with pytest.raises(PluginError, match="observed message 0"):
        open_session(tokenizers("chatml")).observe(observation)


def test_nothing_shown_is_nothing_to_sample_from(tokenizers, open_session):
    session = open_session(tokenizers("chatml"))
    with pytest.raises(PluginError, match="shown nothing"):
        session.prompt(5)


def test_a_tokenizer_without_template_names_the_ways_on(tokenizers, open_session):
    session = open_session(tokenizers("base"))
    session.observe(USER)
    with pytest.raises(PluginError, match=r"managed_server\.chat_template.*prompt_format=completion"):
        session.prompt(5)


def test_the_room_is_what_the_context_leaves(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, context_length=40)
    session.observe(USER)
    held = len(session.prompt(None).tokens)
    assert session.prompt(None).max_tokens == 40 - held
    assert session.prompt(1000).max_tokens == 40 - held
    assert session.prompt(3).max_tokens == 3
    say(session, sample, tokenizer, "a<|im_end|>")
    session.observe([{"role": "user", "content": "é" * 40}])
    with pytest.raises(ContextOverflow, match=r"the prompt has \d+ tokens, the context 40 tokens"):
        session.prompt(None)
    assert len(session.transcript().segments[0].tokens) == held + 2  # what was never sampled from is left out


def test_nothing_bounds_a_turn(tokenizers, open_session):
    session = open_session(tokenizers("chatml"), context_length=None)
    session.observe(USER)
    with pytest.raises(ConfigError, match="max_token_length"):
        session.prompt(None)
    assert session.prompt(7).max_tokens == 7
    with pytest.raises(ContextOverflow, match="0 new tokens"):
        session.prompt(0)


def test_a_prompt_asked_twice_is_the_same_and_cannot_be_written_to(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer)
    session.observe(USER)
    prompt = session.prompt(9)
    assert np.array_equal(prompt.tokens, session.prompt(9).tokens)
    assert prompt.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 1
    made = sample([5, 6])
    session.record(made)
    made.tokens[0] = 7
    assert session.transcript().segments[0].tokens[-2:].tolist() == [5, 6]


def test_an_environment_that_changes_its_message_later_changes_nothing(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session, message = open_session(tokenizer), {"role": "user", "content": "hi"}
    session.observe([message])
    say(session, sample, tokenizer, "a<|im_end|>")
    message["content"] = "changed"
    session.observe(USER)
    say(session, sample, tokenizer, "b<|im_end|>")
    assert len(session.transcript().segments) == 1


def test_a_token_without_a_real_logprob_is_masked_and_counted(tokenizers, open_session, sample):
    session = open_session(tokenizers("chatml"))
    session.observe(USER)
    session.prompt(9)
    nan, inf = float("nan"), float("inf")
    session.record(sample([5, 6, 7, 8, 9], logprobs=[-0.5, nan, -inf, 1.0, 1e-6]))
    transcript = session.transcript()
    assert transcript.masked == {"no_logprob": 1, "impossible_logprob": 2}
    assert transcript.segments[0].mask[-5:].tolist() == [True, False, False, False, True]
    assert transcript.segments[0].logprobs[-5:].tolist() == [-0.5, 0.0, 0.0, 0.0, pytest.approx(1e-6)]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason", "says"),
    [
        ([5, 6], [-1.0], "stop", "one for each token"),
        ([-1], [-1.0], "stop", "token -1"),
        ([99_999], [-1.0], "stop", "token 99999"),
        ([5], [-1.0], "abort", "stop_reason 'abort'"),
    ],
)
def test_a_broken_sample_is_refused_and_leaves_no_trace(
    tokens, logprobs, reason, says, tokenizers, open_session, sample
):
    session = open_session(tokenizers("chatml"))
    session.observe(USER)
    session.prompt(9)
    with pytest.raises(PolicyUnavailable, match=says):
        session.record(sample(tokens, reason, logprobs))
    assert session.transcript().segments == ()
    session.record(sample([5]))  # sampled again, the same prompt still stands
    assert session.transcript().segments[0].mask.sum() == 1


def test_a_sample_needs_a_prompt(tokenizers, open_session, sample):
    session = open_session(tokenizers("chatml"))
    session.observe(USER)
    with pytest.raises(RunError, match="prompt\\(\\) before"):
        session.record(sample([5]))


def test_a_stop_that_is_nowhere_to_be_seen_is_counted(tokenizers, open_session, sample):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, stop="###")
    session.observe(USER)
    completion = say(session, sample, tokenizer, "hello")
    assert (completion.text, completion.finish_reason, session.unproven_stops) == ("hello", "stop", 1)
    session.observe(USER)
    assert say(session, sample, tokenizer, "a ### b", "length").text == "a ### b"
    session.observe(USER)
    assert say(session, sample, tokenizer, "a ### b").text == "a "
    assert session.unproven_stops == 1


def test_an_end_of_turn_that_only_the_sampler_knows_still_ends_the_turn(tokenizers, open_session, sample):
    tokenizer = tokenizers("llama3")
    session = open_session(tokenizer)
    session.observe(USER)
    assert say(session, sample, tokenizer, "hello<|end_of_text|>").text == "hello"
    session.observe(USER)
    assert "hello<|end_of_text|><|start_header_id|>user" in text_of(tokenizer, session.prompt(9).tokens)
