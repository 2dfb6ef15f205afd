"""The tokenizer of a model, from a folder, from the hub's cache, or from the hub within a bounded time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinker_atropos.errors import DataError, TinkerAtroposError, UserError

from tinker_atropos_tinker.local import local_model_folder

HUB_PATIENCE = 9.0
"""Seconds until a hub that does not answer counts as unreachable; importing transformers comes on top."""


def local_tokenizer(model: str, *, required: bool) -> Any | None:
    """Return the tokenizer of a model that is on this machine: a folder, or a name the local adapter knows.

    Where it is not `required` and there is no such model or no such adapter, return None.
    """
    from transformers import AutoTokenizer

    try:
        folder = Path(model) if Path(model).is_dir() else local_model_folder(model)
    except UserError:
        if required:
            raise
        return None
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def hub_tokenizer(model: str, ask: Callable[[], Any], patience: float = HUB_PATIENCE) -> Any:
    """Return what `ask` (the SDK's own look-up) gives; raises `DataError` if the hub does not answer in time."""
    from transformers import AutoTokenizer  # imported here, so that its seconds do not count as the hub's

    _ = AutoTokenizer.from_pretrained
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    # Not from a pool: a thread that hangs in a name look-up must not hold the interpreter at its end.
    threading.Thread(target=run, daemon=True, name="hub-tokenizer").start()
    try:
        tokenizer, error = answers.get(timeout=patience)
    except queue.Empty:
        tokenizer, error = None, TimeoutError(f"no answer within {patience:.0f} s")
    if error is None:
        return tokenizer
    if isinstance(error, TinkerAtroposError):
        raise error
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise DataError(
        f"the tokenizer of {model} is neither in the local cache nor to be had from the hub ({cause}). Set "
        "env.tokenizer_name to a folder that has it (any copy of the model), or restore the network"
    ) from error
