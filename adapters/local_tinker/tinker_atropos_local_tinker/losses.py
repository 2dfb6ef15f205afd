"""The table of loss functions: each maps the log-probabilities of the targets to a loss per token.

Losses are token sums, as Tinker defines them: nothing is averaged over tokens, sequences or batches, so ten-fold
weights give a ten-fold gradient. A new loss is one function and one line in `LOSSES`.
Formulas: https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_atropos.errors import UserError, near

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss: `per_token(logprobs, inputs, config)` returns a loss of the shape of `logprobs`.

    `inputs` are the datum's `loss_fn_inputs` but for `target_tokens`; each has the shape of `target_tokens`.
    `optional` ones default to 1 everywhere. `config` names the keys that `loss_fn_config` may have, with defaults.
    """

    per_token: Callable[[Tensor, Mapping[str, Tensor], Config], Tensor]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> Tensor:
    """Return `-weights * logprobs`, the weighted negative log-likelihood."""
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> Tensor:
    """Return `-exp(logprobs - sampler_logprobs) * advantages`, the policy gradient corrected for the sampler."""
    ratio = (logprobs - inputs["logprobs"]).exp()
    return -ratio * inputs["advantages"]


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional=("weights",)),
    "importance_sampling": Loss(importance_sampling, required=("logprobs", "advantages")),
}


def find_loss(name: str, config: Config) -> tuple[Loss, dict[str, float | str]]:
    """Return the loss called `name` and its full configuration; raises `UserError` naming the known ones."""
    loss = LOSSES.get(name)
    if loss is None:
        raise UserError(f"unknown loss {name!r}.{near(name, LOSSES)} Known here: {', '.join(sorted(LOSSES))}")
    unknown = sorted(set(config) - set(loss.config))
    if unknown:
        known = ", ".join(sorted(loss.config)) or "none"
        raise UserError(f"loss {name!r} knows no loss_fn_config key {unknown[0]!r}; known keys: {known}")
    return loss, {**loss.config, **config}
