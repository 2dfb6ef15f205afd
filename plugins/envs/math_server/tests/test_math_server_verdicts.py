"""Verdicts on pairs of gold and given answer, written by hand: equivalent forms, near misses, and cheats."""

from __future__ import annotations

import pytest
from tinker_atropos.grading import Limits
from tinker_atropos_math_server.grading import Grader

RIGHT = [
    # numbers
    ("5", "5"), ("5", "05.0"), ("1000", "1 000"), ("137.5", "137 1/2"), ("5", "5.0"), ("5", "$5$"), ("5", r"\(5\)"),
    ("5", " 5 . "), ("-3", "−3"), ("5", "+5"), ("1000", "1,000"), ("1000", r"1{,}000"), ("10,\\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"), (".35625", "0.35625"), (".35625", r"\frac{57}{160}"),
    ("1.25", "5/4"), ("0.15", r"\frac{3}{20}"), (".0000672", r"6.72\times10^{-5}"), (".0000672", "6.72e-5"),
    ("1200", r"1.2 \cdot 10^3"), ("7", "14/2"), ("7", "2+5"), ("7", r"\frac{7!}{720}"), ("２５", "25"), ("25", "２５"),
    ("2^{10}", "1024"), ("1024", "2^{10}"), ("137 \\frac{1}{2}", "137.5"), ("1\\frac{4}{5}", r"\frac{9}{5}"),
    ("\\frac{9}{5}", "1 4/5"), ("3.5", "3½"),
    # fractions
    (r"\frac{14}{3}", "14/3"), (r"\frac{14}{3}", r"\dfrac{14}{3}"), (r"\frac43", r"\frac{4}{3}"), (r"\frac 59", "5/9"),
    (r"\frac9{19}", r"\tfrac{9}{19}"), (r"-\frac{35}{9}", r"\frac{-35}{9}"), (r"-\frac{35}{9}", r"\frac{35}{-9}"),
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", ".5"), (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\frac{1}{3}", "0.333333"),
    (r"\frac{2}{3}", "0.6666667"), (r"\frac{3840}{289}", "13.28719723"),
    # radicals and constants
    (r"11\sqrt2", r"11\sqrt{2}"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"70 \sqrt{2}", r"70\sqrt2"), (r"11 \sqrt{5} + 11", r"11(1+\sqrt5)"), (r"3\sqrt{13}", r"\sqrt{117}"),
    (r"\sqrt{53}", "7.280110"), (r"12\pi", "37.699112"), (r"12\pi", "12π"), (r"288 \pi", r"\pi \cdot 288"),
    (r"\frac{20000}{\pi}", r"20000/\pi"), (r"-\frac{\pi}{6}", r"-\pi/6"), ("2√3", r"2\sqrt{3}"), (r"2\sqrt{3}", "2√3"),
    # complex numbers
    ("6 - 5i", "-5i+6"), ("1+274i", "274i + 1"), ("1 - 12i", "1-12 i"),
    # intervals, inequalities, membership
    ("(3,4]", "(3, 4]"), (r"(-\infty, 0]", r"\left(-\infty,0\right]"), (r"(2,\infty)", r"(2, +\infty)"),
    ("x \\in [-2,7]", "[-2,7]"), ("[-2,7]", r"x \in [-2, 7]"), ("[-2,7]", r"-2 \le x \le 7"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"), (r"(0,9) \cup (9,36)", "(0,9) ∪ (9,36)"),
    (r"\left(\frac{3}{5},\frac{8}{3}\right]", r"(0.6, \frac83]"), (r"(5,\infty)", "x > 5"),
    (r"x \ge 5", r"x \geqslant 5"), (r"x \leqslant 5", r"x \le 5"), ("[-2,7]", r"-2 \leqslant x \leq 7"),
    # sets, lists, plus-minus
    ("3, 5, 7", "7, 3, 5"), ("3, 5, 7", r"\{3,5,7\}"), ("1,-2", "-2, 1"), ("1,-2", r"x=1 \text{ or } x=-2"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1-\sqrt5, 1+\sqrt5\}"),
    (r"3 \pm 2 \sqrt{2}", r"3 ± 2√2"), ("3", r"\{3\}"), (r"\emptyset", r"\varnothing"),
    (r"\emptyset", r"\text{no solution}"),
    # tuples
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"), ("(6,31,-1)", r"\left(6, 31, -1\right)"),
    (r"\left( \frac{3}{2}, -13 \right)", "(1.5, -13)"), ("(1,-16,-4,43)", "(1, -16, -4, 43)"),
    # matrices and vectors
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\ \frac23 \end{bmatrix}"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix}-1&0\\0&-1\end{pmatrix}"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}"),
    # expressions
    ("p - q", "-q+p"), ("R-r", "-r+R"), ("3R^2", "3r^2"), ("x^5 - x^4 + x^3 - x^2 + x - 1", "(x-1)(x^4+x^2+1)"),
    ("(a+5)(b+2)", "ab+2a+5b+10"), (r"\cot x", r"\frac{1}{\tan x}"), (r"\frac{11+9a}{20}", "0.55+0.45a"),
    ("6r^2-4r-24", "2(3r^2-2r-12)"), ("8n^2 + 4n + 1", "1+4n+8n²"), ("2k+2", "2(k+1)"), ("5r^5", "5 r^{5}"),
    ("3R^2", r"3 \cdot R^2"),
    # equations
    ("x=5", "5"), ("5", "x=5"), ("5", "x = 10/2"), ("y = 2x + 3", "2x+3"), ("y = 2x + 3", "y=3+2x"), ("7", "2+5=7"),
    ("5x - 7y + 11z + 4 = 0", "10x - 14y + 22z + 8 = 0"), ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z = -4"),
    ("x^2", "f(x)=x^2"), (r"\frac{1}{2}", r"p = \frac12"), ("12", r"\text{Area} = 12"),
    # units, currency, percent, degrees
    ("90^\\circ", "90"), ("90", "90^{\\circ}"), ("90^\\circ", "90°"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"), ("15\\mbox{ cm}^2", "15"),
    ("15\\mbox{ cm}^2", r"15 \text{ square centimeters}"), ("15", r"15\text{ cm}^2"),
    ("864 \\mbox{ inches}^2", r"864\ \text{in}^2"), ("5.4 \\text{ cents}", "5.4"),
    ("5.4 \\text{ cents}", r"5.4\text{ cent}"), ("\\$18.90", "18.9"), ("18.9", r"\$18.90"), ("\\$32,\\!348", "32348"),
    ("\\$36", "36 dollars"), ("5", "5 cm"), ("10\\%", "10"), ("10", "10\\%"), ("10\\%", "0.1"),
    ("15", r"15\text{ percent}"),
    # numerals with a base
    ("2516_8", "2516_{8}"), ("52_8", r"52_{\text{eight}}"), ("4210_{5}", "4210_5"), ("2516_8", "2516"),
    # text
    (r"\text{Evelyn}", "Evelyn"), (r"\text{Evelyn}", r"\textbf{evelyn}"), (r"\text{ellipse}", r"\text{an ellipse}"),
    (r"\text{(C)}", "C"), (r"\text{(C)}", r"\textbf{(C)}"), (r"\text{even}", "Even"),
    (r"\text{east}", r"\mathrm{East}"), (r"\text{(C)}", "(C)"), ("Yes", r"\text{yes}"), ("Navin", r"\text{Navin}."),
    *((gold, answer) for letter in "ABCDE" for gold in (f"({letter})", rf"\text{{({letter})}}", letter)
      for answer in (f"({letter})", rf"\text{{({letter})}}", rf"\textbf{{{letter}}}", letter, f"{letter}.")),
    (r"\text{(B)}", "b"), (r"\text{Evelyn}", "{Evelyn}"),
]  # fmt: skip

