"""The folder of one evaluation: its settings, its episodes and answers as they came, its report. Survives a kill."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from tinker_atropos.errors import CheckpointError, ConfigError, RunError
from tinker_atropos.evaluation.settings import differences
from tinker_atropos.run_folder import RunFolder, write_atomically

SETTINGS, EPISODES, ANSWERS, REPORT = "settings.json", "episodes.jsonl", "answers.jsonl", "report.json"
VERSION = 1

Record = dict[str, Any]


class AppendedLines:
    """JSON lines that are appended and synced one by one. Any task of one event loop may append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._lock = asyncio.Lock()

    def read(self, say: Callable[[str], None]) -> list[Record]:
        """Return the records; a damaged line, such as a half-written last one, is passed over, and said unless last."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        found = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"a {type(record).__name__}")
            except ValueError as error:
                if number < len(lines):
                    say(f"{self.path}:{number} is damaged ({error}); it is passed over")
                continue
            found.append(record)
        return found

    async def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns."""
        line = json.dumps(dict(record), ensure_ascii=False, allow_nan=False, default=str)
        content = line.encode("utf-8", "backslashreplace") + b"\n"
        async with self._lock:
            await asyncio.to_thread(self._write, content)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write(content)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.path} can't be written: {error.strerror or error}; free space, then call the same command again"
            ) from error

    def _opened(self) -> IO[bytes]:
        """Open for appending; a half-written last line is cut off first, or the next record would be lost with it."""
        file = self.path.open("ab+")
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        return file


class EvaluationFolder:
    """Held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.episodes = AppendedLines(path / EPISODES)
        self.answers = AppendedLines(path / ANSWERS)
        self._lock: IO[str] | None = None

    def exists(self) -> bool:
        """Whether an evaluation was begun here."""
        return (self.path / SETTINGS).is_file()

    def begun(self) -> bool:
        """Whether any answer came; without one, other settings may take the name."""
        return any(lines.path.exists() and lines.path.stat().st_size for lines in (self.episodes, self.answers))

    def settings(self) -> dict[str, Any]:
        """Return the settings; raises `CheckpointError` for a damaged file."""
        path = self.path / SETTINGS
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}, this program reads {VERSION}")
            settings: dict[str, Any] = content["settings"]
            settings["environment"]["name"], settings["model"], settings["sampling"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; evaluate anew under another --name") from error
        return settings

    def refuse_other(self, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the place can't hold this evaluation, or holds one of other settings."""
        RunFolder.check_place(self.path)
        if not self.exists():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ConfigError(f"{str(self.path)!r} holds something that is no evaluation; choose another --name")
            return
        if not self.begun():
            return
        changed = differences(self.settings(), json.loads(json.dumps(settings, default=str)))
        if changed:
            said = "; ".join(f"{path} was {_brief(before)}, now {_brief(after)}" for path, before, after in changed[:6])
            more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
            raise ConfigError(
                f"{str(self.path)!r} holds an evaluation of other settings: {said}{more}. Leave those out to continue "
                "it, or choose another --name"
            )

    def open(self, settings: Mapping[str, Any]) -> None:
        """Make or reopen the folder and hold it."""
        self.refuse_other(settings)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"evaluation folder {str(self.path)!r} can't be made: {error.strerror}; choose another with --output"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"evaluation folder {str(self.path)!r} is in use by another process; wait for it or choose another "
                "--name"
            ) from None
        self._lock = lock
        if not self.begun():
            content = {"version": VERSION, "settings": dict(settings)}
            write_atomically(self.path / SETTINGS, json.dumps(content, indent=1, default=str).encode())

    def read_episodes(self, say: Callable[[str], None]) -> dict[tuple[int, int], Record]:
        """Return the newest record of each task and sample, failed ones too."""
        found = {}
        for record in self.episodes.read(say):
            try:
                found[int(record["task"]), int(record["sample"])] = record
            except (KeyError, TypeError, ValueError):
                say(f"{self.episodes.path} has a record of no task; it is passed over")
        return found

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Write the report of what there is."""
        write_atomically(self.path / REPORT, json.dumps(dict(report), indent=1).encode())

    def forget_answers(self) -> None:
        """Drop the answers: every episode is written down, with all that they hold."""
        self.answers.close()
        self.answers.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        self.episodes.close()
        self.answers.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
