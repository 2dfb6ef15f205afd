"""Reads YAML strictly: no doubled keys, numbers as YAML 1.2 has them, errors with file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tinker_atropos.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where `1e-4` is text and `2026-12-01` a date; people mean a number and a name."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands here twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.constructor.SafeConstructor.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_value(text: str) -> Any:
    """Return the value that `text` means in YAML, as in `--set key=text`; text that is no YAML stays text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raises `ConfigError` naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file {str(path)!r} is a folder; name the .yaml file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} can't be read: {error}") from None
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{place}: {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections such as `env:` and `tinker:`, got {type(content).__name__}")
    return content


def write_yaml(content: dict[str, Any]) -> str:
    """Return a mapping as YAML text in its own order."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
