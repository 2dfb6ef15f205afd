"""Tool calls: read in the three forms, served over HTTP, and in our own text environments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos_managed_server.tool_calls import for_template, read_tool_calls, tool_calls, tool_format_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "where": {"type": "object"},
                "zip": {"type": ["string", "null"]},
            },
        },
    },
}
TOOLS = [WEATHER]


def calls(reading):
    return [(call["name"], call["arguments"]) for call in reading.calls]


def test_hermes():
    one = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    reading = read_tool_calls("hermes", one, TOOLS)
    assert (reading.content, calls(reading)) == ("I look.", [("weather", {"city": "Köln"})])
    two = read_tool_calls("hermes", one + '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', TOOLS)
    assert calls(two) == [("weather", {"city": "Köln"}), ("f", {})]
    unclosed = read_tool_calls("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": null}]}}', TOOLS)
    assert calls(unclosed) == [("f", {"a": [1, {"b": None}]})]
    assert calls(read_tool_calls("hermes", '<tool_call>{"name": "f"}</tool_call>', TOOLS)) == [("f", {})]
    as_text = r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>'
    assert calls(read_tool_calls("hermes", as_text, TOOLS)) == [("f", {"a": 1})]


def test_llama3():
    call = '{"name": "weather", "parameters": {"city": "Köln"}}'
    for text in (call, f"<|python_tag|>{call}", f"  {call}\n"):
        assert calls(read_tool_calls("llama3_json", text, TOOLS)) == [("weather", {"city": "Köln"})]
    assert len(read_tool_calls("llama3_json", f"{call}; {call}", TOOLS).calls) == 2
    before = read_tool_calls("llama3_json", f"I look. <|python_tag|>{call}", TOOLS)
    assert (before.content, len(before.calls)) == ("I look.", 1)
    for text in ('{"answer": 42}', "plain", '{"name": "Ada", "age": 3}', "{not json", "42"):
        reading = read_tool_calls("llama3_json", text, TOOLS)
        assert (reading.content, reading.calls, reading.malformed) == (text, (), False)


def test_qwen3_coder():
    text = (
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n<York>\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n'
        "<parameter=zip>\n50667\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    reading = read_tool_calls("qwen3_coder", text, TOOLS)
    assert reading.content == "I look."
    assert calls(reading) == [
        (
            "weather",
            {"city": "New\n<York>", "days": 3, "hourly": True, "where": {"a": [1]}, "zip": "50667", "other": "7"},
        )
    ]
    bare = read_tool_calls("qwen3_coder", "<function=f>\n</function>", TOOLS)
    assert (calls(bare), bare.content) == ([("f", {})], "")
    two = "<tool_call><function=f></function></tool_call>\n<tool_call><function=g></function></tool_call>"
    assert [name for name, _ in calls(read_tool_calls("qwen3_coder", two, TOOLS))] == ["f", "g"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {'),
        ("hermes", "<tool_call>f(1)</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", "<|python_tag|>"),
        ("llama3_json", '{"name": "f", "parameters": {'),
        ("llama3_json", '{"name": "f", "parameters": {}} and more'),
        ("llama3_json", '{"name": 5, "parameters": {}}'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>"),
        ("qwen3_coder", "<tool_call>f</tool_call>"),
        ("qwen3_coder", "<function=f>text</function>"),
        ("qwen3_coder", "<function=></function>"),
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(form, text):
    reading = read_tool_calls(form, text, TOOLS)
    assert (reading.content, reading.calls, reading.malformed) == (text, (), True)


def test_a_call_inside_a_thought_is_none():
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert not read_tool_calls("hermes", f"<think>maybe {call}", TOOLS).calls
    reading = read_tool_calls("hermes", f"<think>maybe {call}</think>\n\n{call}", TOOLS)
    assert (len(reading.calls), reading.content) == (1, f"<think>maybe {call}</think>")


def test_the_form_is_the_one_that_the_template_shows():
    assert tool_format_of("auto", "… <tool_call>\n<function=x> …") == "qwen3_coder"
    assert tool_format_of("auto", "… <tool_call> …") == "hermes"
    assert tool_format_of("auto", "… <|python_tag|> …") == "llama3_json"
    assert tool_format_of("auto", "{{ messages }}") is None
    assert tool_format_of("none", "<tool_call>") is None
    assert tool_format_of("hermes", "") == "hermes"


def test_templates_get_arguments_as_objects():
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]},
    ]
    first, second = for_template(messages)
    assert first["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert second["tool_calls"][0]["function"]["arguments"] == "no json"
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
made = st.lists(
    st.fixed_dictionaries({"name": st.text(min_size=1), "arguments": st.dictionaries(st.text(), values, max_size=3)}),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(made)
def test_what_was_written_as_hermes_and_llama_is_read(written):
    marked = [call for call in written if "tool_call>" in json.dumps(call) or "think>" in json.dumps(call)]
    hermes = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in written)
    llama = "<|python_tag|>" + "; ".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in written
    )
    if not marked:
        assert list(read_tool_calls("hermes", hermes, TOOLS).calls) == written
        assert list(read_tool_calls("llama3_json", llama, TOOLS).calls) == written
    served = tool_calls(written, "call_")
    assert [json.loads(call["function"]["arguments"]) for call in served] == [call["arguments"] for call in written]


TAGS = "<tool_call> </tool_call> <function=f> </function> <parameter=a> </parameter> <|python_tag|> <think> </think>"
pieces = st.sampled_from([*TAGS.split(), *'{}":,;[1\n', '"name"', '"f"', '{"name": "f", "arguments": {}}'])


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from(["hermes", "llama3_json", "qwen3_coder"]))
def test_no_text_breaks_a_reader(text, form):
    reading = read_tool_calls(form, text, TOOLS)
    assert reading.calls or reading.content == text
    for call in reading.calls:
        assert call["name"]
        json.dumps(call["arguments"])


# Over HTTP. The template is like Qwen's: tools in a system turn, calls re-written between tags.

QWEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call> is how to call<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(QWEN)
    return path


HI = [{"role": "user", "content": "hey"}]


async def test_tools_are_rendered_and_calls_are_read(serve, template):
    served = await serve("chatml", f"I look.\n{CALL}<|im_end|>", chat_template=template)
    status, body = await served.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
    (choice,) = body["choices"]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "tool_calls", "I look.")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert '"weather"' in served.policy.tokenizer().decode(served.policy.asked[0][0])
    # Sent back with its answer, the past is what was sampled: the next turn is proven after it.
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [*HI, {**choice["message"]}, answer]
    await served.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    first, second = (asked for asked, _, _ in served.policy.asked)
    said = served.policy.tokenizer().encode(f"I look.\n{CALL}<|im_end|>", add_special_tokens=False)
    assert second[: len(first) + len(said)] == first + said


async def test_a_call_alone_has_null_content_and_streams(serve, template):
    served = await serve("chatml", f"{CALL}<|im_end|>", chat_template=template)
    asked = {"messages": HI, "tools": TOOLS, "tool_choice": "auto"}
    _, body = await served.post("/v1/chat/completions", asked)
    assert body["choices"][0]["message"]["content"] is None
    async with served.client.post(
        served.endpoint.url + "/chat/completions", json={**asked, "stream": True}
    ) as response:
        text = await response.text()
    found = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0] for chunk in found]
    (called,) = [choice["delta"]["tool_calls"] for choice in deltas if "tool_calls" in choice["delta"]]
    assert (called[0]["index"], called[0]["function"]["name"]) == (0, "weather")
    assert deltas[-1]["finish_reason"] == "tool_calls"


async def test_calls_stay_text_with_tool_choice_none_or_no_tools(serve, template):
    served = await serve("chatml", f"{CALL}<|im_end|>", chat_template=template)
    for asked in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        _, body = await served.post("/v1/chat/completions", {"messages": HI, **asked})
        choice = body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_a_call_that_ran_into_the_limit_is_text_and_says_length(serve, template):
    served = await serve("chatml", f"{CALL}<|im_end|>", chat_template=template)
    _, body = await served.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "max_tokens": 20})
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert served.endpoint.counts.malformed_tool_calls == 1


async def test_tools_that_the_template_does_not_know_are_refused(serve):
    served = await serve("chatml", "one<|im_end|>")
    status, body = await served.post("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
    assert (status, body["error"]["param"]) == (400, "tools")


# In our own text environments.


def turn(session, sample, tokenizer, text):
    session.prompt(200)
    return session.record(sample(tokenizer.encode(text, add_special_tokens=False)))


def test_an_environment_gets_calls_and_the_next_turn_keeps_the_tokens(open_session, tokenizers, sample, template):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, chat_template=template)
    session.observe(HI, TOOLS)
    completion = turn(session, sample, tokenizer, f"I look.\n{CALL}<|im_end|>")
    (call,) = completion.tool_calls
    assert (completion.text, completion.finish_reason, call["function"]["name"]) == ("I look.", "stop", "weather")
    session.observe([{"role": "tool", "tool_call_id": call["id"], "content": "sunny"}])
    completion = turn(session, sample, tokenizer, "It is sunny.<|im_end|>")
    assert (completion.text, completion.tool_calls) == ("It is sunny.", ())
    transcript = session.transcript()
    assert len(transcript.segments) == 1
    assert [message["role"] for message in transcript.messages] == ["user", "assistant", "tool", "assistant"]
    assert transcript.messages[1]["tool_calls"][0]["id"] == call["id"]
    rendered = tokenizer.apply_chat_template(
        for_template(list(transcript.messages)), tools=TOOLS, chat_template=QWEN, tokenize=False
    )
    assert tokenizer.decode(transcript.segments[0].tokens) == rendered.removesuffix("\n")


def test_a_call_written_in_another_way_still_keeps_the_tokens(open_session, tokenizers, sample, template):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, chat_template=template)
    session.observe(HI, TOOLS)
    said = '<tool_call>{"arguments":{"city":"Rome"},"name":"weather"}</tool_call>'
    for _ in range(3):  # the template would write it otherwise, so the turn is given to it as text
        completion = turn(session, sample, tokenizer, said + "<|im_end|>")
        assert len(completion.tool_calls) == 1
        session.observe([{"role": "tool", "content": "sunny"}])
    transcript = session.transcript()
    assert len(transcript.segments) == 1
    assert tokenizer.decode(transcript.segments[0].tokens).count(said) == 3


def test_a_malformed_call_stays_text_in_an_environment(open_session, tokenizers, sample, template):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, chat_template=template)
    session.observe(HI, TOOLS)
    completion = turn(session, sample, tokenizer, "<tool_call>{<|im_end|>")
    assert (completion.text, completion.tool_calls, session.malformed_tool_calls) == ("<tool_call>{", (), 1)


def test_without_tools_no_call_is_read(open_session, tokenizers, sample, template):
    tokenizer = tokenizers("chatml")
    session = open_session(tokenizer, chat_template=template)
    session.observe(HI)
    completion = turn(session, sample, tokenizer, f"{CALL}<|im_end|>")
    assert (completion.text, completion.tool_calls) == (CALL, ())


def test_the_parser_can_be_chosen_or_turned_off(open_session, tokenizers, sample, template):
    tokenizer = tokenizers("chatml")
    said = "<function=weather><parameter=days>3</parameter></function>"
    for parser, expected in (("qwen3_coder", 1), ("none", 0), ("auto", 0)):
        session = open_session(tokenizer, chat_template=template, tool_parser=parser)
        session.observe(HI, TOOLS)
        assert len(turn(session, sample, tokenizer, f"{said}<|im_end|>").tool_calls) == expected
