"""What somebody wrote, by path: plugins' defaults, the resumed run, the file, the command line; later goes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos.errors import ConfigError, near
from tinker_atropos.registry import normal
from tinker_atropos.sections import FLAGS, SECTIONS, OpenAISection
from tinker_atropos.validation import unknown_keys, validate

RUN_CONFIG = "the run's own config.yaml"


@dataclass(frozen=True, slots=True)
class Given:
    """One value that somebody wrote: where (`file.yaml`, `--steps`), and whether on the command line."""

    value: Any
    origin: str
    override: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose keys a section holds: `alias` is the common section (`env`, `trainer`) that they may stand in as well."""

    section: str
    keys: Mapping[str, Any]
    alias: str | None = None


@dataclass(slots=True)
class Layers:
    """Values by canonical path: a plugin's keys stand in the section of its name, wherever they were written."""

    values: dict[str, Given] = field(default_factory=dict)
    extra_servers: dict[str, Given] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """Return the value at a path, None where there is none."""
        given = self.values.get(path)
        return None if given is None else given.value

    def under(self, section: str) -> dict[str, Given]:
        """Return what was written in a section, by key."""
        start = section + "."
        return {path[len(start) :]: given for path, given in self.values.items() if path.startswith(start)}


@dataclass(frozen=True, slots=True)
class Written:
    """One key as it was written: its section in normal spelling, the key, what is below it, and the value."""

    section: str
    key: str
    inner: tuple[str, ...]
    given: Given

    @property
    def path(self) -> str:
        """The path, as in `--set`."""
        return ".".join(part for part in (self.section, self.key, *self.inner) if part)


@dataclass(slots=True)
class Layer:
    """All that one source wrote. `sections`: those that it names, empty ones too; `extra`: further `openai` entries."""

    written: list[Written] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Given] = field(default_factory=dict)


def read_layer(content: Mapping[str, Any], origin: str) -> Layer:
    """Return what a file's content says; raises `ConfigError` for a section of a wrong shape."""
    layer = Layer()
    for name, entries in content.items():
        section = normal(name)
        if section in layer.sections:
            raise ConfigError(
                f"{name}: the section {section!r} stands twice in {origin}, spelled in two ways; keep one"
            )
        layer.sections[section] = name
        if section in FLAGS:
            layer.written.append(Written(section, "", (), Given(_flag(section, entries), origin)))
            continue
        if section == "openai":
            entries = _first_server(entries, layer, origin)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            hint = f"; to choose a plugin write run.{section}" if section in ("env", "trainer") else ""
            raise ConfigError(
                f"{name}: expected a section of keys, got {entries!r:.60} ({type(entries).__name__}){hint}"
            )
        layer.written.extend(Written(section, key, (), Given(value, origin)) for key, value in entries.items())
    return layer


def read_overrides(overrides: Iterable[tuple[str, Any, str]]) -> Layer:
    """Return what the command line says; raises `ConfigError` where two overrides contradict each other."""
    layer = Layer()
    for path, value, origin in overrides:
        section, *rest = path.replace("[", ".").replace("]", "").split(".")
        section = normal(section)
        layer.sections[section] = section
        if section in FLAGS:
            if rest:
                raise ConfigError(f"{path}: {section} is true or false and has no keys")
            layer.written.append(Written(section, "", (), Given(_flag(section, value), origin, override=True)))
            continue
        if section == "openai" and rest[:1] == ["0"]:
            rest = rest[1:]
        if not rest or not all(rest):
            raise ConfigError(f"{origin}: expected section.key, got {path!r}")
        if section == "openai" and rest[0].isdecimal():
            raise ConfigError(f"{origin}: has no effect here: only the first entry of openai names the model")
        layer.written.append(Written(section, rest[0], tuple(rest[1:]), Given(value, origin, override=True)))
    return layer


def _flag(section: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{section}: expected true or false, got {value!r:.60}")
    return value


def _first_server(entries: Any, layer: Layer, origin: str) -> Any:
    """`openai` is one mapping or a list of them; the first names the model, the others are checked and not used."""
    if not isinstance(entries, list):
        return entries
    for place, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"openai.{place}: expected a mapping of keys, got {entry!r:.60}")
        if place:
            validate(OpenAISection, entry, path=f"openai.{place}")
            layer.extra[f"openai[{place}]"] = Given(True, origin)
    return entries[0] if entries else None


