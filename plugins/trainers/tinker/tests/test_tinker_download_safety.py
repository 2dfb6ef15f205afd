from __future__ import annotations

from pathlib import Path

import pytest
from tinker_atropos.errors import CheckpointError, UserError
from tinker_atropos_tinker.download import destinations, fetch_file, refuse_target


def test_a_target_that_holds_something_is_refused(tmp_path: Path) -> None:
    refuse_target(tmp_path / "new" / "deep")
    refuse_target(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        refuse_target(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        refuse_target(tmp_path / "file")
    with pytest.raises(UserError, match="is a file"):
        refuse_target(tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../evil", ".", ""])
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="outside"):
        destinations({name: "https://x"}, tmp_path)


def test_files_inside_the_folder_are_placed(tmp_path: Path) -> None:
    assert destinations({"a/b": "https://x"}, tmp_path) == {"a/b": tmp_path.resolve() / "a" / "b"}
    with pytest.raises(CheckpointError, match="no files"):
        destinations({}, tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://example.org/x", "ftp://example.org/x"])
def test_only_safe_addresses_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(CheckpointError, match="https://"):
        fetch_file(url, tmp_path / "x")
