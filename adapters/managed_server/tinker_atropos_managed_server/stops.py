"""Stops: what an environment may write, what a sampler takes, and where a sampled turn ended. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from tinker_atropos import ConfigError, Stop

from tinker_atropos_managed_server.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Stops:
    """A stop in the forms it is needed in.

    `sampler` goes to the sampler: None, or a list of ids, or a list of strings, never mixed. A turn whose last token is
    in `ids`, or whose text holds one of `strings`, ended by this stop.
    """

    sampler: Stop
    ids: frozenset[int]
    strings: tuple[str, ...] = ()


def parse_stop(stop: Stop, vocabulary: Vocabulary, ends: Sequence[int]) -> Stops:
    """Return the stop in canonical form; raises `ConfigError` for what can't be one.

    None stays None (the model's own end of turn, `ends`) and `[]` stays `[]` (none at all). Text that is exactly one
    special token becomes its id, because samplers that match text never see special tokens. Next to ordinary text,
    which has no id, special tokens are written as text instead; an ordinary token's id has no such form (the text it
    stands for also occurs inside other tokens), so that mix is refused.
    """
    if stop is None:
        return Stops(None, frozenset(ends))
    items = [_checked(item, place, vocabulary) for item, place in _places(stop)]
    ids = [vocabulary.specials.get(item) if isinstance(item, str) else item for item in items]
    known = [item for item in ids if item is not None]
    if len(known) == len(items):
        return Stops(list(dict.fromkeys(known)), frozenset(known))
    ordinary = [item for item in items if isinstance(item, int) and item not in vocabulary.texts]
    if ordinary:
        text = next(item for item in items if isinstance(item, str) and item not in vocabulary.specials)
        raise ConfigError(
            f"stop: {stop!r} mixes text ({text!r}) with the id of an ordinary token ({ordinary[0]}), and a sampler "
            "takes one or the other; write all of them as text, or all as ids"
        )
    strings = [vocabulary.texts[item] if isinstance(item, int) else item for item in items]
    return Stops(list(dict.fromkeys(strings)), frozenset(known), tuple(dict.fromkeys(strings)))


def first_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first of these stop strings in a text, and the string; None if it holds none of them."""
    found = [(place, string) for string in strings if (place := text.find(string)) >= 0]
    return min(found, key=lambda pair: pair[0]) if found else None


def _places(stop: Any) -> list[tuple[Any, str]]:
    if isinstance(stop, list | tuple):
        return [(item, f"stop[{place}]") for place, item in enumerate(stop)]
    return [(stop, "stop")]


def _checked(item: Any, place: str, vocabulary: Vocabulary) -> str | int:
    if isinstance(item, str):
        if not item:
            raise ConfigError(f"{place}: '' would stop before the first token; leave it out, or say where to stop")
        return item
    if not isinstance(item, bool):
        try:
            token = index(item)
        except TypeError:
            pass
        else:
            if 0 <= token < vocabulary.size:
                return token
            raise ConfigError(f"{place}: {token} is no token id of this model; ids go from 0 to {vocabulary.size - 1}")
    raise ConfigError(
        f"{place}: expected text, a token id or a list of them, got {item!r} ({type(item).__name__}); "
        "null means the model's own end of turn, [] none at all"
    )