WRONG = [
    # numbers nearby
    ("5", "6"), ("5", "-5"), ("5", "50"), ("5", "5.1"), ("5", "5.0000001"), ("5", "4.999999"), ("1000", "1,0000"),
    (".0000672", ".0000673"), (".0000672", ".000067"), ("326.5", "326"), ("326.5", "326.49999"), ("7", "8=7"),
    ("0.15", "0.150001"), ("1.25", "1.3"), ("5", "five point"), ("11,\\! 111,\\! 111,\\! 100", "1111111110"),
    ("3", "30\\%"), ("5", "٥"), ("25", "2 5"), ("12", "1 2"),
    # fractions
    (r"\frac{14}{3}", r"\frac{3}{14}"), (r"\frac{14}{3}", "4.67"), (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.333334"), (r"\frac{1}{2}", "0.500001"), (r"1\frac{4}{5}", r"\frac{4}{5}"),
    (r"\frac{3}{56}", r"\frac{3}{65}"), ("1/2", "1/0"),
    # radicals
    (r"11\sqrt2", r"11\sqrt{3}"), (r"\sqrt{53}", "7.28"), (r"\sqrt{53}", "53"), (r"\sqrt{51}", r"\sqrt{-51}"),
    (r"12\pi", "12"), (r"12\pi", "37.7"), (r"\pi", "3.14"), (r"\pi", "22/7"), (r"3\sqrt{13}", r"13\sqrt{3}"),
    # complex numbers
    ("6 - 5i", "6+5i"), ("6 - 5i", "5 - 6i"), ("6+9i", "15"),
    # intervals
    ("(3,4]", "[3,4]"), ("(3,4]", "(3,4)"), ("(3,4]", "(3,5]"), (r"(2,\infty)", r"[2,\infty)"), ("[-2,7]", "(-2,7)"),
    (r"(0,9) \cup (9,36)", "(0,36)"), (r"(-\infty, 0]", r"[0, \infty)"), ("[-2,7]", r"-2 < x \le 7"),
    # sets and lists
    ("3, 5, 7", "3, 5"), ("3, 5, 7", "3, 5, 7, 9"), ("1,-2", "1"), ("1,-2", "1,2"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}"), (r"\{1\pm\sqrt{5},-2\}", r"\{1\pm\sqrt{5}\}"), ("3", "3, 4"),
    ("3", r"3 \text{ or } 4"), ("3", "1,2,3,4,5"), (r"\emptyset", "0"), ("0", r"\emptyset"),
    # tuples
    ("(6,31,-1)", "(31,6,-1)"), ("(6,31,-1)", "(6,31)"), ("(3,4)", "(4,3)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi)"),
    # matrices
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
    (r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}", r"\begin{pmatrix} -2 & -14 & -7 \end{pmatrix}"),
    (r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}", r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}"),
    # expressions
    ("p - q", "q - p"), ("R-r", "0"), ("R-r", "r-R"), ("2R + r", "3r"), ("2k", "2n"), ("(a+5)(b+2)", "(a+2)(b+5)"),
    (r"\cot x", r"\tan x"), ("5r^5", "5r^4"), ("x^3+3x-6", "x^3+3x+6"), ("x^3+3x-6", "x^3+3x-6=0+1"), ("2k+2", "2k"),
    ("x", "3"), ("3", "x"),
    # equations
    ("x=5", "y=5"), ("x=5", "6"), ("y = 2x + 3", "y=2x-3"), ("5x - 7y + 11z + 4 = 0", "5x - 7y + 11z = 4"),
    ("5", "x=6"), ("y = -2x", "2x"), ("5x - 7y + 11z + 4 = 0", "0"), ("5", "5=6"), ("5", "6=5"), ("5", "x=5=6"),
    # units
    ("5.4 \\text{ cents}", r"5.4 \text{ dollars}"), ("15\\mbox{ cm}^2", r"15\text{ cm}"),
    ("15\\mbox{ cm}^2", r"15 \text{ m}^2"), ("\\$18.90", "18.80"), ("90^\\circ", "91"), ("10\\%", "0.2"), ("5", "5x"),
    # numerals
    ("2516_8", "2516_7"), ("2516_8", "2517_8"), ("2516_8", "1358"), ("52_8", "52_{\\text{nine}}"),
    ("25", "25_8"), ("25", r"25_{\text{eight}}"),
    # text
    (r"\text{Evelyn}", "Evelin"), (r"\text{east}", "west"), (r"\text{east}", "seat"), (r"\text{(C)}", "B"),
    (r"\text{(C)}", "(A), (B), (C)"), (r"\text{even}", r"\text{even or odd}"), (r"\text{Evelyn}", "5"),
    ("5", "Evelyn"), (r"\text{Navin}", "Evelyn, Navin"), ("(A)", "(B)"), ("A", "(B)"),
    ("(B)", "3b"), (r"\text{Evelyn}", "Evelyn 5"),
    (r"\text{(B)}", "b^2"), (r"\text{Evelyn}", "5=Evelyn"), ("(A)", r"\text{a}5"),
    ("Yes", "No"), (r"\text{Navin}", r"\text{Nаvin}"), ("x", "х"),
    ("a+5", "а+5"),
]  # fmt: skip

