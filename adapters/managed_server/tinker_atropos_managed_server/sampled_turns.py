"""Remembers what was sampled, and tells which tokens of a sequence that was handed in are proven to be it."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker_atropos import PolicyRef, Sample
from tinker_atropos.external import Proven
from tinker_atropos.trajectory import FinishReason, FloatArray, IntArray

from tinker_atropos_managed_server.turn import trainable
from tinker_atropos_managed_server.turn_records import TurnRecord, TurnRecords

# What a turn and a prompt take beside their tokens, in tokens of 4 bytes.
_OVERHEAD = 256
# A sequence that ends inside a turn is looked up among the last so many turns of its prompt.
_LOOK_BACK = 1024


@dataclass(slots=True, eq=False)
class _Prompt:
    tokens: IntArray
    key: tuple[int, int]
    prefix: int  # the hash of its tokens
    turns: list[_Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    prompt: _Prompt
    tokens: IntArray
    logprobs: FloatArray
    kept: int
    ref: PolicyRef
    finish_reason: FinishReason
    number: int
    key: tuple[int, int]

    @property
    def start(self) -> int:
        return len(self.prompt.tokens)


@dataclass(frozen=True, slots=True)
class _Match:
    turn: _Turn
    length: int


class SampledTurns:
    """The journal of the sampled turns, bounded by a budget of tokens; the oldest turns are forgotten first.

    A sampled turn is proven in a sequence that holds its whole prompt and then all of its tokens. Two liberties that
    clients take are allowed for: the end of turn (or the stop) may be missing, and the sequence may end inside the
    turn. Text that was tokenised anew differs somewhere, and then nothing of the turn is proven.

    **How.** The hash of a prefix is Σ (tᵢ + 1)·Bⁱ mod 2⁶⁴, so one cumulative sum gives those of all prefixes of a
    sequence. Turns are found by the length and the hash of prompt and text together, and then compared token by token:
    a collision costs time, never truth.
    """

    def __init__(self, budget: int, records: TurnRecords | None = None) -> None:
        """Hold `budget` tokens; with `records`, what those hold too, and keep every further turn there."""
        self._budget = budget
        self._base = secrets.randbits(64) | 1  # odd, and nobody's guess
        self._powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
        self._prompts: dict[tuple[int, int], list[_Prompt]] = {}
        self._ends: dict[tuple[int, int], list[_Turn]] = {}
        self._seen_prompts = _Filter()
        self._seen_ends = _Filter()
        self._order: deque[_Turn] = deque()
        self._number = 0
        self._held = 0
        self._forgotten = 0
        self._lock = threading.Lock()
        self._records: TurnRecords | None = None
        if records is not None:
            for record in records.read():
                self.add(record.prompt, record.sample, record.kept)
            self._records = records
            self._forgotten = 0

    @property
    def on_disk(self) -> bool:
        """Whether each turn is written to a disk, which may keep the caller of `add` waiting."""
        return self._records is not None

    @property
    def forgotten(self) -> int:
        """How many turns were forgotten for want of budget since this journal began."""
        return self._forgotten

    @property
    def unrecorded(self) -> int:
        """How many turns could not be written to the records."""
        return 0 if self._records is None else self._records.lost

    @property
    def turns(self) -> int:
        """How many turns are remembered."""
        return len(self._order)

    @property
    def tokens(self) -> int:
        """What they take, in tokens of 4 bytes; never above the budget."""
        return self._held

    def add(self, prompt: IntArray, sample: Sample, kept: int) -> None:
        """Remember a sample of `prompt int32[T]`. `kept` of its tokens are text, the rest are its stop."""
        if not len(sample.tokens):
            return
        if self._records is not None:
            self._records.add(TurnRecord(prompt, sample, kept))
        with self._lock:
            known = self._prompt(prompt)
            tokens = np.array(sample.tokens, dtype=np.int32)
            start, end = len(known.tokens), len(known.tokens) + kept
            powers = self._powers_to(end)[start:end]
            prefix = (known.prefix + _total(tokens[:kept], powers)) % 2**64
            self._number += 1
            turn = _Turn(
                known,
                tokens,
                np.array(sample.logprobs, dtype=np.float32),
                kept,
                sample.ref,
                sample.stop_reason,
                self._number,
                (end, prefix),
            )
            known.turns.append(turn)
            self._ends.setdefault(turn.key, []).append(turn)
            self._seen_ends.add(prefix)
            self._order.append(turn)
            self._held += _OVERHEAD + 2 * len(tokens)
            while self._held > self._budget and self._order:
                self._forget(self._order.popleft())

    def prove(self, tokens: IntArray, logprobs: FloatArray | None = None) -> Proven:
        """Return what is known of `tokens int32[T]`: each turn whose prompt and tokens it holds, in order.

        Where several turns fit a place (equal samples of one prompt, or of two policies), the longest counts; of those
        the one whose log-probabilities are nearest to `logprobs float32[T]`, where given and possible (finite, not
        above 0: clients pad with 1.0); else the oldest policy's, since a turn must not pass for fresher than it is. A
        sampled token without a finite log-probability stays unproven.
        """
        sequence = np.asarray(tokens)
        if sequence.ndim != 1 or (len(sequence) and not np.issubdtype(sequence.dtype, np.integer)):
            raise ValueError(f"tokens of shape {sequence.shape} and type {sequence.dtype}; expected int32[T]")
        mask = np.zeros(len(sequence), dtype=np.bool_)
        found = np.zeros(len(sequence), dtype=np.float32)
        policies: list[PolicyRef] = []
        reasons: list[FinishReason] = []
        with self._lock:
            for match in self._matches(sequence, logprobs):
                turn = match.turn
                place = slice(turn.start, turn.start + match.length)
                given = turn.logprobs[: match.length]
                mask[place] = trainable(given)[0]
                found[place] = np.where(mask[place], given, np.float32(0))
                policies.append(turn.ref)
                reasons.append(turn.finish_reason)
        return Proven(mask, found, tuple(policies), tuple(reasons))

    def _prompt(self, tokens: IntArray) -> _Prompt:
        length = len(tokens)
        prefix = _total(tokens, self._powers_to(length)[:length])
        key = (length, prefix)
        for known in self._prompts.get(key, ()):
            if np.array_equal(known.tokens, tokens):
                return known
        made = _Prompt(np.array(tokens, dtype=np.int32), key, prefix)
        self._prompts.setdefault(key, []).append(made)
        self._seen_prompts.add(prefix)
        self._held += _OVERHEAD + length
        return made

    def _forget(self, turn: _Turn) -> None:
        self._forgotten += 1
        _drop(self._ends, turn.key, turn)
        self._seen_ends.remove(turn.key[1])
        self._held -= _OVERHEAD + 2 * len(turn.tokens)
        prompt = turn.prompt
        prompt.turns.pop(0)  # the oldest of all is the oldest of its prompt
        if not prompt.turns:
            _drop(self._prompts, prompt.key, prompt)
            self._seen_prompts.remove(prompt.prefix)
            self._held -= _OVERHEAD + len(prompt.tokens)

    def _matches(self, sequence: IntArray, logprobs: FloatArray | None) -> list[_Match]:
        """Return the turns that the sequence holds, in order, none over another."""
        if not self._order or not len(sequence):
            return []
        powers = self._powers_to(len(sequence))[: len(sequence)]
        prefixes = np.zeros(len(sequence) + 1, dtype=np.uint64)
        np.cumsum(_terms(sequence, powers), out=prefixes[1:])
        whole: dict[int, list[_Match]] = {}
        begun: dict[int, bool] = {}  # by id of a prompt: whether the sequence begins with it
        for key in self._seen_ends.keys(prefixes):
            for turn in self._ends.get(key, ()):
                if _begins(sequence, turn.prompt, begun) and (length := _common(sequence, turn)) >= max(turn.kept, 1):
                    whole.setdefault(turn.start, []).append(_Match(turn, length))
        chosen: list[_Match] = []
        covered = 0
        for start in sorted(whole):
            if start >= covered:
                best = _best(whole[start], logprobs)
                chosen.append(best)
                covered = start + best.length
        if covered < len(sequence) and (last := self._cut_off(sequence, prefixes, covered, begun, logprobs)):
            chosen.append(last)
        return chosen

    def _cut_off(
        self,
        sequence: IntArray,
        prefixes: NDArray[np.uint64],
        covered: int,
        begun: dict[int, bool],
        logprobs: FloatArray | None,
    ) -> _Match | None:
        """Return a turn that goes on where the sequence ends."""
        for key in self._seen_prompts.keys(prefixes):
            if not covered <= key[0] < len(sequence):
                continue
            for prompt in self._prompts.get(key, ()):
                if not _begins(sequence, prompt, begun):
                    continue
                rest = len(sequence) - key[0]
                ending = [
                    _Match(turn, rest)
                    for turn in prompt.turns[-_LOOK_BACK:]
                    if len(turn.tokens) > rest
                    and turn.tokens[0] == sequence[key[0]]
                    and np.array_equal(turn.tokens[:rest], sequence[key[0] :])
                ]
                if ending:
                    return _best(ending, logprobs)
        return None

    def _powers_to(self, length: int) -> NDArray[np.uint64]:
        """Return at least `length` powers of the base."""
        while len(self._powers) < length:
            step = np.uint64(pow(self._base, len(self._powers), 2**64))
            self._powers = np.concatenate([self._powers, self._powers * step])
        return self._powers


class _Filter:
    """Tells of most hashes that nobody has them, for all prefixes of a sequence at once."""

    _BITS = 18

    def __init__(self) -> None:
        self._counts: NDArray[np.int32] = np.zeros(2**self._BITS, dtype=np.int32)

    def add(self, prefix: int) -> None:
        self._counts[prefix >> (64 - self._BITS)] += 1

    def remove(self, prefix: int) -> None:
        self._counts[prefix >> (64 - self._BITS)] -= 1

    def keys(self, prefixes: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
        """Return length and hash of the prefixes that somebody may have."""
        known = np.flatnonzero(self._counts[prefixes >> np.uint64(64 - self._BITS)])
        return zip(known.tolist(), prefixes[known].tolist(), strict=True)


def _terms(tokens: NDArray[Any], powers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (tokens.astype(np.uint64) + np.uint64(1)) * powers


def _total(tokens: NDArray[Any], powers: NDArray[np.uint64]) -> int:
    return int(_terms(tokens, powers).sum(dtype=np.uint64))


def _begins(sequence: IntArray, prompt: _Prompt, begun: dict[int, bool]) -> bool:
    found = begun.get(id(prompt))
    if found is None:
        length = len(prompt.tokens)
        found = length <= len(sequence) and bool(np.array_equal(sequence[:length], prompt.tokens))
        begun[id(prompt)] = found
    return found


def _common(sequence: IntArray, turn: _Turn) -> int:
    """Return how many of the turn's tokens the sequence holds after the prompt, until they differ."""
    there = sequence[turn.start : turn.start + len(turn.tokens)]
    differ = np.flatnonzero(there != turn.tokens[: len(there)])
    return int(differ[0]) if len(differ) else len(there)


def _best(matches: Sequence[_Match], logprobs: FloatArray | None) -> _Match:
    def fit(match: _Match) -> tuple[int, float, int, int]:
        turn, distance = match.turn, 0.0
        if logprobs is not None and len(matches) > 1:
            given = np.asarray(logprobs)[turn.start : turn.start + match.length]
            if given.shape == (match.length,):
                possible = trainable(given)[0]
                apart = float(np.abs(given - turn.logprobs[: match.length])[possible].max(initial=0.0))
                distance = apart if np.isfinite(apart) else float(np.finfo(np.float32).max)
        return (match.length, -distance, -turn.ref.step, -turn.number)

    return max(matches, key=fit)


def _drop(index: dict[tuple[int, int], list[Any]], key: tuple[int, int], item: Any) -> None:
    held = index[key]
    held.remove(item)
    if not held:
        del index[key]
