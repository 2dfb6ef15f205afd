r"""Brings answers in LaTeX into one form, and reads what needs no computer algebra: numbers, text, units. Pure.

Every pattern is linear in the text; longer texts than `MAX_ANSWER` never come here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 1_000  # characters
MAX_DEPTH = 12  # of brackets; the parser behind math-verify takes far longer for each
MAX_DIGITS = 60  # of one number; Python itself refuses 4,300
MAX_EXPONENT = 400
ENOUGH_DIGITS = 6  # significant digits at which a decimal may stand for a number that has none

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−﹣－‒–", "-"),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # full-width digits
        "＋": "+",
        "＝": "=",
        "，": ",",
        "．": ".",
        "（": "(",
        "）": ")",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "±": r"\pm ",
        "√": r"\sqrt ",
        "²": "^{2}",
        "³": "^{3}",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "％": "%",
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u200a", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    }
)
_SPACING = re.compile(r"(?<!\\)\\(?:[,:;> ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|mathstrut)(?![A-Za-z])(?:\.(?![0-9]))?"
)
_JOINED_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}|\\,|\\!)\s*(?=[0-9]{3}(?![0-9]))")
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|up|sf|tt)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?)\s*\{"
)
_DEGREES = re.compile(
    r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|\\text\{\s*degrees?\s*\})"
)
_MATRIX = re.compile(r"\\(begin|end)\{(?:[bBvV]?matrix|smallmatrix)\}")
_AT_MOST = re.compile(r"\\([lg])eq(?:slant)?(?![A-Za-z])")
_POWER = re.compile(r"\*\*")
_OUTER = re.compile(r"\$\$?(.*?)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_CURRENCY = re.compile(r"^(-?)\s*(?:\\\$|\$|€|£|\\pounds(?![A-Za-z])|\\text\{\s*(?:\\\$|USD)\s*\})\s*")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_DECIMAL = re.compile(
    rf"([-+]?)\s*({_DIGITS})(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*([-+]?[0-9]+)\s*\}}|([0-9]))|[eE]([-+]?[0-9]+))?",
    re.ASCII,
)
_RATIO = re.compile(
    rf"([-+]?)\s*(?:([0-9]+)\s*(?=\\frac)|([0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?:\\frac\{{\s*([-+]?{_DIGITS})\s*\}}\{{\s*([-+]?{_DIGITS})\s*\}}|({_DIGITS})\s*/\s*({_DIGITS}))",
    re.ASCII,
)
_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|([A-Za-z])")
_SPACED_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?", re.ASCII)
_PERCENT = re.compile(r"\s*\\?%$|\s*\\text\{\s*(?:percent|%)\s*\}$")
_BASED = re.compile(r"(-?[0-9A-Za-z.]+)_(?:\{(?:\\text\{)?\s*([0-9A-Za-z]+)\s*\}{0,2}|([0-9]))", re.ASCII)
BASES = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        map(str, range(2, 13)),
        strict=True,
    )
) | {"sixteen": "16"}

_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.\-]*(?:[\s,]+[A-Za-z][A-Za-z'’.\-]*)*", re.ASCII)
_SHORT_WORDS = {"yes", "no", "odd", "one", "two", "six", "ten", "red", "sat", "sun", "mon"}
_ARTICLES = re.compile(r"\b(?:the|an|a|is|it)\b\s*", re.IGNORECASE)
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?[.:]?")
_PUNCTUATION = re.compile(r"[\s.,;:!?*_(){}'’\"“”`-]+")
_NOTHING = {
    *("no solution", "no solutions", "none", "no real solution", "no real solutions", "empty set", "the empty set"),
    *("does not exist", "dne", "undefined"),
}
_EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s*\\\}")

# What a quantity is measured in, by every spelling; the first names it.
_UNITS = {
    spelling: spellings[0]
    for spellings in (
        ("inch", "inches", "in"),
        ("foot", "feet", "ft"),
        ("yard", "yards", "yd"),
        ("mile", "miles", "mi"),
        ("millimeter", "millimeters", "millimetre", "millimetres", "mm"),
        ("centimeter", "centimeters", "centimetre", "centimetres", "cm"),
        ("meter", "meters", "metre", "metres", "m"),
        ("kilometer", "kilometers", "kilometre", "kilometres", "km"),
        ("gram", "grams", "g"),
        ("kilogram", "kilograms", "kg"),
        ("pound", "pounds", "lb", "lbs"),
        ("ounce", "ounces", "oz"),
        ("second", "seconds", "sec", "s"),
        ("minute", "minutes", "min"),
        ("hour", "hours", "hr", "hrs", "h"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("cent", "cents", "¢"),
        ("dollar", "dollars", "usd"),
        ("radian", "radians", "rad"),
        ("liter", "liters", "litre", "litres", "l"),
        ("mph", "miles per hour"),
        ("unit", "units"),
    )
    for spelling in spellings
}
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_UNIT = re.compile(
    r"(?P<value>.*[0-9)}\]iπ])\s*\\text\{\s*(?P<text>[^{}0-9]{1,60}?)\s*\}\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?",
    re.DOTALL,
)
_PLAIN_UNIT = re.compile(
    r"(?P<value>.*[0-9)}\]])\s*(?P<text>[A-Za-z][A-Za-z. ]{1,40}?)\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value and what it is measured in: `""` no unit, `"?"` one that is not known."""

    value: str
    unit: str


