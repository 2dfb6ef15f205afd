"""Where the answer of a completion stands, and that any text at all is read in bounded time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos_math_server import latex
from tinker_atropos_math_server.boxed import after_thought, final_box
from tinker_atropos_math_server.grading import decide


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (r"so \boxed{5}", "5", 1),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1),
        (r"$\boxed{ \{1,2\} }$", r" \{1,2\} ", 1),
        (r"\fbox{5}", "5", 1),
        (r"\boxed 5", "5", 1),
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"\boxed{5} or rather \boxed{6}", "6", 2),
        (r"\boxed{5} \boxed{}", "", 2),
        (r"\boxed{5} and then \boxed{6", None, 2),
        (r"\boxed{", None, 1),
        (r"\boxed{}", "", 1),
        (r"the answer is 5", None, 0),
        ("% \\boxed{5}\nI do not know", None, 0),
        ("It is 4. % \\boxed{5}", None, 0),
        ("\\boxed{4}\n<!-- \\boxed{5} -->", "4", 1),
        (r"20 % of 50 is \boxed{10}", "10", 1),
        (r"20\% of 50 is \boxed{10}", "10", 1),
        (r"\boxedly{5}", None, 0),
        ("\\boxed{" + "{" * 5000 + "5" + "}" * 5000 + "}", "{" * 5000 + "5" + "}" * 5000, 1),
        ("\\boxed{" * 5000 + "5", None, 5000),
    ],
)
def test_the_last_box_counts(text: str, content: str | None, count: int) -> None:
    found = final_box(text)
    assert (found.content, found.count) == (content, count)


def test_a_box_in_the_thought_is_none() -> None:
    assert after_thought(r"<think>\boxed{5}</think> It is 6.") == " It is 6."
    assert after_thought(r"\boxed{5}</think>\boxed{6}") == r"\boxed{6}"
    assert after_thought(r"<think>\boxed{5}") == ""
    assert after_thought(r"\boxed{5}") == r"\boxed{5}"


PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "\\frac{", "\\frac", "\\sqrt", "7", "1,234", ",", "-", "−", "$", "%", "^", "**", "/",
     "=", "\\text{", "cm", "\\%", "_8", "\\in", "(", "]", "\\{", "\\left", "\\begin{pmatrix}", "&", "\\\\", "\x00",
     "\ud800", "٣", "½", "<think>", "</think>", "<!--", "\n", "!", "e9", "x"]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=40).map("".join)))
def test_any_text_at_all_is_read_without_an_error(text: str) -> None:
    final_box(after_thought(text))
    latex.quantity(latex.normal(text))
    for gold in ("7", r"\text{Evelyn}", "2516_8", "x=5", "(1,2]", "10\\%"):
        decide(gold, text, "What is $3+4$?")


def test_long_and_repetitive_answers_are_read_in_bounded_time() -> None:
    units = ["1", "1,", "111,", "$", "\\frac", "\\frac{", "\\frac{1}", "\\sqrt", "\\text{", "\\text{a}", "a", "a ", " ",
             "-", "{", "(", "^", "_", "x=", "%", "\\left", "\\,", "\\boxed{", "\\boxed", "!", "or ", "1 ", ".", "\\\\",
             "<!--", "\\{", "cm ", "'", "\\circ"]  # fmt: skip
    for unit in units:
        final_box("\\boxed{5}" + unit * (200_000 // len(unit)) + "\\boxed{6}")
        for frame in ("{}", "7{}", "{}7", "({})", "\\text{{{}}}", "7 \\text{{{}}}^2", "$ {} $", "x = {} = 7"):
            decide("7", frame.format(unit * (900 // len(unit))), "What is $3+4$?" * 50)
