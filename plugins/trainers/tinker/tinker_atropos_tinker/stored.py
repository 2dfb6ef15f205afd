"""Stored weights, or a base model as it is, to sample from where no run is on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinker_atropos.errors import CheckpointError, ConfigError, TinkerAtroposError
from tinker_atropos.trainer import StoredPolicy
from tinker_atropos.trajectory import PolicyRef

from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.local import local_store, start_local, stop_local, stored_model
from tinker_atropos_tinker.policy import TinkerPolicy, open_policy
from tinker_atropos_tinker.preflight import LOCAL_MODEL
from tinker_atropos_tinker.service import BASE, address, answer, forget_service, refuse_unreachable
from tinker_atropos_tinker.service_errors import brief, is_refusal, status_of

OPEN_SECONDS = 120.0
"""How long the service may take to load weights."""


@asynccontextmanager
async def open_stored(config: TinkerConfig, policy: StoredPolicy) -> AsyncIterator[TinkerPolicy]:
    """Open weights of the service, or with `local` start a server on the store in `policy.folder`, ended afterwards.

    Raises `ConfigError` for weights that the service does not have, and `CheckpointError` for a folder without a store.
    """
    if not config.local:
        where = address(config)
        await refuse_unreachable(where)
        yield await _opened(config, policy, where.url)
        return
    model = policy.model or LOCAL_MODEL
    if policy.uri is not None or local_store(policy.folder).is_dir():
        store = local_store(policy.folder)
        if not store.is_dir():
            raise CheckpointError(f"{policy.folder} has no local checkpoints ({store} is absent)")
        model = stored_model(policy.folder)
    server = await start_local(
        policy.folder, model, deterministic=policy.deterministic, threads=config.local_threads, say=policy.say
    )
    try:
        yield await _opened(config, policy, server.url, model)
    finally:
        try:
            await forget_service(address(config, server.url))
        finally:
            stop_local(server)


async def _opened(
    config: TinkerConfig, policy: StoredPolicy, url: str | None, model: str | None = None
) -> TinkerPolicy:
    uri = policy.uri if policy.uri is not None else f"{BASE}{model or policy.model}"
    ref = PolicyRef(policy.run, 0, policy.step, uri, endpoint=url)
    try:
        return await answer(open_policy(ref, config), f"opening {uri}", OPEN_SECONDS)
    except TinkerAtroposError as error:
        cause = error.__cause__
        if cause is not None and (is_refusal(cause) or status_of(cause) in (404, 410)):
            raise ConfigError(
                f"{uri}: the Tinker service has no such weights to sample from ({brief(cause)}); see `checkpoint list`"
            ) from error
        raise
