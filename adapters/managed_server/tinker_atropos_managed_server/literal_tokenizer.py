"""A second tokenizer for text in which special tokens are only text, so that no call changes what another one sees.

A fast tokenizer of transformers keeps `split_special_tokens` as state of the one object that all threads use: a literal
text would let the prompts that are tokenised at the same time lose their special tokens.
"""

from __future__ import annotations

import copy
import threading
from typing import Any
from weakref import WeakKeyDictionary

_copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_lock = threading.Lock()


def literal_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer for literal text: one copy for each fast tokenizer; any other keeps no such state."""
    if not getattr(tokenizer, "is_fast", False):
        return tokenizer
    with _lock:
        found = _copies.get(tokenizer)
        if found is None:
            found = copy.deepcopy(tokenizer)
            settle(found, split_special_tokens=True)
            _copies[tokenizer] = found
        return found


def settle(tokenizer: Any, **settings: bool) -> None:
    """Tokenise once, so that later calls with these settings find the tokenizer's state as they want it."""
    tokenizer.encode("", add_special_tokens=False, verbose=False, **settings)
