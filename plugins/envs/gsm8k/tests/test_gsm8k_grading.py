r"""Right answers, wrong ones and cheats, in every form that a completion may take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos import Completion
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.environment import Gsm8kEnvironment
from tinker_atropos_gsm8k.grading import bare_integer, final_answer, number
from tinker_atropos_gsm8k.problems import FixedSource, Problem
from tinker_atropos_gsm8k.verifier import Verifier

RIGHT = [
    # GSM8K's own form
    ("3 * 6 = 18\n#### 18", "18"),
    ("####18", "18"),
    ("#### $18", "18"),
    ("#### 18.", "18"),
    ("#### **18**", "18"),
    ("#### 18\n\nQuestion: What are 5 and 7?\nAnswer: 12", "18"),
    ("#### 18 dollars", "18"),
    ("#### The answer is 18", "18"),
    ("#### 3 * 6 = 18", "18"),
    # boxed
    (r"So \boxed{18}.", "18"),
    (r"\boxed{ 18 }", "18"),
    (r"$\boxed{\text{The answer is } 18}$", "18"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{\textbf{18}}", "18"),
    (r"\fbox{18}", "18"),
    (r"\boxed 18", "18"),
    (r"\boxed{\boxed{18}}", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{{18}}", "18"),
    # the last number
    ("She earns $18 every day.", "18"),
    ("It is **18**.", "18"),
    ("First 16, then 18", "18"),
    # commas
    ("#### 1,234", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{1,\!234,\!567}", "1234567"),
    ("It costs 1,234,567 in all.", "1234567"),
    ("#### 1 234", "1234"),
    ("#### 12\u202f345\u202f678", "12345678"),
    # a remark behind it
    ("#### 18 (18 eggs in 2 boxes)", "18"),
    ("#### 18 dollars (per day)", "18"),
    # currency and units
    ("#### $1,234.50", "1234.5"),
    ("It is $1,234.50.", "1234.5"),
    ("#### €18", "18"),
    ("#### 5%", "5"),
    (r"\boxed{5\%}", "5"),
    ("#### 60 km/h", "60"),
    (r"\boxed{18 \text{ m}^2}", "18"),
    ("The area is 18 m^2", "18"),
    ("#### $18/hour", "18"),
    (r"\boxed{18^\circ}", "18"),
    # negatives
    ("#### -8", "-8"),
    ("#### −8", "-8"),
    ("#### -$8", "-8"),
    ("#### $-8", "-8"),
    (r"\boxed{-8}", "-8"),
    ("It is -8 degrees.", "-8"),
    ("It is −8.", "-8"),
    ("Ages 17-18", "18"),
    # decimals
    ("#### 18.0", "18"),
    ("#### 18.00 dollars", "18"),
    ("#### .5", "1/2"),
    ("#### 0.50", "1/2"),
    ("#### 1.8e1", "18"),
    # fractions and LaTeX
    ("#### 1/2", "1/2"),
    ("#### 36/2", "18"),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{\dfrac{36}{2}}", "18"),
    (r"\boxed{-\frac{1}{2}}", "-1/2"),
    (r"\boxed{1 \frac{1}{2}}", "3/2"),
    ("#### 1 1/2", "3/2"),
    (r"It is $\frac{1}{2}$.", "1/2"),
    ("It is 3/4 of a cake.", "3/4"),
    (r"The answer is \(18\).", "18"),
    (r"\[ x = 18 \]", "18"),
    # expressions, by math-verify
    (r"\boxed{3 \times 6}", "18"),
    (r"\boxed{3 \cdot 6}", "18"),
    (r"\boxed{\sqrt{324}}", "18"),
    (r"\boxed{\frac{6^2}{2}}", "18"),
    (r"\boxed{\left(3+3\right) \times 3}", "18"),
    ("#### 3 × 6", "18"),
    ("#### 3**2 * 2", "18"),
    ("#### 20 - 2", "18"),
    ("#### 3 x 6", "18"),
    (r"\boxed{2(9)}", "18"),
    (r"\boxed{\frac12}", "1/2"),
    (r"The answer is $3 \cdot 6$.", "18"),
    # several: the last counts
    ("#### 17\n#### 18", "18"),
    ("#### 17 #### 18", "18"),
    (r"\boxed{17} no, \boxed{18}", "18"),
    ("#### 17\nWait, \\boxed{18}", "18"),
    ("\\boxed{17}\n#### 18", "18"),
    ("#### 17, 18", "18"),
    (r"\boxed{17 \text{ or } 18}", "18"),
    # a markdown heading is no answer
    ("#### Step 2: add 5\nIt is 18", "18"),
    ("#### 1. Add 5\n\\boxed{18}", "18"),
    ("#### Solution\n3 * 6 = 18", "18"),
]

WRONG = [
    ("#### 17", "18"),
    ("#### 180", "18"),
    ("#### 1.8", "18"),
    ("#### -18", "18"),
    ("#### 18.004", "18"),
    ("#### 18.0000000001", "18"),
    (r"\boxed{17}", "18"),
    ("She earns $17 every day.", "18"),
    (r"\boxed{3 \times 7}", "18"),
    ("#### 1,234", "1235"),
    ("#### 1/3", "1/2"),
    ("#### 18/0", "18"),
    (r"\boxed{\frac{18}{0}}", "18"),
    ("#### 0.05", "5"),
    ("", "18"),
    ("I don't know.", "18"),
    ("eighteen", "18"),
    ("H2O", "2"),
    # cheats: all of the candidates, the right one among them
    ("16 17 18 19 20", "18"),
    ("#### 16, 17, 18, 19", "18"),
    (r"\boxed{16, 17, 18, 19}", "18"),
    ("#### 18 #### 19", "18"),
    ("#### 18\n#### 19", "18"),
    (r"\boxed{18} \boxed{19}", "18"),
    (r"\boxed{18 \boxed{19}}", "18"),
    (r"\boxed{18 \text{ or } 19}", "18"),
    # cheats: a marker with nothing, or nothing finite, behind it
    ("It is 18 ####", "18"),
    ("It is 18\n#### ", "18"),
    (r"It is 18 \boxed{}", "18"),
    (r"\boxed{18} \boxed{ }", "18"),
    (r"\boxed{18", "18"),
    (r"18 \boxed", "18"),
    ("18\n#### NaN", "18"),
    ("18\n#### inf", "18"),
    ("18\n#### -infinity", "18"),
    (r"18 \boxed{\infty}", "18"),
    # cheats: too large to be a number, or begun by the right one
    ("#### 18e999", "18"),
    ("#### 1e999", "1"),
    ("#### 18" + "0" * 5000, "18"),
    ("9" * 5000, "9"),
    (r"\boxed{10**10**10}", "10"),
    ("#### 10**10**18", "18"),
    ("#### 9^9^9^18", "18"),
    (r"\boxed{18!!!!!!}", "720"),
    # an expression that holds the right number
    (r"\boxed{x + 18}", "18"),
    (r"\boxed{18 - 18}", "18"),
    (r"\boxed{18 \times 0}", "18"),
    (r"\boxed{18 + }", "17"),
]


@pytest.fixture(scope="module")
def environment() -> Gsm8kEnvironment:
    return Gsm8kEnvironment(Gsm8kConfig(dataset="gsm_symbolic"), FixedSource({}))


@pytest.fixture
async def graded(environment: Gsm8kEnvironment) -> AsyncIterator[Gsm8kEnvironment]:
    yield environment
    await environment.close()


async def test_a_right_answer_is_right_in_every_form(graded: Gsm8kEnvironment) -> None:
    for text, gold in RIGHT:
        step = await graded.score(Completion(text), Problem("?", Fraction(gold)))
        assert (step.reward, step.metrics["no_answer"]) == (1.0, 0.0), (text, gold, final_answer(text))


async def test_a_wrong_answer_and_a_cheat_earn_nothing(graded: Gsm8kEnvironment) -> None:
    for text, gold in WRONG:
        step = await graded.score(Completion(text), Problem("?", Fraction(gold)))
        assert step.reward == 0.0, (text[:100], gold, final_answer(text))
        assert step.terminated


@pytest.mark.parametrize("text", ["", "no idea", "#### ", r"\boxed{}", "18\n#### NaN"])
async def test_no_answer_is_counted(graded: Gsm8kEnvironment, text: str) -> None:
    step = await graded.score(Completion(text), Problem("?", Fraction(18)))
    assert step.metrics["no_answer"] == 1.0


@pytest.mark.parametrize("text", ["#### 18", r"\boxed{18}", "18", r"\boxed{3 \times 6}"])
async def test_a_truncated_completion_is_wrong_and_counted_though_it_holds_the_answer(
    graded: Gsm8kEnvironment, text: str
) -> None:
    step = await graded.score(Completion(text, "length"), Problem("?", Fraction(18)))
    assert (step.reward, step.metrics["truncated"], step.metrics["correct"]) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        (" -8 ", -8),
        ("0", 0),
        ("+8", None),
        ("018", None),
        ("18.", None),
        ("18 + 1", None),
        ("", None),
        ("１８", None),
    ],
)
def test_a_bare_integer_is_nothing_but_its_digits(text: str, value: int | None) -> None:
    assert bare_integer(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    "text", ["", "x", "1e31", "1e9999", "9" * 41, "nan", "inf", "1_000", "0x10", "١٨", "--1", "1,23"]
)
def test_what_is_no_sane_number_has_no_value(text: str) -> None:
    assert number(text) is None


async def test_an_expression_that_never_ends_is_cut_off_and_the_next_one_graded() -> None:
    verifier = Verifier(cpu_seconds=0.5)
    try:
        # Past the gate on purpose: `final_answer` refuses a tower of powers before it comes here.
        assert await verifier.equal("9^{9^{9^{9}}}", Fraction(18)) is None
        assert await verifier.equal(r"3 \times 6", Fraction(18)) is True
    finally:
        await verifier.close()


async def test_a_verifier_that_was_closed_starts_again() -> None:
    verifier = Verifier()
    try:
        assert await verifier.equal("20 - 2", Fraction(18)) is True
        await verifier.close()
        assert await verifier.equal("22 - 3", Fraction(18)) is False
    finally:
        await verifier.close()


PIECES = st.sampled_from(
    ["#### ", "\\boxed{", "}", "{", "\\frac{", "18", "1,234", ".", ",", "-", "−", "$", "%", "^", "**", "/", "=", "e9",
     "\n", " ", "\\", "\\(", "\\)", "\\text{", "or ", "dollars", "٣", "½", "(", ")", "\x00", "\ud800", "0" * 50]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=30).map("".join)))
def test_any_text_at_all_is_read_without_an_error(text: str) -> None:
    answer = final_answer(text)
    assert answer.value is None or answer.expression is None
    assert answer.given in (True, False)
    assert answer.expression is None or len(answer.expression) <= 400
    bare_integer(text)
    number(text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["1", "18", "(", ")", "+", "-", "*", "/", "^2", "{", "}", "\\frac", "\\sqrt", "\\cdot ", "x", ".", " "]
        ),
        max_size=25,
    ).map("".join)
)
async def test_any_expression_at_all_is_graded_without_an_error(inside: str) -> None:
    environment = _shared_environment()
    step = await environment.score(Completion(f"\\boxed{{{inside}}}"), Problem("?", Fraction(18)))
    assert step.reward in (0.0, 1.0)


_SHARED: list[Gsm8kEnvironment] = []


def _shared_environment() -> Gsm8kEnvironment:
    """Return one environment for all examples of a property, so that one child process grades them all."""
    if not _SHARED:
        _SHARED.append(Gsm8kEnvironment(Gsm8kConfig(dataset="gsm_symbolic"), FixedSource({})))
    return _SHARED[0]


def test_long_and_repetitive_texts_are_read_in_bounded_time() -> None:
    units = ["1,", "111,", "#", "#### ", "#### 1 a\n", "\\boxed{", "\\boxed{1", "$", "$1+", "\\(", "\\(1+", "\\[ 1",
             "a ", "1 a", "9", "1/", "-", "{", "\\frac{1}", "\\frac ", " ", "1e", "\\text{", "= ", "1."]  # fmt: skip
    for unit in units:
        for frame in (
            "{}",
            "#### {}",
            "#### 18 {}!1",
            "#### is {}18",
            "\\boxed{{{}}}",
            "\\boxed{{18{} 1+}}",
            "$ {} 1 $",
            "{} 1",
        ):
            final_answer(frame.format(unit * (200_000 // len(unit))))
            final_answer(frame.format(unit * (900 // len(unit))))
