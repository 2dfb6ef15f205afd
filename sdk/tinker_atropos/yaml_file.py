"""Reads YAML strictly: no doubled keys, numbers as in YAML 1.2, errors with file and line. Writes what it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tinker_atropos.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_NUMBERS = {
    _INT: re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_FIRST = list("-+.0123456789")
# What the constructors of PyYAML raise, beside its own errors, on an explicit tag that does not fit its value.
_MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where `1e-4` is text, `1:30` is 90, `017` is 15 and `2026-12-01` is a date."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would take for something else."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_NUMBERS, "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _FIRST)
    _Dumper.add_implicit_resolver(_tag, _pattern, _FIRST)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands here twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.constructor.SafeConstructor.construct_mapping(loader, node, deep=True)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > 40:
        raise yaml.constructor.ConstructorError(None, None, f"{text[:20]}… is too large a number", node.start_mark)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes the rarer line ends as they are, and reads them as a space; between double quotes it escapes them.
    style = '"' if any(end in text for end in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor(_INT, _integer)


def parse_value(text: str) -> Any:
    """Return the value that `text` means in YAML, as in `--set key=text`.

    Text that is no YAML stays text, and so does what YAML would take for a comment or fold into another line.
    """
    plain = text.strip(" ")
    try:
        value = yaml.load(text, Loader=_Loader)
    except _MALFORMED:
        return plain
    if value is None and plain.lower() not in ("", "~", "null"):
        return plain  # `#1`: all comment
    if "#" in plain and plain[:1] not in ("'", '"', "[", "{"):
        return plain
    if isinstance(value, str) and plain[:1] not in ("'", '"', "|", ">"):
        return plain
    if isinstance(value, dict | list) and plain[:1] not in ("[", "{"):
        return plain  # `Answer: now`, `- none`
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raises `ConfigError` naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file {str(path)!r} is a folder; name the .yaml file in it") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        raise ConfigError(f"configuration file {str(path)!r} can't be read: {error}") from None
    try:
        content = yaml.load(text, Loader=_Loader)
    except _MALFORMED as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = _problem(error) or f"not readable as YAML: {error}"
        raise ConfigError(f"{place}: {' '.join(problem.split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections such as `env:` and `tinker:`, got {type(content).__name__}")
    return content


def _problem(error: Exception) -> str:
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    return f"{context}, {problem}" if context and problem else problem or ""


def write_yaml(content: dict[str, Any]) -> str:
    """Return a mapping as YAML text in its own order; `read_yaml` gives it back unchanged."""
    # No folding: a value without a line end takes one line, so a comment may follow it.
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)
    return text
