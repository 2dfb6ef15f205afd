"""The worker process of a shard: makes the simulations and answers requests until its pipe closes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tinker_atropos.errors import DataError, PluginError, RunError, TinkerAtroposError
from tinker_atropos.rollout.simulations import Shape, ShardArrays, Simulations

ALIGNMENT = 64  # bytes: each array begins on a cache line of its own


def payload_of(make: Callable[[], Any]) -> bytes:
    """Return `make` as bytes that a worker process can call; raises `PluginError` where that can't be."""
    try:
        import cloudpickle
    except ImportError:
        raise PluginError(
            "rollout.workers=process needs cloudpickle, which Gymnasium brings; `pip install cloudpickle`"
        ) from None
    for name, module in list(sys.modules.items()):
        if name.startswith("tinker_atropos_file_"):  # loaded from ./my_env.py: a worker could not import it
            cloudpickle.register_pickle_by_value(module)
    try:
        payload: bytes = cloudpickle.dumps(make)
    except Exception as error:
        raise PluginError(
            f"the environment can't be sent to a worker process: {type(error).__name__}: {error}; use "
            "rollout.workers=thread"
        ) from error
    return payload


def shared(context: Any, shape: Shape) -> tuple[Any, ShardArrays]:
    """Return memory that a worker process can be given, and a shard's arrays in it. It has no name to leak."""
    memory = context.RawArray("b", _Layout().size_for(shape))
    return memory, laid_out(memory, shape)


def laid_out(memory: Any, shape: Shape) -> ShardArrays:
    """Return a shard's arrays in shared memory."""
    layout = _Layout(memory)
    return ShardArrays.made(shape, layout.allocate)


class _Layout:
    """Hands out one array after the other; without memory it only adds up their sizes."""

    def __init__(self, memory: Any = None) -> None:
        self._memory, self._used = memory, 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        place, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
        if self._memory is None:
            return np.empty(shape, kind)
        return np.frombuffer(self._memory, kind, count=size // kind.itemsize, offset=place).reshape(shape)

    def size_for(self, shape: Shape) -> int:
        ShardArrays.made(shape, self.allocate)
        return max(self._used, 1)


def serve(payload: bytes, name: str, shape: Shape, memory: Any, pipe: Any) -> None:
    """Answer `(method, values)` with `(result, error)` until the pipe closes, as it does when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    simulations: Simulations | None = None
    failure: TinkerAtroposError | None = None
    try:
        simulations = Simulations(pickle.loads(payload)(), name, laid_out(memory, shape))
    except TinkerAtroposError as error:
        failure = error
    except Exception as error:
        failure = DataError(
            f"environment {name!r} can't be made in a worker process: {type(error).__name__}: {error}; try "
            "rollout.workers=thread"
        )
    with suppress(EOFError, OSError):
        while True:
            method, values = pipe.recv()
            if simulations is None:
                pipe.send((None, failure))
                continue
            answer: tuple[Any, TinkerAtroposError | None]
            try:
                answer = (getattr(simulations, method)(*values), None)
            except TinkerAtroposError as error:
                answer = (None, _plain(error))
            except Exception as error:
                answer = (
                    None,
                    RunError(f"environment {name!r} failed in a worker process: {type(error).__name__}: {error}"),
                )
            pipe.send(answer)
    if simulations is not None:
        simulations.close()
    sys.stdout.flush()
    os._exit(0)  # no handlers of the parent's libraries here


def _plain(error: TinkerAtroposError) -> TinkerAtroposError:
    """Return the error without what a pipe can't carry."""
    error.__cause__ = error.__context__ = None
    return error
