"""Reads what a sampler returned for one turn: whether it is whole, its text, and where it stopped. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tinker_atropos import PolicyUnavailable, Sample
from tinker_atropos.trajectory import BoolArray, FloatArray, IntArray

from tinker_atropos_managed_server.stops import Stops, first_stop

if TYPE_CHECKING:
    from tinker_atropos_managed_server.session import Dialect

# Rounding may lift the log-probability of a certain token a little above 0; nothing else may.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn: its text without the stop, and the end-of-turn id that its tokens end with, if they do.

    `kept` of its tokens hold text and no stop. `matched` is the stop that ended it, where that is not the model's own
    end of turn. `proven` is False if it was said to have stopped and no stop is in it.
    """

    text: str
    end: int | None
    kept: int = 0
    matched: str | int | None = None
    proven: bool = True


def read_turn(dialect: Dialect, stops: Stops, tokens: list[int], reason: str, before: int | None) -> Turn:
    """Return the turn that was sampled after the token `before`.

    Cut off are a last token that ends the turn and, where the sample stopped, a last stop id or all from the first stop
    string on. Other special tokens stay visible as text.
    """
    vocabulary = dialect.vocabulary
    last = tokens[-1] if tokens else None
    stopped = reason == "stop"
    # With no stop of its own a turn that stopped did so at an end of turn; the sampler may know more than we do.
    told = stopped and stops.sampler is None and last in vocabulary.texts
    end = last if told or last in dialect.ends else None
    if end is not None:
        return Turn(vocabulary.decode(tokens[:-1], before), end, len(tokens) - 1)
    if stopped and last is not None and last in stops.ids:
        return Turn(vocabulary.decode(tokens[:-1], before), None, len(tokens) - 1, last)
    text = vocabulary.decode(tokens, before)
    if not stopped:
        return Turn(text, None, len(tokens))
    found = first_stop(text, stops.strings)
    if found is None:
        return Turn(text, None, len(tokens), proven=False)
    ahead = text[: found[0]]
    kept = len(tokens)
    while kept and not ahead.startswith(vocabulary.decode(tokens[:kept], before)):
        kept -= 1
    return Turn(ahead, None, kept, found[1])


def ended_sample(sample: Sample, stops: Stops, ends: frozenset[int]) -> Sample:
    """Return the sample up to its first end of turn.

    A sampler that matches stop strings may not see special tokens in the text, and run past them.
    """
    if not stops.strings or not len(sample.tokens):
        return sample
    places = np.flatnonzero(np.isin(sample.tokens, list(ends & stops.ids)))
    if not len(places):
        return sample
    length = int(places[0]) + 1
    if length == len(sample.tokens) and sample.stop_reason == "stop":
        return sample
    return Sample(sample.tokens[:length], sample.logprobs[:length], "stop", sample.ref)


def checked_sample(sample: Sample, size: int) -> tuple[IntArray, FloatArray]:
    """Return tokens `int32[T]` and log-probabilities `float32[T]` of a sample.

    Raises `PolicyUnavailable` for one that is broken: lengths that differ, ids not below `size`, no known stop reason.
    """
    try:
        exact = np.asarray(sample.tokens)
        logprobs = np.array(sample.logprobs, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise PolicyUnavailable(f"the sampler returned no arrays of numbers: {error}; sample again") from error
    if exact.ndim != 1 or exact.shape != logprobs.shape:
        raise PolicyUnavailable(
            f"the sampler returned tokens of shape {exact.shape} with log-probabilities of shape {logprobs.shape}; "
            "there must be one for each token; sample again"
        )
    if len(exact) and not np.issubdtype(exact.dtype, np.integer):
        raise PolicyUnavailable(f"the sampler returned tokens of type {exact.dtype}, expected integers; sample again")
    if len(exact) and (int(exact.min()) < 0 or int(exact.max()) >= size):
        outside = exact[(exact < 0) | (exact >= size)]
        raise PolicyUnavailable(
            f"the sampler returned token {int(outside[0])}, and the tokenizer's ids go from 0 to {size - 1}; "
            "check that policy and tokenizer belong to one model"
        )
    if sample.stop_reason not in ("stop", "length"):
        raise PolicyUnavailable(
            f"the sampler returned stop_reason {sample.stop_reason!r}, expected 'stop' or 'length'; sample again"
        )
    return exact.astype(np.int32), logprobs


def trainable(logprobs: FloatArray) -> tuple[BoolArray, int, int]:
    """Return which tokens can be trained on `bool[T]`; how many have no log-probability, and how many no possible one.

    Not possible is what is infinite or above 0.
    """
    missing = np.isnan(logprobs)
    impossible = np.isinf(logprobs) | (logprobs > _ROUNDING)
    return ~(missing | impossible), int(missing.sum()), int(impossible.sum())