def normal(text: str) -> str:
    """Return an answer in one form: its signs, spacing, fractions, roots, matrices and text commands unified."""
    text = text.translate(_SIGNS).strip()
    for _ in range(3):
        outer = _OUTER.fullmatch(text)
        if outer is None:
            break
        inside = next(group for group in outer.groups() if group is not None)
        if "$" in inside.replace("\\$", ""):
            break
        text = inside.strip()
    text = _JOINED_THOUSANDS.sub("", text)
    text = _SIZES.sub("", _SPACING.sub(" ", text)).replace("\\!", "").replace("\\lvert", "|").replace("\\rvert", "|")
    text = _AT_MOST.sub(r"\\\1e", text).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _TEXT.sub(r"\\text{", text)
    text = _FRAC.sub(r"\\frac", text)
    text = _SHORT_FRAC.sub(
        lambda m: f"\\frac{{{m[1] if m[1] is not None else m[2]}}}{{{m[3] if m[3] is not None else m[4]}}}", text
    )
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _MATRIX.sub(r"\\\1{pmatrix}", text)
    text = _POWER.sub("^", _DEGREES.sub("", text))
    text = _EMPTY_SET.sub(r"\\emptyset", text)
    text = _CURRENCY.sub(r"\1", text.strip())
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;").strip()


def key(text: str) -> str:
    """Return what two answers that are spelled alike have in common: a normal form without its spaces."""
    return unspaced(normal(text))


def unspaced(text: str) -> str:
    """Return a normal form without its spaces, but for those between two digits."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def depth(text: str) -> int:
    """Return how deep brackets nest, at most."""
    now = deepest = 0
    for character in text:
        now += (character in "([{") - (character in ")]}")
        deepest = max(deepest, now)
    return deepest


def several(text: str) -> bool:
    """Return whether a normal form is a list: set brackets, a comma outside of all others, `or`, `and`, plus-minus."""
    if re.search(r"\\pm(?![A-Za-z])|\\text\{[^{}]*\b(?:or|and)\b|\\(?:lor|vee)(?![A-Za-z])", text):
        return True
    deep = 0
    for character in text.replace("\\{", "").replace("\\}", ""):
        deep += (character in "([{") - (character in ")]}")
        if character in ",;" and deep == 0:
            return True
    return False


def told_apart(gold: str, answer: str) -> tuple[str, str]:
    """Return both with other letters for capitals of which the gold has the small letter as well.

    The parser of math-verify makes small letters of all, so that `R - r` would be 0.
    """
    ours = {letter for letter in _LETTER.findall(gold) if letter}
    used = {letter.lower() for letter in (*ours, *_LETTER.findall(answer)) if letter}
    free = [letter for letter in "qwzvuhgmkj" if letter not in used]
    capitals = [letter for letter in sorted(ours) if letter.isupper() and letter.lower() in ours]
    others = dict(zip(capitals, free, strict=False))
    if not others:
        return gold, answer
    first, second = (
        _LETTER.sub(lambda match: others.get(match[1], match[0]) if match[1] else match[0], text)
        for text in (gold, answer)
    )
    return first, second


def number(text: str) -> tuple[Fraction, int] | None:
    r"""Return the exact value of a plain number in normal form and its significant digits; None if it is none.

    Plain are `-1,234.5`, `\frac{3}{4}`, `3/4`, `1\frac{1}{2}`, `6.02\times10^{23}`. The digits are 0 but for decimals,
    which may stand for a number nearby.
    """
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        sign, digits, *exponents = decimal.groups()
        exponent = int(next((group for group in exponents if group), "0")[:6])
        value = _value(digits)
        if value is None or abs(exponent) > MAX_EXPONENT:
            return None
        plain = digits.replace(",", "")
        significant = len(plain.replace(".", "").lstrip("0")) if "." in plain or exponent else 0
        value *= Fraction(10) ** exponent
        return (-value if sign == "-" else value), significant
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    sign, whole, whole_before_slash, above, below, dividend, divisor = ratio.groups()
    top, bottom = _value(above or dividend), _value(below or divisor)
    if top is None or bottom is None or bottom == 0:
        return None
    value = top / bottom
    whole = whole or whole_before_slash
    if whole is not None:
        base = _value(whole)
        if base is None or value < 0:
            return None
        value += base
    return (-value if sign == "-" else value), 0


def places(text: str) -> int:
    """Return how many places behind the point a plain decimal is given to; below 0 for a large power of ten."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None:
        return 0
    _, digits, *exponents = decimal.groups()
    return len(digits.partition(".")[2]) - int(next((group for group in exponents if group), "0"))


