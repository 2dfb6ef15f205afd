"""What `-m` names: an endpoint, stored weights, a run's checkpoint or a model on this machine, told by its shape."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinker_atropos.errors import ConfigError, PluginError, TinkerAtroposError, near
from tinker_atropos.registry import Registry, normal
from tinker_atropos.run_folder import Manifest, RunFolder
from tinker_atropos.validation import validate
from tinker_atropos.yaml_file import read_yaml

KINDS = (
    "an OpenAI-compatible endpoint (https://host/v1#model), stored weights (tinker://…), a run's checkpoint (its name "
    "or folder under runs/, as NAME, NAME@step-000010 or NAME@base), or a model on this machine (a packaged name such "
    "as smollm2-135m, a folder, or a hub id)"
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAT, _TEXT = "/chat/completions", "/completions"


@dataclass(frozen=True, slots=True)
class EndpointSubject:
    """An OpenAI-compatible endpoint: its base URL (`…/v1`), and the model's name there; None: its only one."""

    url: str
    model: str | None

    @property
    def label(self) -> str:
        """What it is called in a folder's name and a report."""
        return self.model or urlsplit(self.url).netloc

    def identity(self) -> dict[str, Any]:
        """Return its part of the settings that tell evaluations apart."""
        return {"kind": "endpoint", "url": self.url, "name": self.model}


@dataclass(frozen=True, slots=True, eq=False)
class PolicySubject:
    """Weights that a trainer plugin opens: `uri`, or None for the base model `model`.

    `run` is the folder of the run they belong to, if any; `adapter` that run's own adapter sections, by name.
    """

    kind: str
    label: str
    spec: Any
    config: Any
    uri: str | None
    model: str | None
    run: Path | None
    step: int
    adapter: Mapping[str, Any]

    def identity(self) -> dict[str, Any]:
        """Return its part of the settings that tell evaluations apart."""
        return {
            "kind": self.kind,
            "name": self.label,
            "trainer": self.spec.name,
            "uri": self.uri,
            "model": self.model,
            "run": None if self.run is None else self.run.name,
            "step": self.step,
        }

    def check(self) -> None:
        """Raise what can't work here: a missing key, an absent adapter, an unknown model."""
        if self.spec.check is not None:
            self.spec.check(self.config, self.model)


Subject = EndpointSubject | PolicySubject


def read_subject(
    text: str,
    *,
    runs: Path = Path("runs"),
    name: str | None = None,
    trainer: str | None = None,
    registry: Registry | None = None,
) -> Subject:
    """Return what `text` names, by its shape; raises `ConfigError` that names the four kinds where that is unclear.

    `run:…` and `model:…` say it outright. `name` is `--model-name`, `trainer` `--trainer`, `runs` the folder of runs.
    """
    registry = registry or Registry()
    if not text.strip():
        raise ConfigError(f"-m: expected {KINDS}")
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() in ("http", "https"):
        return _endpoint(text, name)
    if name is not None:
        raise ConfigError(f"--model-name: names a model of an endpoint, and -m {text!r} is no http(s) address")
    if scheme is not None:
        return _stored(text, scheme[1], trainer, registry)
    if text.startswith("run:"):
        return _of_run(text.removeprefix("run:"), runs, registry)
    if text.startswith("model:"):
        return _local(text.removeprefix("model:"), trainer, registry)
    return _by_what_there_is(text, runs, trainer, registry)


def _by_what_there_is(text: str, runs: Path, trainer: str | None, registry: Registry) -> Subject:
    run_name = text.rpartition("@")[0] or text
    folder = _run_folder(run_name, runs)
    if folder is None and Path(text).parent == runs and not Path(text).is_dir():
        return _of_run(Path(text).name, runs, registry)  # says which runs there are; a hub id may look the same
    try:
        model: PolicySubject | None = None if "@" in text else _local(text, trainer, registry)
        refusal: TinkerAtroposError | None = None
    except (ConfigError, PluginError) as error:
        model, refusal = None, error
    if folder is not None and model is not None:
        raise ConfigError(
            f"-m {text!r} is both the run {str(folder)!r} and a model on this machine; say run:{text} or model:{text}"
        )
    if folder is not None:
        return _of_run(text, runs, registry)
    if model is not None:
        return model
    if "@" in text:
        return _of_run(text, runs, registry)
    known = _run_names(runs)
    looks_like_a_run = near(text, known)
    there = f" Runs in {str(runs)!r}: {', '.join(known[-8:])}." if known else ""
    why = f" ({refusal})" if refusal is not None else ""
    raise ConfigError(f"-m {text!r} is none of what a model can be.{looks_like_a_run}{there} Give {KINDS}{why}")