# Cheats: nothing that a policy puts into the box in place of an answer.
CHEATS = [
    "", " ", "{}", "?", "\\", "}", "\\boxed", "answer", r"\text{the answer}", r"\text{}", "x", "1=1", "0=0", "True",
    "None", "9**9**9", "9^{9^{9^{9}}}", "9^{999999999}", "10^{10^{10}}", "(10^9)!", "1000000!", "((99!)!)!",
    "99!!!!!!!", "{" * 5_000 + "7" + "}" * 5_000, "(" * 400 + "7" + ")" * 400, r"\frac{" * 50 + "7" + "}{1}" * 50,
    r"\sqrt{" * 60 + "7" + "}" * 60, "+".join(["x"] * 450), "7" * 900, "7" * 100_000, "-" * 900 + "7", "7," * 300,
    r"\int_0^{\infty} e^{-x^{x^{x}}} dx", r"\sum_{n=1}^{10^{9}} \frac{1}{n}", r"\prod_{k=1}^{100000} k",
    r"\lim_{x \to \infty} x^{x^x}", "x" * 700, r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}", "\x00", "\ud800",
    r"\input{/etc/passwd}", r"\def\x{7}\x", "__import__('os').system('id')", "import os", "lambda: 7", "🐎", "½½", "^",
    "_", r"7 \text{ or } 8 \text{ or } 9", "7,8,9", r"x \in \mathbb{R}", r"\mathbb{R}", "(-\\infty,\\infty)",
    "[0,100]", "6..8", r"7 \pm 100", r"\{0,1,2,3,4,5,6,7,8,9\}", "nan", "inf", r"\infty", "zoo", r"\frac{0}{0}",
    r"0^0\cdot\frac{7}{0}", "i", r"\binom{10^6}{5\cdot10^5}", r"\sin(\sin(\sin(\sin(\sin(\sin(\sin(x)))))))",
    r"7 \equiv 0 \pmod 7", "7 < 8", r"x \le 7",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Grader:
    return Grader(workers=None, limits=Limits(cpu_seconds=2.0))


