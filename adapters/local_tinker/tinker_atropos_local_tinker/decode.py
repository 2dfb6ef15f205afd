"""Decodes a batch of sequences with one model: a key-value cache that rows join and leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from tinker_atropos_local_tinker.base_model import BaseModel
from tinker_atropos_local_tinker.draw import DrawParams, draw, random_numbers
from tinker_atropos_local_tinker.stops import Stops, StopWatch

PREFILL_TOKENS = 2048  # padded tokens per forward pass of a prompt; bounds its logits where all of them are wanted

TopK = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class SampleParams:
    """One sampling request, checked. `prompt` is not empty; `last_n` None scores the whole prompt."""

    prompt: list[int]
    samples: int
    max_tokens: int
    draw: DrawParams
    stops: Stops
    seed: int | None = None
    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sampled: int = 0
    last_n: int | None = None

    @property
    def scores_prompt(self) -> bool:
        """Return whether the prompt's own logits are wanted."""
        return self.prompt_logprobs or self.top_prompt > 0


@dataclass(slots=True)
class Sampled:
    """One sampled sequence: `logprobs` are raw, one per token; `top` holds each token's likeliest alternatives."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopK] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"


@dataclass(slots=True)
class Scores:
    """Log-probabilities of a prompt: float32[T], NaN where there is none, and the likeliest tokens [T, K]."""

    logprobs: npt.NDArray[np.float32]
    top: TopK | None = None


class Row:
    """One sequence while it is decoded."""

    def __init__(self, params: SampleParams, sample: int, base: BaseModel) -> None:
        self.params = params
        self.sample = sample
        self.sequence = Sampled()
        self._random = random_numbers(params.seed, sample)
        self._watch = StopWatch(params.stops, base.tokenizer, params.prompt)

    def uniform(self) -> float:
        """Return the next random number in [0, 1)."""
        return float(self._random.random())

    def accept(self, token: int, logprob: float) -> bool:
        """Append a token; return whether the sequence is complete."""
        self.sequence.tokens.append(token)
        self.sequence.logprobs.append(logprob)
        if self._watch.stopped_by(token):
            self.sequence.stop_reason = "stop"
            return True
        return len(self.sequence.tokens) >= self.params.max_tokens


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, H, T, D] in buffers that grow by half, instead of a copy for each token."""

    _buffers: tuple[Tensor, Tensor] | None = None
    _length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        length = self._length + key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < length:
            self._grow(key_states, length + max(64, length // 2))
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : length] = states
        self._view(length)
        return self.keys, self.values

    def _grow(self, like: Tensor, room: int) -> None:
        shape = (*like.shape[:2], room, like.shape[3])
        grown = like.new_empty(shape), like.new_empty(shape)
        if self._buffers is not None:
            for new, old in zip(grown, self._buffers, strict=True):
                new[:, :, : self._length] = old[:, :, : self._length]
        self._buffers = grown
        self.is_initialized = True

    def _view(self, length: int) -> None:
        assert self._buffers is not None
        self._length = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def take(self, rows: Tensor, first: int = 0) -> None:
        """Keep the batch rows `rows` (which may repeat) and the positions from `first` on."""
        self._replace(self.keys[rows, :, first:], self.values[rows, :, first:])

    def join(self, other: _Layer) -> None:
        """Append the rows of `other`; the shorter of both is padded on the left."""
        length = max(self._length, other._length)
        pairs = ((self.keys, other.keys), (self.values, other.values))
        keys, values = (
            torch.cat([functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in pair]) for pair in pairs
        )
        self._replace(keys, values)

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self._buffers = keys, values
        self._view(keys.shape[2])


@dataclass(slots=True)
class _Prefilled:
    """Prompts that went through the model: cache, mask bool[B, T], and the logits [B, V] after each prompt."""

    layers: list[_Layer]
    mask: Tensor
    logits: Tensor
    scores: list[Scores | None]

    def take(self, rows: Tensor) -> None:
        """Keep the prompts `rows`, which may repeat."""
        for layer in self.layers:
            layer.take(rows)
        self.mask, self.logits = self.mask[rows], self.logits[rows]


class Decoding:
    """A batch of sequences under one model. `add` brings rows in, `advance` gives each one more token."""

    def __init__(self, base: BaseModel, model: nn.Module) -> None:
        self._base = base
        self._model = model
        self.rows: list[Row] = []
        self._state: _Prefilled | None = None

    @torch.inference_mode()
    def add(self, groups: Sequence[tuple[SampleParams, Sequence[Row]]]) -> list[Scores | None]:
        """Run the prompts and let their rows join; return each group's prompt scores. Equal prompts run once."""
        distinct: dict[tuple[tuple[int, ...], bool, int, int | None], list[int]] = {}
        for g, (params, _) in enumerate(groups):
            key = (tuple(params.prompt), params.scores_prompt, params.top_prompt, params.last_n)
            distinct.setdefault(key, []).append(g)
        order = sorted(distinct.values(), key=lambda members: len(groups[members[0]][0].prompt))
        scores: list[Scores | None] = [None] * len(groups)
        for part in self._parts([(members, groups[members[0]][0]) for members in order]):
            done = self._prefill([params for _, params in part])
            rows: list[Row] = []
            repeat: list[int] = []
            for i, (members, _) in enumerate(part):
                for g in members:
                    scores[g] = done.scores[i]
                    rows.extend(groups[g][1])
                    repeat.extend([i] * len(groups[g][1]))
            if repeat != list(range(len(part))):
                done.take(torch.tensor(repeat, device=self._base.device))
            self._join(done)
            self.rows.extend(rows)
        return scores

    @staticmethod
    def _parts(prompts: list[tuple[list[int], SampleParams]]) -> list[list[tuple[list[int], SampleParams]]]:
        """Split prompts, shortest first, so that little is padded and one forward pass stays small."""
        parts: list[list[tuple[list[int], SampleParams]]] = []
        for item in prompts:
            length = len(item[1].prompt)
            last = parts[-1] if parts else None
            if last and length <= 1.5 * len(last[0][1].prompt) + 8 and length * (len(last) + 1) <= 2 * PREFILL_TOKENS:
                last.append(item)
            else:
                parts.append([item])
        return parts

    def _prefill(self, prompts: list[SampleParams]) -> _Prefilled:
        device = self._base.device
        length = max(len(p.prompt) for p in prompts)
        tokens = torch.zeros(len(prompts), length, dtype=torch.long)
        mask = torch.zeros(len(prompts), length, dtype=torch.bool)
        for i, p in enumerate(prompts):
            tokens[i, length - len(p.prompt) :] = torch.tensor(p.prompt)
            mask[i, length - len(p.prompt) :] = True
        tokens, mask = tokens.to(device), mask.to(device)
        state = _Prefilled([_Layer() for _ in range(self._base.layers)], mask[:, :0], torch.empty(0), [])
        scorers = [_Scorer(p, length) if p.scores_prompt else None for p in prompts]
        chunk = max(1, PREFILL_TOKENS // len(prompts))
        scoring = any(scorers)
        for at in range(0, length, chunk):
            end = min(length, at + chunk)
            positions = (mask.long().cumsum(dim=1) - 1).clamp_(min=0)[:, at:end]
            logits = self._forward(state, tokens[:, at:end], mask[:, :end], positions, keep=0 if scoring else 1)
            for i, scorer in enumerate(scorers):
                if scorer is not None:
                    scorer.take(logits[i], at, tokens[i])
            state.logits = logits[:, -1]
        state.scores = [None if scorer is None else scorer.scores for scorer in scorers]
        return state

    def _forward(self, state: _Prefilled, tokens: Tensor, mask: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Run `tokens` [B, T]; return float32 logits of the last `keep` positions (0: of all)."""
        state.mask = mask
        cache = Cache(layers=list(state.layers))
        out: Tensor = self._model(
            input_ids=tokens,
            attention_mask=None if bool(mask.all()) else mask.long(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self._base.cache_argument: cache},
        ).logits
        return out.float()

    def _join(self, new: _Prefilled) -> None:
        if self._state is None:
            self._state = new
            return
        old = self._state
        length = max(old.mask.shape[1], new.mask.shape[1])
        for mine, other in zip(old.layers, new.layers, strict=True):
            mine.join(other)
        old.mask = torch.cat([functional.pad(m, (length - m.shape[1], 0)) for m in (old.mask, new.mask)])
        old.logits = torch.cat([old.logits, new.logits])

    @torch.inference_mode()
    def advance(self) -> list[Row]:
        """Give each row one more token; return the rows that are complete, which have left the batch."""
        state = self._state
        assert state is not None
        logits = state.logits
        tokens, logprobs = draw(logits, [r.params.draw for r in self.rows], [r.uniform() for r in self.rows])
        self._note_top(logits)
        done: list[Row] = []
        kept: list[int] = []
        for i, (row, token, logprob) in enumerate(zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if row.accept(token, logprob):
                done.append(row)
            else:
                kept.append(i)
        tokens = self._keep(kept, tokens)
        if self.rows:
            mask = functional.pad(state.mask, (0, 1), value=True)
            positions = mask.sum(dim=1, keepdim=True) - 1
            state.logits = self._forward(state, tokens[:, None], mask, positions, keep=1)[:, -1]
        return done

    def drop(self, rows: Sequence[Row]) -> None:
        """Take rows out before they are complete."""
        gone = {id(row) for row in rows}
        if gone:
            self._keep([i for i, row in enumerate(self.rows) if id(row) not in gone], None)

    def _note_top(self, logits: Tensor) -> None:
        for i, row in enumerate(self.rows):
            if row.params.top_sampled:
                row.sequence.top.append(_top(logits[i : i + 1], row.params.top_sampled))

    def _keep(self, kept: list[int], tokens: Any) -> Any:
        """Keep the rows `kept`; return their tokens. Columns that are padding for all of them go too."""
        assert self._state is not None
        if len(kept) == len(self.rows):
            return tokens
        self.rows = [self.rows[i] for i in kept]
        if not kept:
            self._state = None
            return tokens
        index = torch.tensor(kept, device=self._base.device)
        mask = self._state.mask[index]
        first = int(mask.any(dim=0).int().argmax())
        for layer in self._state.layers:
            layer.take(index, first)
        self._state.mask = mask[:, first:]
        self._state.logits = self._state.logits[index]
        return None if tokens is None else tokens[index]


class _Scorer:
    """Collects one prompt's log-probabilities from its logits, chunk by chunk."""

    def __init__(self, params: SampleParams, padded: int) -> None:
        count = len(params.prompt)
        self._pad = padded - count
        self._first = max(1, count - params.last_n) if params.last_n is not None else 1
        self._count = count
        self._k = params.top_prompt
        top: TopK | None = None
        if self._k:
            # Empty cells as the hosted service writes them: token 0, log-probability -99999.
            top = np.zeros((count, self._k), np.int32), np.full((count, self._k), -99999.0, np.float32)
        self.scores = Scores(np.full(count, np.nan, np.float32), top)

    def take(self, logits: Tensor, at: int, tokens: Tensor) -> None:
        """Use logits [T, V] of padded positions `at` and on; each speaks about the token after it."""
        start = max(at, self._pad + self._first - 1)
        end = min(at + len(logits), self._pad + self._count - 1)
        if start >= end:
            return
        rows = logits[start - at : end - at]
        wanted = tokens[start + 1 : end + 1]
        found = rows.gather(1, wanted[:, None])[:, 0] - rows.logsumexp(dim=-1)
        into = slice(start + 1 - self._pad, end + 1 - self._pad)
        self.scores.logprobs[into] = found.cpu().numpy()
        if self.scores.top is not None:
            ids, values = _top(rows, self._k)
            self.scores.top[0][into], self.scores.top[1][into] = ids, values


def _top(logits: Tensor, k: int) -> TopK:
    """Return the `k` likeliest tokens int32[T, k] and their raw log-probabilities float32[T, k]."""
    values, ids = logits.topk(k, dim=-1)
    logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
    return ids.cpu().numpy().astype(np.int32), logprobs.cpu().numpy().astype(np.float32)
