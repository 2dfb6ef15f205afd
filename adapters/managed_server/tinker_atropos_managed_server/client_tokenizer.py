"""Writes the tokenizer that clients of the endpoints load, so that they render and tokenise as the server does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tinker_atropos import RunError

# transformers 5 saves this class name, which version 4 does not know; both know the other.
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


def write_client_tokenizer(tokenizer: Any, template: str | None, folder: Path) -> str:
    """Return what `AutoTokenizer.from_pretrained` loads as this tokenizer.

    That is the folder it came from, if there is one that every version of transformers reads; else it is written to
    `folder`. A chat template that is not the tokenizer's own goes with it.
    """
    source = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    config = source / "tokenizer_config.json"
    if template is None and source.is_absolute() and config.is_file() and _class_in(config) != _NEW_CLASS:
        return str(source)
    if template is not None:  # on a copy: sessions render with the tokenizer meanwhile
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    try:
        tokenizer.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise RunError(f"the tokenizer can't be written to {folder} for clients: {error}") from error
    written = folder / "tokenizer_config.json"
    if _class_in(written) == _NEW_CLASS:
        found = json.loads(written.read_text(encoding="utf-8"))
        found["tokenizer_class"] = _OLD_CLASS
        written.write_text(json.dumps(found, ensure_ascii=False, indent=2), encoding="utf-8")
    return str(folder)


def _class_in(config: Path) -> str | None:
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
