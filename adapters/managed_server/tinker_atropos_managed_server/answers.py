"""Errors that a request is answered with: the HTTP status, and the body in OpenAI's form."""

from __future__ import annotations

import logging
from typing import Any

from tinker_atropos.errors import ContextOverflow, TinkerAtroposError, UserError

log = logging.getLogger(__name__)


class Refused(UserError):
    """A request that can't be served as it is: HTTP 400, or another `status`."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class NotReady(TinkerAtroposError):
    """There is no policy yet: HTTP 503, and the client asks again."""


def failure(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error that a request met.

    What the client can change is a 4xx. What the policy or its service failed at is a 503, which clients repeat. A 500
    is a defect of ours, and is logged as one.
    """
    if isinstance(error, BaseExceptionGroup):
        return failure(error.exceptions[0])
    if isinstance(error, Refused):
        kind = "invalid_request_error" if error.status < 500 else "service_unavailable"
        return error.status, body_of(str(error), kind, error.param, error.code)
    if isinstance(error, ContextOverflow):
        return 400, body_of(str(error), "invalid_request_error", None, "context_length_exceeded")
    if isinstance(error, UserError):
        return 400, body_of(str(error), "invalid_request_error")
    if isinstance(error, RecursionError):
        return 400, body_of("the request is nested too deeply; send a flatter one", "invalid_request_error")
    if isinstance(error, NotReady):
        return 503, body_of(str(error), "service_unavailable", None, "not_ready")
    if isinstance(error, TinkerAtroposError):
        log.warning("the policy could not answer: %s", error)
        return 503, body_of(str(error), "service_unavailable", None, "policy_unavailable")
    log.error("a request failed", exc_info=error)
    return 500, body_of(f"{type(error).__name__}: {error}; the server's log has more", "server_error")


def body_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error body in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