@pytest.fixture
async def grader(shared: Grader) -> Grader:
    return shared


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
async def test_an_equivalent_form_is_right(grader: Grader, gold: str, answer: str) -> None:
    assert (await grader.grade(gold, answer)).right is True


@pytest.mark.parametrize(("gold", "answer"), WRONG)
async def test_a_near_miss_is_wrong(grader: Grader, gold: str, answer: str) -> None:
    assert (await grader.grade(gold, answer)).right is False


@pytest.mark.parametrize("answer", CHEATS, ids=lambda answer: ascii(answer[:24]))
async def test_a_cheat_is_not_right(grader: Grader, answer: str) -> None:
    assert not (await grader.grade("7", answer)).right


async def test_the_workers_of_these_tests_end(grader: Grader) -> None:
    await grader.close()


ECHOES = [
    ("Compute $\\sqrt{53} + \\frac{2}{3}$.", r"\sqrt{53} + \frac{2}{3}", r"\sqrt{53}+\frac23"),
    ("What is $2 + 3$?", "2+3", "5"),
    ("What is $2 + 3$?", r"\text{What is } 2+3?", "5"),
    ("Factor $x^2 - 1$ completely.", "x^2-1", "(x-1)(x+1)"),
    ("Rationalise $\\frac{1}{\\sqrt{3}}$.", r"\dfrac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}"),
    ("Evaluate $(26^2-24^2-10)^2-10^2$.", "0+(26^2-24^2-10)^2-10^2", "8000"),
    ("Evaluate $(26^2-24^2-10)^2-10^2$.", r"((26^2-24^2-10)^2-10^2) \cdot 1", "8000"),
    (r"Compute $\int_0^1 x^2 dx$.", r"\int_{0}^{1} x^2 \, dx", r"\frac{1}{3}"),
    (r"Compute $\int_0^1 x^2 dx$.", r"\int_{0}^{1} x^{2} \, \mathrm{d}x", r"\frac{1}{3}"),
    ("Factor $x^2-1$.", "x^2-1+0", "(x-1)(x+1)"),
    ("Factor $x^2-1$.", "-1+x^2", "(x-1)(x+1)"),
    ("Factor $x^2-1$.", "f(x) = 1*(x^{2}-1)", "(x-1)(x+1)"),
    ("Rationalise $1/\\sqrt3$.", "1/3^{1/2}", r"\frac{\sqrt{3}}{3}"),
    ("What is $2 + 3$?", "3+2", "5"),
]

