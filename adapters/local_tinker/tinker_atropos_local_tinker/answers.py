"""Errors that a request is answered with, and the HTTP status or error category that the SDK reads from them."""

from __future__ import annotations

from typing import Any, Literal

from tinker_atropos.errors import UserError

Category = Literal["unknown", "server", "user"]


class NotFound(UserError):
    """What the request names is not here: HTTP 404."""


class Gone(UserError):
    """What the request names was here and has ended: HTTP 410."""


class Busy(UserError):
    """Too much is waiting; the SDK backs off and sends the request again: HTTP 429."""


def status_of(error: BaseException) -> int:
    """Return the HTTP status for an error raised while a request is taken in."""
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Gone):
        return 410
    if isinstance(error, Busy):
        return 429
    return 400 if isinstance(error, UserError) else 500


def failure(error: BaseException) -> dict[str, Any]:
    """Return the body of a failed future. A user error speaks for itself; of others the type helps to find the log."""
    category: Category = "user" if isinstance(error, UserError) else "server"
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return {"error": text, "category": category}
