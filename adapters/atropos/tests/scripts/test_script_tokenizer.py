"""What transformers 5 wrote, 4 can load: the same tokens under a class that both know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos_atropos.script_tokenizer import tokenizer_for


@pytest.fixture
def new(tmp_path: Path) -> Path:
    from tinker_atropos_local_tinker.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "new")
    return tmp_path / "new"


def test_an_older_version_gets_a_copy_that_it_can_load(new: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = Path(tokenizer_for("4.57.6", str(new), tmp_path / "old"))
    assert folder == tmp_path / "old"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    before: Any = AutoTokenizer.from_pretrained(str(new))
    after: Any = AutoTokenizer.from_pretrained(str(folder))
    text = "ab\n\n<|im_start|>user cd é<|im_end|>"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.chat_template == before.chat_template


@pytest.mark.parametrize("version", ["5.24.0", None, "unknown"])
def test_others_get_it_as_it_is(new: Path, tmp_path: Path, version: str | None) -> None:
    assert tokenizer_for(version, str(new), tmp_path / "old") == str(new)


def test_a_hub_id_stays_one(tmp_path: Path) -> None:
    assert tokenizer_for("4.57.6", "Qwen/Qwen3-8B", tmp_path / "old") == "Qwen/Qwen3-8B"
