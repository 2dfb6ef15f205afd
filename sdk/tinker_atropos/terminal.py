"""What may reach a terminal: text without escape sequences, whoever wrote it, and commands that can be pasted."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

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


def program() -> str:
    """Return how the user can call the command line from here: by its name, or by its path where PATH lacks it."""
    if shutil.which("tinker-atropos") is not None:
        return "tinker-atropos"
    script = Path(sys.executable).with_name("tinker-atropos")
    if not script.is_file():
        return f"{shlex.quote(_from_here(Path(sys.executable)))} -m tinker_atropos"
    return shlex.quote(_from_here(script))


def run_place(config: Any, option: str = "--name") -> str:
    """Return the options that name the run of a `Config`: its name behind `option`, its folder where that is needed."""
    place = f"{option} {shlex.quote(config.name)}"
    return place if config.run.output == Path("runs") else f"{place} --output {shlex.quote(str(config.run.output))}"


def resume_command(config: Any) -> str:
    """Return the command that continues the run of a `Config`."""
    return f"{program()} run --resume {run_place(config)}"


def _from_here(path: Path) -> str:
    try:
        near = path.relative_to(Path.cwd())
        return str(near) if len(near.parts) > 1 else f"./{near}"  # a bare name would be looked up in PATH
    except (ValueError, OSError):
        return str(path)


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t" or character in _JOINERS:
        return character
    if character.isspace() and character > "\x9f" and character not in "\u2028\u2029":
        return " "  # such as a no-break space
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
