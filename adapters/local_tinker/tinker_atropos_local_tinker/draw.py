"""Draws tokens from logits: one uniform number a token, from each sample's own random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tinker_atropos.errors import UserError
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one request draws. `temperature` 0 takes the likeliest token; `top_k` -1 or 0 keeps all; `top_p` 1 too."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 1e4:
            raise UserError(f"temperature={self.temperature} is out of range; choose 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is out of range; choose more than 0 and at most 1")
        if self.top_k < -1:
            raise UserError(f"top_k={self.top_k} is out of range; choose -1 (no limit) or a positive number")

    @property
    def filters(self) -> bool:
        """Return whether some tokens are kept out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0)


def random_numbers(seed: int | None, sample: int) -> np.random.Generator:
    """Return the random numbers of one sample of a request; without a seed, fresh ones."""
    entropy = None if seed is None else [seed & (2**64 - 1), sample]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def draw(logits: Tensor, params: list[DrawParams], uniforms: list[float]) -> tuple[Tensor, Tensor]:
    """Return tokens int64[B] and their raw log-probabilities float32[B] for float32 logits [B, V].

    Raw: of the model itself at temperature 1, unchanged by temperature, top-k and top-p, as the hosted service returns
    them. At another temperature, training on them is off-policy without a word. Raises `UserError` where a logit is NaN
    or infinitely large.
    """
    total = logits.logsumexp(dim=-1)
    if not bool(torch.isfinite(total).all()):
        raise UserError("the weights give logits that are not finite: training has diverged; lower the learning rate")
    temperatures = [p.temperature for p in params]
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    greedy = [i for i, t in enumerate(temperatures) if t == 0]
    filtered = [i for i, p in enumerate(params) if p.filters]
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not p.filters]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(dim=-1)
    if plain:
        rows = logits if len(plain) == len(params) else logits[plain]
        if any(temperatures[i] != 1.0 for i in plain):
            rows = rows / torch.tensor([temperatures[i] for i in plain], device=logits.device)[:, None]
        tokens[plain] = _invert(rows.softmax(dim=-1), [uniforms[i] for i in plain])
    for i in filtered:
        tokens[i] = _draw_filtered(logits[i] / params[i].temperature, params[i], uniforms[i])
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - total
    return tokens, logprobs


def _invert(probabilities: Tensor, uniforms: list[float]) -> Tensor:
    """Return the first index where the cumulated probability [B, V] exceeds each uniform number."""
    # In float64: cumulated over 49k tokens in float32, rounding would favour some of the rare ones.
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    at = torch.tensor(uniforms, dtype=torch.float64, device=probabilities.device)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, at, right=True)[:, 0].clamp_(max=probabilities.shape[-1] - 1)


def _draw_filtered(logits: Tensor, params: DrawParams, uniform: float) -> Tensor:
    count = min(params.top_k, len(logits)) if params.top_k > 0 else len(logits)
    values, order = logits.topk(count)  # sorted, likeliest first
    probabilities = values.softmax(dim=-1)
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)  # the likeliest one always stays
    return order[_invert(probabilities[None], [uniform])[0]]
