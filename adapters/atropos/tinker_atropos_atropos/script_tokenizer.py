"""A tokenizer that the scripts' own transformers can load: 4 does not know what 5 writes into a model's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinker_atropos.errors import RunError

FILES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "config.json")
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


def tokenizer_for(version: str | None, tokenizer: str, folder: Path) -> str:
    """Return what a script may hand to `AutoTokenizer.from_pretrained` under transformers of that version.

    That is `tokenizer` itself, or, where it is a folder that transformers 5 wrote and the version is older, `folder`
    with a copy: the same vocabulary, merges and chat template under the class that both versions know. Raises
    `RunError` if it can't be written.
    """
    source = Path(tokenizer)
    settings = _settings(source)
    if not settings or not _is_old(version) or settings.get("tokenizer_class") != NEW_CLASS:
        return tokenizer
    settings["tokenizer_class"] = OLD_CLASS
    settings.pop("backend", None)
    if isinstance(settings.get("extra_special_tokens"), list):  # a mapping to 4, which calls the list otherwise
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder} can't be written: {error.strerror or error}") from error
    return str(folder)


def _settings(source: Path) -> dict[str, Any]:
    try:
        content = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_old(version: str | None) -> bool:
    major = (version or "").partition(".")[0]
    return major.isdecimal() and int(major) < 5
