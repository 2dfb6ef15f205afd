"""Closes an environment when what used it has ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

CLOSE_SECONDS = 30.0

log = logging.getLogger(__name__)


async def close_environment(environment: Any) -> None:
    """Close the environment, if it can be; a failure of that hides no other."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        closing = close()
        if inspect.isawaitable(closing):
            async with asyncio.timeout(CLOSE_SECONDS):
                await closing
    except Exception:
        log.exception("the environment could not be closed")
