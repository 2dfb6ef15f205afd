"""One exception tree, grouped by how one recovers.

    TinkerAtroposError
    ├── UserError                    change what you typed, exit code 2
    │   ├── ConfigError              a configuration key or value
    │   │   └── MissingCredentials   a hosted service wants a key; a dry run goes on without
    │   ├── PluginError              a plugin is unknown, broken, doubled or does not fit
    │   └── DataError                a data set can't be had or a row of it is wrong
    ├── RunError                     the run cannot go on, exit code 1
    │   ├── FilteredOut              every group scored alike, nothing to learn from
    │   ├── EpisodesFailed           too many episodes failed in a row
    │   ├── TrainerError             the trainer or its service gave up
    │   │   └── UpdateUncertain      a reply was lost, or the server ended: rewind to the manifest
    │   └── CheckpointError          a checkpoint is missing, broken or can't be written
    ├── TransientError               the same call may go through later
    │   └── PolicyUnavailable        no sample came back
    └── ContextOverflow              the prompt leaves no room to sample

Messages name the value, what would be right, and the next step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class TinkerAtroposError(Exception):
    """Base of every error that tinker-atropos raises on purpose."""

    exit_code = 1


class UserError(TinkerAtroposError):
    """Something the user typed or wrote is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key or value is wrong; the message starts with its path."""


class MissingCredentials(ConfigError):
    """A hosted service wants a key that is not there; a dry run says so and goes on."""


class PluginError(UserError):
    """A plugin is unknown, broken, doubled, or does not fit the others."""


class DataError(UserError):
    """A data set cannot be had, or a row of it is wrong; the message names file and line."""


class RunError(TinkerAtroposError):
    """The run cannot go on; what was saved before stays valid."""


class FilteredOut(RunError):
    """Too many groups in a row had equal scores, so there was nothing to learn from."""


class EpisodesFailed(RunError):
    """Too many episodes in a row failed; the message carries the last cause."""


class TrainerError(RunError):
    """The trainer, or the service behind it, gave up."""


class UpdateUncertain(TrainerError):
    """The reply to an optimiser step was lost: it may or may not have happened, so the run must rewind."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged, or could not be written."""


class TransientError(TinkerAtroposError):
    """The same call may go through later."""


class PolicyUnavailable(TransientError):
    """The policy did not answer a sampling request."""


class ContextOverflow(TinkerAtroposError):
    """The prompt leaves no room to sample within the model's context."""


def near(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or ""; case and `-` for `_` don't count.

    Close is a slip of the fingers (of a short name one letter), or a part of the known name (`model` of `model_name`).
    """
    plain = _plain(name)
    spelled = {_plain(known_name): known_name for known_name in known}
    close = difflib.get_close_matches(plain, list(spelled), n=1, cutoff=0.75 if len(plain) > 4 else 0.6)
    if not close:
        holding = [candidate for candidate in spelled if _words(plain) and _words(plain) <= _words(candidate)]
        close = difflib.get_close_matches(plain, holding, n=1, cutoff=0.0)
    return f" Did you mean {spelled[close[0]]!r}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", name))
