"""What may reach a terminal: no escape sequence, no control character, whoever wrote the text."""

from __future__ import annotations

# Joiners that some scripts are written with; every other format character (bidirectional overrides) can fake text.
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Return text with each control or format character spelled out (`\\x1b`); line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    """Return text as one printable line: each run of white space is one space."""
    return printable(" ".join(text.split()))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t" or character in _JOINERS:
        return character
    if character.isspace() and character > "\x9f" and character not in "\u2028\u2029":
        return " "  # such as a no-break space
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
