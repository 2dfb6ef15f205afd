"""When a sampled sequence ends: token ids, and strings that may end in the middle of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.base_model import Tokenizer

MAX_STOPS = 64
MAX_STOP_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of one request."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @property
    def window(self) -> int:
        """Return how many last tokens can hold a stop string: each token is at least a byte, and some begin earlier."""
        return max((len(s.encode()) for s in self.strings), default=0) + 8


def parse_stops(stop: Any, end_ids: frozenset[int], vocab: int) -> Stops:
    """Return the stops that a request asks for.

    None keeps the model's own end-of-turn ids. Anything else replaces them, as on the hosted service: `[]` never stops
    before `max_tokens`; a string, an id, or a list of either stops on these alone.
    """
    if stop is None:
        return Stops(ids=end_ids)
    listed = [stop] if isinstance(stop, (str, int)) and not isinstance(stop, bool) else stop
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)) or len(listed) > MAX_STOPS:
        raise UserError(f"stop={stop!r} is not understood; give a string, a token id, or a list of up to {MAX_STOPS}")
    ids: set[int] = set()
    strings: list[str] = []
    for item in listed:
        if isinstance(item, bool) or not isinstance(item, (str, int)):
            raise UserError(f"stop has {item!r}; give strings or token ids")
        if isinstance(item, int):
            if not 0 <= item < vocab:
                raise UserError(f"stop has token id {item}, outside this model's vocabulary of {vocab}")
            ids.add(item)
        elif not item or len(item.encode()) > MAX_STOP_BYTES:
            raise UserError(f"stop has a string of {len(item)} characters; give 1 to {MAX_STOP_BYTES} bytes")
        else:
            strings.append(item)
    return Stops(frozenset(ids), tuple(strings))


class StopWatch:
    """Follows one sequence token by token and says when it stops."""

    def __init__(self, stops: Stops, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._stops = stops
        self._tokenizer = tokenizer
        self._window = stops.window
        # A few prompt tokens give the first sampled ones the context that decoders need (a leading space, a split
        # character); a stop string must lie in what was sampled as a whole.
        self._tokens = list(prompt[-self._window :]) if stops.strings else []
        self._prompt_tokens = len(self._tokens)
        self._before = self._text(self._tokens) if stops.strings else ""
        self._prompt_text = len(self._before)

    def stopped_by(self, token: int) -> bool:
        """Return whether the sequence ends with this token, which stays part of it."""
        if token in self._stops.ids:
            return True
        if not self._stops.strings:
            return False
        self._tokens.append(token)
        if len(self._tokens) > 3 * self._window:  # shift, so that a long sequence isn't decoded over and over
            drop = len(self._tokens) - 2 * self._window
            del self._tokens[:drop]
            self._prompt_tokens = max(0, self._prompt_tokens - drop)
            self._prompt_text = len(self._text(self._tokens[: self._prompt_tokens]))
            self._before = self._text(self._tokens[:-1])
        text = self._text(self._tokens)
        seen = len(self._before.rstrip("\ufffd"))
        self._before = text
        for string in self._stops.strings:
            # An occurrence counts once it reaches beyond what was there before this token.
            start = max(self._prompt_text, seen - len(string) + 1)
            if text.find(string, start) >= 0:
                return True
        return False

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
