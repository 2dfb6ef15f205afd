"""YAML is read strictly, and what is written reads back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_atropos import ConfigError
from tinker_atropos.yaml_file import parse_value, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("1_000", 1000),
        ("017", 17),
        ("0x1f", 31),
        ("0o17", 15),
        ("1e-4", 1e-4),
        ("5.0e-4", 5e-4),
        (".5", 0.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 1e-3}}", {"a": {"b": 1e-3}}),
        ('"8"', "8"),
        ("1:30", "1:30"),
        ("2026-12-01", "2026-12-01"),
        ("Answer: now", "Answer: now"),
        ("- none", "- none"),
        ("two\nlines", "two\nlines"),
        ("#1 rule", "#1 rule"),
        ("a #b", "a #b"),
        ("@home", "@home"),
        ("*x", "*x"),
        ("&x", "&x"),
        ("!!bool maybe", "!!bool maybe"),
        ("[1, 2", "[1, 2"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_an_override_means_what_it_says(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.from_regex(r"[-+]?[0-9._:]{0,5}([eE][-+]?[0-9]{1,2})?|0[xob][0-9a-f]{1,3}|yes|on|~|null|=|<<", fullmatch=True),
)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text("ab.", max_size=3), scalars, max_size=3)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc:# ", min_size=1), values, max_size=4))
def test_what_is_written_reads_back_the_same(content: dict[str, Any]) -> None:
    text = write_yaml({"section": content})
    assert parse_value_of_file(text) == {"section": content}


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\x85\u2028\u2029")))
def test_a_value_on_one_line_may_carry_a_comment(value: str) -> None:
    line = write_yaml({"key": value}).rstrip("\n")
    assert "\n" not in line
    assert parse_value_of_file(line + "  # origin\n") == {"key": value}


def parse_value_of_file(text: str) -> Any:
    from tinker_atropos import yaml_file

    return yaml.load(text, Loader=yaml_file._Loader)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("env:\n  a: 1\n  a: 2\n", ":3: key 'a' stands here twice"),
        ("env:\n  1: x\n", ":2: key 1 is not text"),
        ("env:\n\ta: 1\n", ":2:"),
        ("env: [1\n", "expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: !!python/object:os.system x\n", ":1: could not determine a constructor"),
        ("a: !!bool maybe\n", "not readable as YAML"),
        ("a: " + "[" * 5000, "not readable as YAML"),
        ("a: " + "9" * 5000, ":1: 99999999999999999999… is too large a number"),
        ("a: \x00", "not readable as YAML"),
        ("just text", "expected sections"),
        ("- a\n", "expected sections"),
    ],
)
def test_a_bad_file_is_named_with_its_line_on_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_yaml(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    for path, says in (("none.yaml", "does not exist"), (".", "is a folder"), ("latin.yaml", "can't be read")):
        with pytest.raises(ConfigError, match=says):
            read_yaml(tmp_path / path)


def test_an_empty_file_is_an_empty_configuration_and_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}
    path.write_text("base: &base {a: 1, b: 1}\nenv:\n  <<: *base\n  b: 2\n")
    assert read_yaml(path)["env"] == {"a": 1, "b": 2}
