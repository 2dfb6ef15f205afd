"""The SDK's exceptions in this project's tree: who must act, and whether trying again may help."""

from __future__ import annotations

import re

from tinker_atropos.errors import (
    CheckpointError,
    ConfigError,
    PolicyUnavailable,
    RunError,
    TinkerAtroposError,
    TrainerError,
)

# What the SDK wraps around the service's own words.
_SDK_TAIL = re.compile(r"^Request failed: | for self\.request_id=.*$")


def sampling_error(error: Exception) -> TinkerAtroposError:
    """Return what a failed sampling request is: `PolicyUnavailable` where the same call may go through later."""
    if isinstance(error, TinkerAtroposError):
        return error
    if setting := _setting_at_fault(error):
        return setting
    if status_of(error) in (404, 410):
        return PolicyUnavailable(f"the policy's sampler is gone, its trainer's session has ended: {brief(error)}")
    if is_refusal(error):
        return RunError(f"the Tinker service refused a sampling request: {brief(error)}")
    return PolicyUnavailable(f"no sample came back: {brief(error)}")


def trainer_error(error: Exception, doing: str) -> TinkerAtroposError:
    """Return what a failure while `doing` something is, apart from optimiser steps."""
    if isinstance(error, TinkerAtroposError):
        return error
    if setting := _setting_at_fault(error):
        return setting
    said = "the service refused" if is_refusal(error) else "no answer from the service"
    return TrainerError(f"{doing}: {said}: {brief(error)}")


def checkpoint_error(error: Exception, doing: str) -> TinkerAtroposError:
    """Return what a failure while `doing` something with a checkpoint is."""
    if isinstance(error, TinkerAtroposError):
        return error
    return _setting_at_fault(error) or CheckpointError(f"{doing}: {brief(error)}")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an exception, also where the SDK wrapped it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        status = getattr(current, "status_code", None)
        if isinstance(status, int):
            return status
        current = current.__cause__
    return None


def is_refusal(error: BaseException) -> bool:
    """Whether the service understood the request and will refuse it again (4xx, or a failure it calls the user's)."""
    import tinker
    from tinker.types import RequestErrorCategory

    if isinstance(error, tinker.RequestFailedError):
        return error.category is RequestErrorCategory.User
    status = status_of(error)
    return status is not None and 400 <= status < 500 and status not in (408, 409, 410, 429)


def brief(error: BaseException) -> str:
    """Return one line on an exception: its status and what the service said."""
    text = _SDK_TAIL.sub("", " ".join((str(error) or type(error).__name__).split()))
    status = status_of(error)
    if isinstance(error, TimeoutError) and not str(error):
        text = "timed out"
    head = f"HTTP {status}, " if status is not None and str(status) not in text else ""
    return f"{head}{text}"[:500]


def _setting_at_fault(error: Exception) -> ConfigError | None:
    import tinker

    status = status_of(error)
    if status in (401, 403):
        return ConfigError(
            f"the Tinker service does not accept this key (HTTP {status}): {brief(error)}. Check TINKER_API_KEY, or "
            "train on this machine with --local"
        )
    if status == 402:
        return ConfigError(f"the Tinker account has a billing issue: {brief(error)}. Settle it in the Tinker console")
    # Of the SDK's base class itself are only its complaints about keys.
    if type(error) is tinker.TinkerError:
        return ConfigError(f"{brief(error)}. Export TINKER_API_KEY=tml-…, or train on this machine with --local")
    return None
