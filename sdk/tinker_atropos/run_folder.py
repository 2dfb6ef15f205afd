"""The folder of one run: configuration, metrics, rollouts, manifests, log. Written so that a crash leaves it whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tinker_atropos.errors import CheckpointError, ConfigError, RunError
from tinker_atropos.rollout.records import write_records
from tinker_atropos.trainer import Checkpoint
from tinker_atropos.yaml_file import read_yaml, write_yaml

MANIFEST_VERSION = 1

FOLDERS = ("rollouts", "evaluations", "manifests")

# What may differ between a run and its resumption; everything else decides what the run is.
MAY_CHANGE = {
    "env.total_steps",
    "env.steps_per_eval",
    "env.max_num_workers",
    "rollout.eval_tasks",
    "rollout.show_every",
    "rollout.workers",
    "rollout.step_timeout",
    "rollout.eval_episodes",
    "rollout.max_broken_episodes",
    "rollout.episode_timeout",
    "rollout.episode_retries",
    "rollout.max_failed_groups",
    "rollout.max_filtered_groups",
    "run.output",
    "run.previews",
    "openai.num_requests_for_eval",
}
MAY_CHANGE_IN_TRAINER = {
    "save_checkpoint_interval",
    "local_threads",
    "threads",
    "device",
    "checkpoint_ttl_seconds",
    "base_url",
    "total_env_steps",
    "keep_checkpoints",
}
MAY_CHANGE_IN_ENVIRONMENT = {"threads"}  # how many step its simulations, which decides nothing of what they do


@dataclass(frozen=True, slots=True)
class Manifest:
    """A run checkpoint: what of the run is final at `step`. Written atomically, and after all that it names.

    `consumed` are the groups trained on since the manifest before; `cursor` is the source's. `ancestry` lists the
    lineages that the weights of `lineage` come from, each with the last of its steps that they hold. `discarded` are
    groups that nobody could make again and that ended untrained since the manifest before, each with the reason.
    """

    run: str
    lineage: int
    step: int
    checkpoint: Checkpoint
    consumed: tuple[str, ...]
    cursor: Mapping[str, Any]
    finished: bool = False
    created: float = field(default_factory=time.time)
    ancestry: tuple[tuple[int, int], ...] = ()
    discarded: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {"version": MANIFEST_VERSION, **asdict(self), "consumed": list(self.consumed)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Manifest:
        """Return the manifest of a mapping; raises `KeyError`, `TypeError` or `ValueError` for a damaged one."""
        if content["version"] != MANIFEST_VERSION:
            raise ValueError(f"manifest version {content['version']}, this program reads {MANIFEST_VERSION}")
        return Manifest(
            run=content["run"],
            lineage=int(content["lineage"]),
            step=int(content["step"]),
            checkpoint=Checkpoint(**content["checkpoint"]),
            consumed=tuple(content["consumed"]),
            cursor={"next": int(content["cursor"]["next"]), "open": [int(n) for n in content["cursor"]["open"]]},
            finished=bool(content["finished"]),
            created=float(content["created"]),
            ancestry=tuple((int(lineage), int(step)) for lineage, step in content.get("ancestry", ())),
            discarded={str(id): str(reason) for id, reason in content.get("discarded", {}).items()},
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash there is the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            f"{path} can't be written: {error.strerror or error}; free space, then continue with --resume"
        ) from error


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def metrics_file(self) -> Path:
        """One JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @staticmethod
    def check_place(path: Path) -> None:
        """Raise `ConfigError` if a folder can't be made at `path`, before anything slow is done."""
        for place in (path, *path.parents):
            try:
                place.lstat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    continue
                raise ConfigError(
                    f"run folder {str(path)!r:.200} can't be made: {error.strerror}; choose another with --output"
                ) from None
            if place.is_dir():
                if not os.access(place, os.W_OK | os.X_OK):
                    raise ConfigError(
                        f"run folder {str(path)!r} can't be made: {str(place)!r} can't be written to; choose another "
                        "with --output"
                    )
                return
            if place.exists():
                raise ConfigError(
                    f"run folder {str(path)!r} can't be made: {str(place)!r} is a file; choose another with --output"
                )

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_file.is_file()

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder for a new run and hold it; raises `ConfigError` if there is one or it can't be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run folder {str(self.path)!r} can't be made: {error.strerror}; choose another with --output or --name"
            ) from None
        self.refuse_old()
        self._hold()
        self._make_folders()
        write_atomically(self.config_file, write_yaml(dict(config)).encode())

    def reopen(self, config: Mapping[str, Any], trainer: str, environment: str) -> None:
        """Hold the folder of a run that is to be continued; raises `ConfigError` if its configuration is another."""
        self.refuse_other(config, trainer, environment)
        self._hold()
        self._make_folders()
        write_atomically(self.config_file, write_yaml(dict(config)).encode())

    def _make_folders(self) -> None:
        try:
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
            for left in self.path.rglob(".*.part"):  # a writer that was killed
                left.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be written: {error.strerror}; choose another with --output") from None

    def refuse_old(self) -> None:
        """Raise `ConfigError` if a run was begun here."""
        if self.exists():
            raise ConfigError(
                f"run folder {str(self.path)!r} holds a run already; continue it with --resume, or choose another "
                "--name"
            )

    def refuse_other(self, config: Mapping[str, Any], trainer: str, environment: str) -> None:
        """Raise `ConfigError` if there is no run here, or one of another configuration.

        `trainer` and `environment` are the sections of these plugins.
        """
        if not self.exists():
            raise ConfigError(f"--resume: there is no run in {str(self.path)!r}{self._others()}")
        changed = list(_differences(read_yaml(self.config_file), config, trainer, environment))
        if changed:
            raise ConfigError(
                f"--resume: the run in {str(self.path)!r} has another configuration: {'; '.join(changed)}. "
                "Leave those out to continue it, or start a new run with another --name"
            )

    def begun(self) -> bool:
        """Whether there is anything to continue: a line of metrics, or a manifest."""
        return bool(self.read_metrics()) or any((self.path / "manifests").glob("step-*.json"))

    def abandon(self) -> None:
        """Give the name free again: what is left here is a log, and no run."""
        self.config_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def manifests(self, say: Callable[[str], None] = lambda text: None) -> list[Manifest]:
        """Return the whole manifests, oldest first; a damaged one is said and passed over.

        Raises `CheckpointError` for one of a newer version: going back behind it would lose what it stands for.
        """
        found = []
        for path in sorted((self.path / "manifests").glob("step-*.json")):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                _refuse_newer(path, content["version"])
                found.append(Manifest.from_dict(content))
            except (OSError, KeyError, TypeError, ValueError) as error:
                say(f"manifest {path} is damaged ({type(error).__name__}: {error}); it is passed over")
        return sorted(found, key=lambda manifest: (manifest.step, manifest.lineage))

    def write_manifest(self, manifest: Manifest) -> None:
        """Write a manifest; it decides from now on where the run continues."""
        content = json.dumps(manifest.as_dict(), indent=1).encode()
        write_atomically(self.path / "manifests" / f"step-{manifest.step:06d}.json", content)

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(metrics), allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(
                f"{self.metrics_file} can't be written: {error.strerror}; free space, then --resume"
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines; one that is damaged, such as a half-written last one, is passed over."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int | float):
                rows.append(row)
        return rows

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the groups that ended with a step: those trained on, and those discarded since the step before."""
        write_records(self.path / "rollouts" / f"step-{step:06d}.jsonl.gz", records)

    def write_unfinished(self, lineage: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the groups that a stopped run had ready and did not train on."""
        write_records(self.path / "rollouts" / f"stopped-{lineage}.jsonl.gz", records)

    def write_evaluation(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the episodes of an evaluation."""
        write_records(self.path / "evaluations" / f"step-{step:06d}.jsonl.gz", records)

    def rewind(self, step: int, lineage: int) -> None:
        """Put aside, under `dead/lineage-<n>`, what came after `step`: it belongs to weights that did not survive."""
        dead = self.path / "dead" / f"lineage-{lineage}"
        try:
            for kind in FOLDERS[:2]:
                for path in sorted((self.path / kind).glob("step-*")):
                    number = path.name.removeprefix("step-").partition(".")[0]
                    if number.isdecimal() and int(number) > step:
                        (dead / kind).mkdir(parents=True, exist_ok=True)
                        path.replace(dead / kind / path.name)
            rows = self.read_metrics()
            late = [row for row in rows if row["step"] > step]
            if late:
                dead.mkdir(parents=True, exist_ok=True)
                write_atomically(dead / "metrics.jsonl", _lines(late))
        except OSError as error:
            cause = error.strerror or error
            raise RunError(f"{dead} can't be written: {cause}; put that right, then --resume") from error
        write_atomically(self.metrics_file, _lines([row for row in rows if row["step"] <= step]))

    def next_lineage(self, manifest: Manifest | None) -> int:
        """Return the number of the next lineage, higher than any before, and note that it was taken."""
        path = self.path / "lineage"
        try:
            noted = int(path.read_text())
        except (OSError, ValueError):  # none yet, or damaged: the manifest and what was put aside know too
            dead = [p.name.removeprefix("lineage-") for p in (self.path / "dead").glob("lineage-*")]
            noted = max((int(name) for name in dead if name.isdecimal()), default=-1)
        number = max(noted, -1 if manifest is None else manifest.lineage) + 1
        write_atomically(path, str(number).encode())
        return number

    def _hold(self) -> None:
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"run folder {str(self.path)!r} is in use by another process; wait for it or choose another --name"
            ) from None
        self._lock = lock

    def _others(self) -> str:
        if not self.path.parent.is_dir():
            return ""
        names = sorted(path.parent.name for path in self.path.parent.glob("*/config.yaml"))
        return f"; runs there: {', '.join(names[-8:])}" if names else ""


def _refuse_newer(path: Path, version: Any) -> None:
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise CheckpointError(
            f"manifest {path} is of version {version}, this program reads {MANIFEST_VERSION}; continue the run with "
            "the newer tinker-atropos that wrote it"
        )


def latest_manifest(folder: RunFolder, say: Callable[[str], None] = lambda text: None) -> Manifest | None:
    """Return the newest whole manifest; raises `CheckpointError` if there are only damaged ones. `say` names those."""
    manifests = folder.manifests(say)
    if not manifests and any((folder.path / "manifests").glob("step-*.json")):
        raise CheckpointError(f"every manifest in {folder.path / 'manifests'} is damaged; start a new run")
    return manifests[-1] if manifests else None


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(dict(row)) + "\n" for row in rows).encode()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], trainer: str, environment: str) -> Iterable[str]:
    free = MAY_CHANGE | {f"{trainer}.{key}" for key in MAY_CHANGE_IN_TRAINER}
    free |= {f"{environment}.{key}" for key in MAY_CHANGE_IN_ENVIRONMENT}
    for section in sorted({*old, *new}):
        before, after = old.get(section) or {}, new.get(section) or {}
        if not isinstance(before, Mapping):
            raise ConfigError(f"the run's config.yaml is damaged: {section} is {before!r}, expected a section of keys")
        for key in sorted({*before, *after}):
            path = f"{section}.{key}"
            if path not in free and before.get(key) != after.get(key):
                yield f"{path} was {before.get(key)!r}, now {after.get(key)!r}"