def _endpoint(text: str, name: str | None) -> EndpointSubject:
    try:
        parts = urlsplit(text)
        _ = parts.port  # out of range raises only when it is asked for
    except ValueError as error:
        raise ConfigError(f"-m {text!r}: {error}; expected https://host/v1#model") from None
    if not parts.hostname:
        raise ConfigError(f"-m {text!r} names no host; expected https://host/v1#model")
    if parts.username or parts.password:
        raise ConfigError("-m: an address with a user or password would be stored; put the key into OPENAI_API_KEY")
    if parts.query:
        raise ConfigError(f"-m {text!r}: what follows '?' would be stored and might be a secret; leave it out")
    if name is not None and parts.fragment and name != parts.fragment:
        raise ConfigError(f"--model-name: {name!r}, and -m names {parts.fragment!r}; keep one")
    path = parts.path.rstrip("/")
    for end in (_CHAT, _TEXT):
        path = path.removesuffix(end)
    return EndpointSubject(f"{parts.scheme.lower()}://{parts.netloc}{path or '/v1'}", name or parts.fragment or None)


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _stored(text: str, scheme: str, trainer: str | None, registry: Registry) -> PolicySubject:
    """The scheme of stored weights is the name of the trainer that opens them."""
    able = _able(registry)
    name = trainer or scheme
    if normal(name) not in {normal(one) for one in able}:
        raise ConfigError(
            f"-m {text!r}: no installed trainer opens {scheme}://… ({', '.join(able) or 'none'} do, each its own). "
            f"Give {KINDS}"
        )
    spec = registry.load("trainer", name)
    return PolicySubject(
        kind="stored",
        label=text.rstrip("/").rpartition("://")[2].replace("/sampler_weights/", "/"),
        spec=spec,
        config=validate(spec.config, {}, path=normal(spec.name)),
        uri=text,
        model=None,
        run=None,
        step=0,
        adapter={},
    )


def _local(text: str, trainer: str | None, registry: Registry) -> PolicySubject:
    spec = registry.load("trainer", trainer or _only(registry))
    if spec.stored is None or "local" not in spec.config.model_fields:
        raise PluginError(f"--trainer: {spec.name!r} serves no model on this machine")
    config = validate(spec.config, {"local": True}, path=normal(spec.name))
    subject = PolicySubject(
        kind="model",
        label=text if not Path(text).is_dir() else Path(text).resolve().name,
        spec=spec,
        config=config,
        uri=None,
        model=str(Path(text).resolve()) if Path(text).is_dir() else text,
        run=None,
        step=0,
        adapter={},
    )
    subject.check()
    return subject


def _of_run(text: str, runs: Path, registry: Registry) -> PolicySubject:
    name, at, which = text.rpartition("@") if "@" in text else (text, "", "")
    folder = _run_folder(name, runs)
    if folder is None:
        known = _run_names(runs)
        raise ConfigError(
            f"-m: there is no run {name!r} in {str(runs)!r}.{near(name, known)} "
            f"Runs there: {', '.join(known[-8:]) or 'none'}; another folder of runs is named with --runs"
        )
    run = RunFolder(folder)
    content = read_yaml(run.config_file)
    try:
        trainer, model = str(content["run"]["trainer"]), content["openai"]["model_name"]
    except (KeyError, TypeError):
        raise ConfigError(f"{run.config_file}: damaged, it names no run.trainer and openai.model_name") from None
    spec = registry.load("trainer", trainer)
    if spec.stored is None:
        raise PluginError(
            f"-m {text!r}: the policies of trainer {spec.name!r} answer no text, so they can't be evaluated here; the "
            "run's own evaluations are in its metrics.jsonl"
        )
    base = bool(at) and which == "base"
    manifest = None if base else _manifest(run, which if at else None)
    sections = {normal(plugin.name) for plugin in registry.listed("adapter")}
    return PolicySubject(
        kind="run",
        label=f"{folder.name}@{'base' if manifest is None else manifest.checkpoint.name}",
        spec=spec,
        config=validate(spec.config, content.get(normal(spec.name)) or {}, path=normal(spec.name)),
        uri=None if manifest is None else manifest.checkpoint.weights,
        model=model,
        run=folder,
        step=0 if manifest is None else manifest.step,
        adapter={name: value for name, value in content.items() if name in sections and isinstance(value, Mapping)},
    )


def _manifest(run: RunFolder, which: str | None) -> Manifest:
    manifests = run.manifests()
    if not manifests:
        raise ConfigError(f"-m: the run in {str(run.path)!r} has no checkpoint yet; {run.path.name}@base is its start")
    if which is None:
        return manifests[-1]
    named = {key: manifest for manifest in manifests for key in _names(manifest)}
    if which not in named:
        listing = ", ".join(manifest.checkpoint.name for manifest in manifests)
        raise ConfigError(f"-m: the run in {str(run.path)!r} has no checkpoint {which!r}; it has {listing}, and base")
    return named[which]


def _names(manifest: Manifest) -> tuple[str, ...]:
    return manifest.checkpoint.name, f"step-{manifest.step:06d}", str(manifest.step)


def _run_folder(name: str, runs: Path) -> Path | None:
    """Return the run's folder: `name` in the folder of runs, or a path to it."""
    if not name or "\0" in name:
        return None
    for path in (runs / name, Path(name).expanduser()):
        try:
            if RunFolder(path).exists():
                return path
        except OSError:  # a name too long for a path
            continue
    return None


def _run_names(runs: Path) -> list[str]:
    return sorted(path.parent.name for path in runs.glob("*/config.yaml")) if runs.is_dir() else []


def _able(registry: Registry) -> list[str]:
    sound = [plugin.name for plugin, error in registry.status("trainer") if not error]
    return [name for name in sound if registry.load("trainer", name).stored is not None]


def _only(registry: Registry) -> str:
    able = _able(registry)
    if len(able) != 1:
        raise ConfigError(
            "-m: a model on this machine is served by a trainer that can; "
            + (f"choose one with --trainer: {', '.join(able)}" if able else "none is installed")
        )
    return able[0]