def peek(layers: Sequence[Layer], path: str) -> Any:
    """Return the value that the last layer to name a path of a common section gives it, None where none does."""
    found = [entry.given.value for layer in layers for entry in layer.written if entry.path == path]
    return found[-1] if found else None


def check_sections(layers: Sequence[Layer], known: Iterable[str]) -> None:
    """Raise `ConfigError` for a section that nobody knows, an empty one too."""
    names = sorted({*known, *SECTIONS, *FLAGS})
    for layer in layers:
        for section, spelled in layer.sections.items():
            if section not in names:
                raise ConfigError(f"{spelled}: unknown section.{near(section, names)} Known: {', '.join(names)}")


def merge(layers: Sequence[Layer], owners: Sequence[Owner]) -> Layers:
    """Lay layers over each other; raises `ConfigError` for unknown keys and for two values of one setting."""
    merged = Layers()
    for layer in layers:
        _refuse_unknown(layer.written, owners)
        placed = [(_canonical(entry, owners), entry) for entry in layer.written]
        _refuse_contradictions(placed)
        for path, entry in placed:
            _put(merged, path, entry)
        merged.extra_servers.update(layer.extra)
    return merged


def _canonical(entry: Written, owners: Sequence[Owner]) -> tuple[str, ...]:
    """Return the parts of a path below its owner's section."""
    if entry.section in FLAGS:
        return (entry.section,)
    for owner in owners:
        if entry.section == owner.section or (entry.section == owner.alias and entry.key in owner.keys):
            return (owner.section, entry.key, *entry.inner)
    return (entry.section, entry.key, *entry.inner)


def _refuse_unknown(written: Sequence[Written], owners: Sequence[Owner]) -> None:
    """Raise `ConfigError` with all unknown keys of the first section that has any."""
    for section in dict.fromkeys(entry.section for entry in written):
        known = _known(section, owners)
        if known is None:
            continue
        unknown = {
            entry.key: _elsewhere(entry, owners)
            for entry in written
            if entry.section == section and entry.key not in known
        }
        if unknown:
            raise unknown_keys(section, unknown, known)


def _known(section: str, owners: Sequence[Owner]) -> Mapping[str, Any] | None:
    """Return the keys of a section, None where nothing of this run reads it."""
    for owner in owners:
        if section == owner.section:
            return owner.keys
    model = SECTIONS.get(section)
    aliased = {key: None for owner in owners if owner.alias == section for key in owner.keys}
    return {**(model.model_fields if model is not None else {}), **aliased} if model is not None or aliased else None


def _elsewhere(entry: Written, owners: Sequence[Owner]) -> str:
    """Return the path at which a misplaced key is known."""
    homes = {name: model.model_fields for name, model in SECTIONS.items()} | {o.section: o.keys for o in owners}
    key = normal(entry.key)
    if key in homes.get(entry.section, {}):
        return ""  # only spelled otherwise
    return next((f"{section}.{key}" for section, keys in homes.items() if key in keys), "")


def _refuse_contradictions(placed: Sequence[tuple[tuple[str, ...], Written]]) -> None:
    for place, (path, entry) in enumerate(placed):
        for earlier, other in placed[:place]:
            shorter = min(len(path), len(earlier))
            if path[:shorter] != earlier[:shorter]:
                continue
            if path == earlier and _same(entry.given.value, other.given.value):
                continue
            values = f"{other.given.value!r} ({other.given.origin}) and {entry.given.value!r} ({entry.given.origin})"
            if other.path == entry.path:
                raise ConfigError(f"{entry.path}: given as {values}; keep one")
            raise ConfigError(f"{other.path} and {entry.path} are one setting, given as {values}; keep one")


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _put(merged: Layers, path: tuple[str, ...], entry: Written) -> None:
    head, inner, given = ".".join(path[:2]), path[2:], entry.given
    if inner:  # a key inside a mapping: `managed_server.chat_template_kwargs.enable_thinking`
        current = merged.get(head)
        tree: dict[str, Any] = dict(current) if isinstance(current, Mapping) else {}
        here = tree
        for part in inner[:-1]:
            here[part] = dict(here[part]) if isinstance(here.get(part), Mapping) else {}
            here = here[part]
        here[inner[-1]] = given.value
        given = Given(tree, given.origin, given.override)
    merged.values[head] = given
