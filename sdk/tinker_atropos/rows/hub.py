"""Loads a data set of the Hugging Face hub through `datasets`, or says soon that the hub can't be reached.

`datasets` is no requirement of this distribution: the plugin that loads from the hub brings it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from tinker_atropos.errors import DataError

REQUEST_SECONDS = 5.0
# A resolver may hang beyond any request's time limit, so the question whether the hub is there has a limit of its own.
PROBE_SECONDS = 8.0

logger = logging.getLogger(__name__)


def load_hub(dataset: str, subset: str | None, *, ways_on: str, setting: str = "env.dataset") -> Any:
    """Return a hub data set, by split.

    Without a reachable hub the copy in the local cache is used, and the log says so. Raises `DataError` that names
    `ways_on` (what else `setting` may be) if there is none, or if the hub has no such data set.
    """
    import datasets

    trouble = _probe()
    if trouble is not None:
        logger.warning("the hub can't be reached (%s); looking for %s in the local cache", trouble, dataset)
    try:
        with _offline(datasets) if trouble is not None else contextlib.nullcontext():
            return datasets.load_dataset(dataset, subset)
    except Exception as error:  # `datasets` raises what its file systems and HTTP clients raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if trouble is not None:
            raise DataError(
                f"{setting}: the hub can't be reached ({trouble}), and the local cache has no {dataset!r}; use "
                f"{ways_on}"
            ) from error
        raise DataError(
            f"{setting}: {dataset!r} can't be loaded from the hub: {reason}; check the name and "
            f"{setting.rpartition('.')[0]}.subset, or use {ways_on}"
        ) from error


def _probe() -> str | None:
    """Return why the hub can't be reached, or None if it answers."""
    outcome: list[str | None] = []
    # A daemon: a resolver that hangs must not hold up the exit of the program either.
    thread = threading.Thread(target=lambda: outcome.append(_request()), name="hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return outcome[0] if outcome else f"no answer within {PROBE_SECONDS:.0f} s"


def _request() -> str | None:
    from huggingface_hub import constants, get_session

    try:
        response = get_session().head(constants.ENDPOINT, timeout=REQUEST_SECONDS)
    except Exception as error:  # the HTTP library below huggingface_hub has changed twice
        return f"{constants.ENDPOINT}: {str(error).strip() or type(error).__name__}"
    return f"{constants.ENDPOINT} answers {response.status_code}" if response.status_code >= 500 else None


@contextlib.contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Keep `datasets` from trying the network, and retrying it, on the way to its cache."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
