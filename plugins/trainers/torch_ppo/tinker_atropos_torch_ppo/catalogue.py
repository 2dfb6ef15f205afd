"""The checkpoints of a run folder, for `tinker-atropos checkpoint`. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tinker_atropos.errors import CheckpointError, ConfigError, near
from tinker_atropos.trainer import CheckpointInfo

from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.export import export
from tinker_atropos_torch_ppo.inference import open_snapshot
from tinker_atropos_torch_ppo.stored import FOLDER, POLICY_FILE, STATE_FILE, newest_first


async def open_catalogue(config: TorchPPOConfig, folder: Path | None) -> Catalogue:
    """Open the checkpoints of the run in `folder`; raises `ConfigError` without one, as there is no account."""
    if folder is None:
        raise ConfigError("torch_ppo keeps checkpoints in the run's folder; name the run with --run NAME")
    return Catalogue(folder / FOLDER)


class Catalogue:
    """A `CheckpointCatalogue` over a folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def list(self) -> Sequence[CheckpointInfo]:
        """Return the weights and the state of each checkpoint, newest first."""
        return await asyncio.to_thread(
            lambda: [
                _info(place / file, kind)
                for place in newest_first(self._folder)
                for file, kind in ((POLICY_FILE, "weights"), (STATE_FILE, "state"))
                if (place / file).is_file()
            ]
        )

    async def info(self, uri: str) -> CheckpointInfo:
        """Return one; raises `CheckpointError` with the near name if there is none. The run's folder may have moved."""
        found = {_name(entry.uri): entry for entry in await self.list()}
        if _name(uri) not in found:
            raise CheckpointError(
                f"there is no checkpoint {uri!r} in {self._folder} (removed, or never saved)."
                f"{near(uri, [entry.uri for entry in found.values()])} See `checkpoint list`"
            )
        return found[_name(uri)]

    async def download(self, uri: str, to: Path) -> Path:
        """Write the policy of a checkpoint, named by its weights or its state, as a folder; return it."""
        entry = await self.info(uri)
        weights = entry.uri.rpartition("/")[0] + "/" + POLICY_FILE
        await asyncio.to_thread(lambda: export(open_snapshot(weights), to))
        return to

    async def close(self) -> None:
        """Nothing is held."""


def _name(uri: str) -> tuple[str, ...]:
    """Return what of an address lies within the folder: the checkpoint's name and the file's."""
    return tuple(uri.split("/")[-2:])


def _info(path: Path, kind: str) -> CheckpointInfo:
    status = path.stat()
    created = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
    return CheckpointInfo(path.resolve().as_uri(), kind, size=status.st_size, created=created)