def percentage(text: str) -> tuple[str, bool]:
    """Return a normal form without a percent sign at its end, and whether there was one."""
    bare = _PERCENT.sub("", text)
    return bare.strip(), bare != text


def based(text: str) -> tuple[str, str] | None:
    """Return digits and base of `2516_8`; None if it is no such numeral."""
    match = _BASED.fullmatch(text.replace(" ", ""))
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    base = (match[2] or match[3]).lower()
    return match[1].lower(), BASES.get(base, base)


def words(text: str) -> str | None:
    r"""Return a text answer in one spelling (`\text{Evelyn}`, `(C)`, `no solution`); None if it is no text."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace("\\emptyset", "no solution")
    bare = re.sub(r"\s+", " ", bare).strip(" .*_")
    choice = _CHOICE.fullmatch(bare)
    if choice is not None and ("\\text" in text or "(" in bare):
        return choice[1].lower()
    if _WORDS.fullmatch(bare) is None:
        return None
    plain = bare.lower()
    if "\\text" not in text and len(plain) < 4 and plain not in _SHORT_WORDS:
        return None  # a variable or a product of some
    if plain in _NOTHING:
        return "no solution"
    return re.sub(r"[^a-z]+", "", _ARTICLES.sub("", plain)) or None


def letters(text: str) -> str:
    """Return the letters of an answer, to be compared with a text; `""` where it holds more than those."""
    bare = _ARTICLES.sub("", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower())
    found = _PUNCTUATION.sub("", bare)
    return found if found.isascii() and found.isalpha() else ""


def choice(text: str) -> str | None:
    r"""Return the capital of `B`, `(B)`, `\text{B.}`; None if a normal form is nothing like that."""
    match = _CHOICE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip(" .*_"))
    return None if match is None else match[1]


def quantity(text: str) -> Quantity:
    """Return a normal form as value and unit; the unit is taken off only where something with a value precedes it."""
    match = _UNIT.fullmatch(text)
    if match is None:
        match = _PLAIN_UNIT.fullmatch(text)
        if match is not None and _unit(match["text"], match["power"]) == "?":
            match = None  # `3 ab` is a product
    if match is None or re.fullmatch(r"\s*(?:or|and|if|for|where|mod)\b.*", match["text"]):
        return Quantity(text, "")
    return Quantity(match["value"].strip(), _unit(match["text"], match["power"]))


def _unit(text: str, power: str | None) -> str:
    name = re.sub(r"[.\s]+", " ", text.lower()).strip()
    known = _UNITS.get(name)
    if known is None:
        parts = name.split()
        raised = [part for part in parts if part in _POWER_WORDS]
        rest = " ".join(part for part in parts if part not in _POWER_WORDS)
        known = _UNITS.get(rest)
        power = _POWER_WORDS[raised[0]] if raised else power
    return "?" if known is None else known + (power or "")


def _value(text: str) -> Fraction | None:
    plain = text.replace(",", "")
    return Fraction(plain) if len(plain) <= MAX_DIGITS and plain.strip("+-") not in ("", ".") else None
