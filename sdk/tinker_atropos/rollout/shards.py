"""Where a shard of simulations runs: in the caller's thread, in a thread of its own, or in a worker process.

The three take the same requests, `start(method)` then `finish()`, and differ in nothing else but that a worker process
can be lost. Knows no policy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from tinker_atropos.errors import DataError, PluginError, TinkerAtroposError, TransientError
from tinker_atropos.rollout.shard_process import payload_of, serve, shared
from tinker_atropos.rollout.simulations import Shape, ShardArrays, Simulations

Workers = Literal["process", "thread", "inline"]
Make = Callable[[], Any]

ANSWER_SECONDS = 120.0
START_SECONDS = 120.0  # at least: a worker process imports and makes its simulations before its first answer
CLOSE_SECONDS = 30.0  # for a step that is under way


class ShardLost(TransientError):
    """A worker process ended, or was ended because it was `late`; its simulations are gone, and it can be restarted."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Shard(Protocol):
    """Simulations, wherever they run. Used by one thread; one request at a time."""

    arrays: ShardArrays
    close_ends_wait: bool  # whether `close` may be called, and ends it, while another thread waits in `finish`

    def start(self, method: str, *values: Any) -> None:
        """Begin a method of `Simulations`."""
        ...

    def ready(self) -> bool:
        """Whether `finish` would return at once."""
        ...

    def finish(self) -> Any:
        """Wait for what was begun and return its result; raises what it raised, or `ShardLost`."""
        ...

    def restart(self) -> None:
        """Make the simulations anew after `ShardLost`; a reset must follow."""
        ...

    def close(self) -> None:
        """Stop and free the simulations."""
        ...


def open_shard(
    workers: Workers, make: Make, name: str, shape: Shape, *, answer_seconds: float = ANSWER_SECONDS
) -> Shard:
    """Return a shard made by `make`; raises `DataError` with the cause if that can't be done.

    A worker process that does not answer a request within `answer_seconds` is ended and counts as lost; its first
    answer, for which it starts and makes the simulations, may take `START_SECONDS` if that is longer.
    """
    if workers == "process":
        return ProcessShard(make, name, shape, answer_seconds)
    return (ThreadShard if workers == "thread" else InlineShard)(make, name, shape)


def made(make: Make, name: str) -> Any:
    """Return what `make` makes; raises `DataError` with the cause if it fails."""
    try:
        return make()
    except TinkerAtroposError:
        raise
    except Exception as error:
        raise DataError(f"environment {name!r} can't be made: {type(error).__name__}: {error}") from error


class InlineShard:
    """Steps when it is waited for."""

    close_ends_wait = False

    def __init__(self, make: Make, name: str, shape: Shape) -> None:
        self.arrays = ShardArrays.made(shape)
        self._simulations = Simulations(made(make, name), name, self.arrays)
        self._begun: Callable[[], Any] | None = None

    def start(self, method: str, *values: Any) -> None:
        self._begun = partial(getattr(self._simulations, method), *values)

    def ready(self) -> bool:
        return True

    def finish(self) -> Any:
        assert self._begun is not None, "finish follows start"
        return self._begun()

    def restart(self) -> None:
        raise AssertionError("only a worker process can be lost")

    def close(self) -> None:
        self._simulations.close()


class ThreadShard:
    """Steps in a thread of its own: simulators that let go of the interpreter's lock overlap with inference."""

    close_ends_wait = False

    def __init__(self, make: Make, name: str, shape: Shape) -> None:
        self.arrays = ShardArrays.made(shape)
        self._simulations = Simulations(made(make, name), name, self.arrays)
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"simulations of {name}", daemon=True)
        self._thread.start()

    def start(self, method: str, *values: Any) -> None:
        self._asked.put(partial(getattr(self._simulations, method), *values))

    def ready(self) -> bool:
        return not self._answers.empty()

    def finish(self) -> Any:
        result, error = self._answers.get()
        if error is not None:
            raise error
        return result

    def restart(self) -> None:
        raise AssertionError("only a worker process can be lost")

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)
        if not self._thread.is_alive():  # else it hangs in the simulator, which can't be closed under it
            self._simulations.close()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                self._answers.put((asked(), None))
            except BaseException as error:
                self._answers.put((None, error))


class ProcessShard:
    """Steps in a worker process; arrays are shared memory, requests and answers go through a pipe."""

    close_ends_wait = True

    def __init__(self, make: Make, name: str, shape: Shape, answer_seconds: float) -> None:
        import multiprocessing

        self._context = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks
        self._name, self._shape, self._answer_seconds = name, shape, answer_seconds
        self._payload = payload_of(make)
        self._memory, self.arrays = shared(self._context, shape)
        self._process: Any
        self._pipe: Any
        self._answered: bool
        self._begin()

    def start(self, method: str, *values: Any) -> None:
        self._allowed = self._answer_seconds if self._answered else max(self._answer_seconds, START_SECONDS)
        self._method, self._due = method, time.monotonic() + self._allowed
        try:
            self._pipe.send((method, values))
        except OSError:
            return  # lost; finish says so

    def ready(self) -> bool:
        try:
            return bool(self._pipe.poll()) or time.monotonic() >= self._due
        except OSError:
            return True

    def finish(self) -> Any:
        try:
            if not self._pipe.poll(max(0.0, self._due - time.monotonic())):
                self._process.kill()  # it may not listen to anything gentler
                self._process.join(timeout=5.0)
                raise ShardLost(
                    f"a worker process of environment {self._name!r} {self._late()} and was ended", late=True
                )
            result, error = self._pipe.recv()
            self._answered = True
        except (EOFError, OSError):
            self._process.join(timeout=5.0)
            raise ShardLost(
                f"a worker process of environment {self._name!r} ended with code {self._process.exitcode}"
            ) from None
        if error is not None:
            raise error
        return result

    def restart(self) -> None:
        self._end()
        self._begin()

    def close(self) -> None:
        self._end()

    def _late(self) -> str:
        if self._answered:
            return f"did not answer {self._method}() for {self._allowed:g} s (rollout.step_timeout)"
        return (
            f"did not start, make its simulations and reset them within {self._allowed:g} s (the longer of "
            f"{START_SECONDS:g} s and rollout.step_timeout)"
        )

    def _begin(self) -> None:
        self._answered = False
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=serve, args=(self._payload, self._name, self._shape, self._memory, theirs), daemon=True
        )
        try:
            self._process.start()
        except RuntimeError as error:  # a script without `if __name__ == "__main__"`
            raise PluginError(
                f"worker processes can't be started from here: {str(error).strip().splitlines()[0]}; put the call "
                "under `if __name__ == '__main__':`, or use rollout.workers=thread"
            ) from error
        finally:
            theirs.close()

    def _end(self) -> None:
        self._process.terminate()
        self._process.join(timeout=5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=5.0)
        self._pipe.close()
