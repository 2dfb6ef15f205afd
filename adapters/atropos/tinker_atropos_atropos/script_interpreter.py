"""Looks at the interpreter that is to run a script: is it there, and are its packages the ones Atropos works with?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinker_atropos.errors import ConfigError, PluginError

from tinker_atropos_atropos.script_config import TOKEN_VARIABLE

PINS = ("atroposlib==0.4.0", "transformers==4.57.6", "datasets==3.6.0", "gymnasium==1.2.3", "math-verify==0.9.0")
"""With these every script of the conformance set runs; atroposlib itself pins nothing."""

LOOK_SECONDS = 60.0

SECRETS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_ATROPOS_REDIS_PASSWORD", TOKEN_VARIABLE)
"""Variables that a run reads and no script may."""

# The probe imports nothing heavy: where a package lies and which version it has is all that is asked.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
names = ("atroposlib", "transformers", "datasets", "gymnasium", "tinker-atropos")
found = {}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = None
found["atroposlib_found"] = u.find_spec("atroposlib") is not None
found["tinker_atropos_found"] = u.find_spec("tinker_atropos") is not None
found["python"] = sys.version.split()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that has atroposlib: its path, and the versions that were found."""

    path: str
    versions: Mapping[str, str | None]


def find_interpreter(given: str | None, environment: Mapping[str, str]) -> Interpreter:
    """Return the interpreter `given` (None: the one that runs this).

    A folder is taken for a virtual environment. Raises `ConfigError` where there is no such program and `PluginError`
    where it lacks atroposlib.
    """
    path = _path(given)
    try:
        done = subprocess.run(
            [path, "-c", _PROBE], env=dict(environment), capture_output=True, text=True, timeout=LOOK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"env.python: {path!r} did not answer within {LOOK_SECONDS:.0f} s") from None
    except OSError as error:
        raise ConfigError(f"env.python: {path!r} can't be started: {error.strerror or error}") from error
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"env.python: {path!r} is no Python 3.10 or newer: {said:.200}") from None
    if not found["atroposlib_found"]:
        raise PluginError(
            f"{path} (Python {found['python']}) has no atroposlib, so it can run no Atropos script. Give the scripts "
            f"an interpreter of their own: python3.11 -m venv scripts; scripts/bin/pip install {' '.join(PINS)}; then "
            "--env-python scripts"
        )
    return Interpreter(path, {key: found[key] for key in found if not key.endswith("_found")})


def warnings_about(interpreter: Interpreter) -> list[str]:
    """Return what is known to go wrong with the packages of an interpreter."""
    found = []
    if _major(interpreter.versions.get("transformers")) >= 5:
        found.append(
            f"{interpreter.path} has transformers {interpreter.versions['transformers']}: since 5 apply_chat_template "
            'returns a mapping, of which Atropos scripts make two "tokens"; most of them post nothing usable. Install '
            "transformers==4.57.6 there"
        )
    if _minor(interpreter.versions.get("gymnasium")) >= (1, 4):
        found.append(
            f"{interpreter.path} has gymnasium {interpreter.versions['gymnasium']}, which refuses Taxi-v3 and others "
            "of old; install gymnasium==1.2.3 there if a script asks for them"
        )
    return found


def script_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a script: those of this process, but for its secrets and what phones home."""
    environment = dict(os.environ if base is None else base)
    for name in (*SECRETS, "SLURM_JOB_NODELIST", "ATROPOS_PROXY_URL"):
        environment.pop(name, None)  # the secrets are not theirs; the others would send them elsewhere
    environment["PYTHONUNBUFFERED"] = "1"  # so that the log is there when it is shown
    for name, value in (("WANDB_MODE", "disabled"), ("TOKENIZERS_PARALLELISM", "false")):
        environment.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):  # their clients would take a proxy even to this machine
        listed = [entry for entry in environment.get(name, "").split(",") if entry]
        environment[name] = ",".join([*listed, *(h for h in ("127.0.0.1", "localhost", "::1") if h not in listed)])
    return environment


def _path(given: str | None) -> str:
    if given is None:
        return sys.executable
    path = Path(given).expanduser()
    if path.is_dir():
        inside = path / "bin" / "python"
        if not inside.exists():
            raise ConfigError(f"env.python: {given!r} is a folder without bin/python; name an interpreter or a venv")
        return str(inside.absolute())
    if "/" in given:
        if not path.is_file():
            raise ConfigError(f"env.python: {given!r} does not exist; name an interpreter or a virtual environment")
        return str(path.absolute())  # not resolved: the link is what makes it a virtual environment
    found = shutil.which(given)
    if found is None:
        raise ConfigError(
            f"env.python: no program {given!r} is on the PATH; name an interpreter or a virtual environment"
        )
    return found


def _minor(version: str | None) -> tuple[int, int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in (version or "0.0").split(".")[:2]]
    return numbers[0], numbers[1] if len(numbers) > 1 else 0


def _major(version: str | None) -> int:
    return _minor(version)[0]
