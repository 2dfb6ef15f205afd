"""A tokenizer as a session needs it: exact text to tokens and back. Knows no chat template and no conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinker_atropos import ConfigError

from tinker_atropos_managed_server.literal_tokenizer import literal_tokenizer, settle


class Vocabulary:
    """Wraps a transformers tokenizer.

    `specials` maps the text of each special token to its id; `ends` are the ids that end a turn of this model: the
    tokenizer's end of sequence, those of a `generation_config.json` beside a local tokenizer, and `more`. `size` is one
    more than the largest id. Several threads may use one, and several may wrap one tokenizer.
    """

    def __init__(self, tokenizer: Any, more: Iterable[str | int] = ()) -> None:
        self.tokenizer = tokenizer
        settle(tokenizer)
        added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
        self.size = max(len(tokenizer), max(added, default=-1) + 1)
        self.specials: dict[str, int] = {str(token): index for index, token in added.items() if token.special}
        self._strips = {
            str(token): (bool(token.lstrip), bool(token.rstrip)) for token in added.values() if token.special
        }
        ends = [*_ids(tokenizer.eos_token_id), *_generation_ends(tokenizer), *(self.special_id(end) for end in more)]
        self.ends: tuple[int, ...] = tuple(dict.fromkeys(ends))
        for end in self.ends:  # a turn marker must not be forged, even where the tokenizer forgot to flag it
            self.specials.setdefault(str(tokenizer.convert_ids_to_tokens(end)), end)
        self.texts: dict[int, str] = {index: text for text, index in self.specials.items()}
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._token_texts: dict[int, str] = {}
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def special_id(self, token: str | int) -> int:
        """Return the id of a special token given by text or id; raises `ConfigError` for anything else."""
        if isinstance(token, int) and 0 <= token < self.size:
            return token
        if isinstance(token, str) and token in self.specials:
            return self.specials[token]
        some = ", ".join(repr(text) for text in list(self.specials)[:8]) or "none"
        raise ConfigError(
            f"end_of_turn: {token!r} is no special token of this tokenizer and no id below {self.size}; "
            f"its special tokens begin with {some}"
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in which special-token text stands for the token; nothing is put around it."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False, verbose=False)]

    def encode_after(self, anchor: str | None, text: str) -> list[int]:
        """Return the tokens of `text` as they come after the special token `anchor`.

        Tokenised together, because some special tokens swallow the whitespace that follows and some tokenizers treat
        the beginning of a text apart.
        """
        if anchor:
            tokens = self.encode(anchor + text)
            if tokens and tokens[0] == self.specials.get(anchor):
                return tokens[1:]
        return self.encode(text)

    def encode_literal(self, text: str, before: str | None = None, after: str | None = None) -> list[int]:
        """Return the tokens of a text in which special-token text is only text.

        `before` and `after` are the special tokens around it, which may swallow its whitespace.
        """
        if before and self._strips.get(before, (False, False))[1]:
            text = text.lstrip()
        if after and self._strips.get(after, (False, False))[0]:
            text = text.rstrip()
        tokenizer = literal_tokenizer(self.tokenizer)
        tokens = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        if self.texts.keys().isdisjoint(tokens):
            return [int(token) for token in tokens]
        # A tokenizer that knows no `split_special_tokens`: break each marker after its first character.
        cuts = [0, *(match.start() + 1 for match in self.pattern.finditer(text)), len(text)]
        return [token for start, end in pairwise(cuts) for token in self.encode(text[start:end])]

    def decode(self, tokens: Sequence[int], after: int | None = None) -> str:
        """Return the text of tokens, special tokens included.

        `after` is the token before them: some tokenizers drop the space at the beginning of a text, which is no
        beginning here.
        """
        if after is not None and tokens:
            head, whole = self.token_text(after), self._decode([after, *tokens])
            if whole.startswith(head):
                return whole[len(head) :]
        return self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(tokens),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
                spaces_between_special_tokens=False,  # only slow tokenizers know it, the others ignore it
            )
        )

    @cached_property
    def longest(self) -> int:
        """The most characters that one token can stand for."""
        texts = self.tokenizer.get_vocab()
        # Whitespace around a special token may be swallowed without limit; such tokenizers bound nothing.
        if any(left or right for left, right in self._strips.values()):
            return 2**31
        return max((len(text) for text in texts), default=1)

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself; a part of a character is `\ufffd`."""
        found = self._token_texts.get(token)
        if found is None:
            found = self._token_texts[token] = self._decode([token])
        return found

    @cached_property
    def leading(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer itself puts before a text (its beginning of sequence), if any."""
        plain = self.encode("a")
        full = [int(token) for token in self.tokenizer.encode("a", add_special_tokens=True)]
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(index) for index in value] if isinstance(value, list | tuple) else [int(value)]


def _generation_ends(tokenizer: Any) -> list[int]:
    """Return the end ids of the generation configuration beside a local tokenizer (Llama 3 has three of them)."""
    name = getattr(tokenizer, "name_or_path", "") or ""
    path = Path(name) / "generation_config.json"
    if not name or not path.is_file():
        return []
    try:
        return _ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is no generation configuration ({error}); repair or remove it") from error
