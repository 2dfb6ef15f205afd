"""The stored checkpoints of an account, or with `--local` those of a run folder."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_atropos.errors import CheckpointError, ConfigError, near
from tinker_atropos.trainer import CheckpointInfo

from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.download import download_external, download_state, refuse_target
from tinker_atropos_tinker.local import LocalServer, local_store, refuse_dead, start_local, stop_local, stored_model
from tinker_atropos_tinker.service import PATH, Address, address, answer, rest_client
from tinker_atropos_tinker.service_errors import checkpoint_error
from tinker_atropos_tinker.service_log import LOGGER, Reporter

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

PAGE = 100
KINDS = {"training": "state", "sampler": "weights", "external": "external"}


async def open_catalogue(config: TinkerConfig, folder: Path | None) -> TinkerCatalogue:
    """Open the account's checkpoints; with `local`, start a server on the store of the run in `folder`."""
    if not config.local:
        where = address(config)
        return TinkerCatalogue(await _connected(where), where)
    if folder is None:
        raise ConfigError("--local keeps checkpoints by run: name it (--run NAME)")
    store = local_store(folder)
    if not store.is_dir():
        raise CheckpointError(f"{folder} has no local checkpoints ({store} is absent); was that run made with --local?")
    server = await start_local(folder, stored_model(folder), threads=config.local_threads)
    try:
        where = address(config, server.url)
        return TinkerCatalogue(await _connected(where), where, server)
    except BaseException:
        stop_local(server)
        raise


async def _connected(where: Address) -> tinker.RestClient:
    try:
        return await answer(rest_client(where), "the service's catalogue")
    except Exception as error:
        raise checkpoint_error(error, "the Tinker service could not be asked") from error


class TinkerCatalogue:
    """A `CheckpointCatalogue` over the SDK's REST client."""

    def __init__(self, rest: tinker.RestClient, where: Address, server: LocalServer | None = None) -> None:
        self._rest, self._where, self._server = rest, where, server
        self._reporter = Reporter(LOGGER.warning)

    async def list(self) -> Sequence[CheckpointInfo]:
        """Return all checkpoints, newest first."""
        try:
            runs = {run.training_run_id: run for run in await _all_runs(self._rest)}
            checkpoints = await _all_checkpoints(self._rest)
        except Exception as error:
            raise checkpoint_error(error, "the checkpoints could not be listed") from error
        checkpoints.sort(key=lambda checkpoint: (checkpoint.time, checkpoint.tinker_path), reverse=True)
        return [_info(entry, runs.get(entry.tinker_path.removeprefix(PATH).split("/")[0])) for entry in checkpoints]

    async def info(self, uri: str) -> CheckpointInfo:
        """Return one checkpoint; raises `CheckpointError` with the near name if there is none."""
        found = {entry.uri: entry for entry in await self.list()}
        if uri not in found:
            raise CheckpointError(
                f"there is no checkpoint {uri!r} (deleted, expired, or never saved).{near(uri, found)} See "
                "`checkpoint list`"
            )
        return found[uri]

    async def download(self, uri: str, to: Path) -> Path:
        """Write the adapter as a PEFT folder. Sampler weights are fetched through the state saved beside them."""
        refuse_target(to)
        entry = await self.info(uri)
        if entry.kind == "external":
            return await self._told(download_external(self._where, uri, to), f"the download of {uri}")
        state = uri if entry.kind == "state" else await self._state_of(uri)
        return await self._told(download_state(self._where, state, to), f"the download of {state}")

    async def close(self) -> None:
        """Stop the server that was started for this, if one was."""
        if self._server is not None:
            stop_local(self._server)

    async def _told(self, awaitable: Awaitable[T], stage: str) -> T:
        return await self._reporter.told(awaitable, stage, lambda: refuse_dead(self._where.url))

    async def _state_of(self, uri: str) -> str:
        """Return the training state that has the weights of these sampler weights: one name, run and step.

        The service hands no sampler weights out. The trainer saves both from the same step and writes that step beside
        each, so that they are not paired by name alone.
        """
        path = uri.replace("/sampler_weights/", "/weights/")
        try:
            noted = {entry.tinker_path: entry.user_metadata or {} for entry in await _all_checkpoints(self._rest)}
        except Exception as error:
            raise checkpoint_error(error, "the checkpoints could not be listed") from error
        if noted.get(uri) and noted.get(path) == noted[uri] and "step" in noted[uri]:
            return path
        raise CheckpointError(
            f"{uri} holds sampler weights, which the service does not hand out, and no training state of the same step "
            "is saved beside it; name a tinker://…/weights/… path (see `checkpoint list`)"
        )


async def _all_checkpoints(rest: tinker.RestClient) -> list[Any]:
    found: list[Any] = []
    while True:
        page = await answer(rest.list_user_checkpoints(limit=PAGE, offset=len(found)), "the list of checkpoints")
        found.extend(page.checkpoints)
        total = page.cursor.total_count if page.cursor is not None else len(found)
        if not page.checkpoints or len(found) >= total:
            return found


async def _all_runs(rest: tinker.RestClient) -> list[Any]:
    found: list[Any] = []
    while True:
        page = await answer(rest.list_training_runs(limit=PAGE, offset=len(found)), "the list of training runs")
        found.extend(page.training_runs)
        if not page.training_runs or len(found) >= page.cursor.total_count:
            return found


def _info(entry: Any, run: Any) -> CheckpointInfo:
    return CheckpointInfo(
        uri=entry.tinker_path,
        kind=KINDS.get(entry.checkpoint_type, entry.checkpoint_type),
        base_model=None if run is None else run.base_model,
        lora_rank=None if run is None else run.lora_rank,
        size=entry.size_bytes,
        created=entry.time.isoformat(),
        expires=None if entry.expires_at is None else entry.expires_at.isoformat(),
    )