UNWORKED = [
    ("", r"\int_0^2 x\,dx", "2"), ("", r"\sum_{k=1}^{3} k", "6"), ("", r"\prod_{k=1}^{3} k", "6"),
    ("", r"\lim_{x \to 0} \frac{\sin x}{x}", "1"), ("", "n = 1+1+1+1+1", "5"),
    ("Evaluate $(26^2-24^2-10)^2-10^2$.", "(24^2-26^2+10)^2-10^2", "8000"),
]  # fmt: skip
WORKED = [
    ("Factor $x^2-1$.", "x^2-1 = (x-1)(x+1)", "(x-1)(x+1)"), ("Evaluate $26^2-24^2-10$.", "26^2-24^2-10 = 90", "90"),
    ("Simplify $2(x+1)-1$.", "1+2x", "2x+1"), (r"Is $\sqrt2$ or $\frac75$ larger?", "2^{1/2}", r"\sqrt{2}"),
    ("Is $x^2+1$ or $x$ larger?", "x^{2}+1", "x^2+1"), ("What is $2 + 3$?", "4+1", "5"), ("", r"2^{10} - 1", "1023"),
    (r"Compute $\int_0^1 x^2 dx$.", r"\int_0^1 x^2 dx = \frac13", r"\frac{1}{3}"),
]  # fmt: skip


async def test_a_question_boxed_whole_is_wrong() -> None:
    grader = Grader(workers=1, limits=Limits())
    question = "What is the value of $(26^2 - 24^2 - 10)^2 - 10^2$?"
    assert (await grader.grade("8000", question, question)).right is False
    assert (await grader.grade("8000", question)).right is False
    await grader.close()


@pytest.mark.parametrize(("question", "answer", "gold"), ECHOES)
async def test_an_expression_of_the_question_left_as_it_was_is_wrong(question: str, answer: str, gold: str) -> None:
    grader = Grader(workers=1, limits=Limits())
    verdict = await grader.grade(gold, answer, question)
    spelled_alike = gold == r"\sqrt{53}+\frac23"  # then the question's own words are the answer
    assert (verdict.right, verdict.reason) == ((True, "") if spelled_alike else (False, "echo"))
    await grader.close()


@pytest.mark.parametrize(("question", "answer", "gold"), UNWORKED)
async def test_a_calculation_in_place_of_a_number_is_wrong(
    grader: Grader, question: str, answer: str, gold: str
) -> None:
    verdict = await grader.grade(gold, answer, question)
    assert (verdict.right, verdict.reason) == (False, "unworked")


@pytest.mark.parametrize(("question", "answer", "gold"), WORKED)
async def test_what_was_worked_out_is_no_echo(question: str, answer: str, gold: str) -> None:
    grader = Grader(workers=1, limits=Limits())
    assert (await grader.grade(gold, answer, question)).right
    await grader.close()


BASES = [
    ("Write 21 in base 8.", "25_8", True), (r"Write 21 in base $\text{eight}$.", "25_{8}", True),
    ("Write 21 as an octal number.", "25_8", True), ("Write 21 in base 8.", "25_9", False),
    ("What is $12_8$ plus 15?", "25_8", False), ("Write 21 in base 80.", "25_8", False),
]  # fmt: skip


@pytest.mark.parametrize(("question", "answer", "right"), BASES)
async def test_a_base_beside_a_gold_without_one_must_be_the_questions(question: str, answer: str, right: bool) -> None:
    grader = Grader(workers=1, limits=Limits())
    assert (await grader.grade("25", answer, question)).right is right
    await grader.close()


async def test_a_number_of_the_question_may_be_the_answer() -> None:
    grader = Grader(workers=1, limits=Limits())
    assert (await grader.grade("0.75", r"\frac{3}{4}", r"Which is larger, $\frac{2}{3}$ or $\frac{3}{4}$?")).right
    assert (await grader.grade(r"\sqrt{2}", r"\sqrt2", r"Which is larger, $\sqrt{2}$ or $\frac{7}{5}$?")).right
    await grader.close()
