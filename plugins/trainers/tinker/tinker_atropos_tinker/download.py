"""Brings a checkpoint here as a PEFT adapter folder, the way the SDK's own `tinker checkpoint download` does.

The service hands out files only of `external_weights`. So a checkpoint of training state is opened once more, saved as
external weights for an hour, fetched through signed addresses, and that copy is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_atropos.errors import CheckpointError, UserError

from tinker_atropos_tinker.config import is_loopback
from tinker_atropos_tinker.service import Address, answer, new_service, rest_client
from tinker_atropos_tinker.service_errors import checkpoint_error
from tinker_atropos_tinker.service_log import LOGGER

if TYPE_CHECKING:
    import tinker

COPY_SECONDS = 3600
CLOSE_SECONDS = 10.0
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def refuse_target(to: Path) -> None:
    """Raise `UserError` unless `to` is new, or an empty folder, below a place that can hold one."""
    if to.is_dir() and any(to.iterdir()):
        raise UserError(f"{to} is there already and not empty; give a new folder")
    if to.exists() and not to.is_dir():
        raise UserError(f"{to} is a file; give a new folder")
    for parent in to.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise UserError(f"{to}: {parent} is a file, so no folder fits below it; give another place")
            return


async def download_state(where: Address, path: str, to: Path) -> Path:
    """Write the adapter of a training state (`tinker://…/weights/…`) to `to`; return that folder."""
    refuse_target(to)
    LOGGER.warning("opening %s once more, to save a copy that can be downloaded", path)
    service = await new_service(where)
    status = "errored"
    try:
        client = await service.create_training_client_from_state(
            path, user_metadata={"created_by": "tinker-atropos checkpoint download"}
        )
        folder = await download_model(where, client, to)
        status = "success"
        return folder
    except Exception as error:
        raise checkpoint_error(error, f"{path} could not be downloaded") from error
    finally:
        with contextlib.suppress(Exception):  # a session that can't be closed ends by itself
            await answer(service.close(status), "closing the session", CLOSE_SECONDS)


async def download_model(where: Address, client: tinker.TrainingClient, to: Path) -> Path:
    """Write the adapter that a training client holds now to `to`; return that folder."""
    refuse_target(to)
    rest = await rest_client(where)
    saved = await client.save_weights_external(f"download-{uuid.uuid4().hex[:12]}", ttl_seconds=COPY_SECONDS)
    try:
        return await download_external(where, saved.path, to, renew=True)
    finally:
        try:
            await answer(rest.delete_checkpoint_from_tinker_path(saved.path), "deleting the copy")
        except Exception as error:
            LOGGER.warning("the copy %s could not be deleted (%s); it expires within the hour", saved.path, error)


async def download_external(where: Address, path: str, to: Path, *, renew: bool = False) -> Path:
    """Write the files of external weights to `to`, whole or not at all; return that folder.

    `renew` puts the copy's end an hour on whenever addresses are signed anew.
    """
    refuse_target(to)
    rest = await rest_client(where)

    async def sign() -> Any:
        signed = await answer(rest.get_external_weights_urls(path), f"the files of {path}")
        if renew:
            await answer(rest.set_checkpoint_ttl_from_tinker_path(path, COPY_SECONDS), f"the end of {path}")
        return signed

    signed = await sign()
    to.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        places = destinations(signed.urls, draft)
        for name, place in sorted(places.items()):
            if datetime.now(UTC) >= signed.expires - timedelta(minutes=5):
                signed = await sign()
            place.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(fetch_file, signed.urls[name], place)
        absent = [name for name in ADAPTER if not (draft / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{path} has no {absent[0]}, so it is no PEFT adapter; it has {', '.join(sorted(places))}"
            )
        draft.chmod(0o755)
        if to.is_dir():
            to.rmdir()
        draft.replace(to)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written to {to}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return to


def destinations(urls: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Return where each file goes; raises `CheckpointError` for one that would leave the folder."""
    if not urls:
        raise CheckpointError("the checkpoint has no files")
    base = folder.resolve()
    places = {}
    for name in urls:
        place = (base / name).resolve()
        if Path(name).is_absolute() or place == base or not place.is_relative_to(base):
            raise CheckpointError(f"the checkpoint names a file {name!r} outside its folder; it is damaged or hostile")
        places[name] = place
    return places


def fetch_file(url: str, place: Path) -> None:
    """Write what is at a signed address to a file; raises `CheckpointError` where it ends early."""
    if not url.startswith("https://") and not (url.startswith("http://") and is_loopback(url)):
        raise CheckpointError(f"the service names a file at {url.split('?')[0]!r}; only https:// is fetched")
    try:
        with urllib.request.urlopen(url, timeout=60) as response, place.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
            expected = response.headers.get("Content-Length")
    except urllib.error.URLError as error:
        raise CheckpointError(f"{place.name} could not be fetched: {error}; try again") from error
    size = place.stat().st_size
    if expected is not None and size != int(expected):
        raise CheckpointError(f"{place.name} ended after {size} of {expected} bytes; try again")
