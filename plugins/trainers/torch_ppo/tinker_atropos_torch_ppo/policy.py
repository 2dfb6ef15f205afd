"""The networks: an actor (Gaussian or categorical) and a critic apart from it, over normalised observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.spaces import Shape

HIDDEN_GAIN = math.sqrt(2)
ACTOR_GAIN = 0.01  # the first policy hardly depends on what it sees, so that it explores evenly
CRITIC_GAIN = 1.0

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class ActorCritic(nn.Module):
    """Two multilayer perceptrons, and for a continuous action a log standard deviation that no state changes."""

    def __init__(self, shape: Shape, config: TorchPPOConfig, generator: torch.Generator) -> None:
        super().__init__()
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[config.activation]
        critic_sizes = config.hidden_sizes if config.value_hidden_sizes is None else config.value_hidden_sizes
        self.discrete = shape.discrete
        self.actor = _perceptron(
            shape.observations, config.hidden_sizes, shape.actions, activation, ACTOR_GAIN, generator
        )
        self.critic = _perceptron(shape.observations, critic_sizes, 1, activation, CRITIC_GAIN, generator)
        if not shape.discrete:
            self.log_std = nn.Parameter(torch.full((shape.actions,), config.log_std_init))

    def values(self, observations: Tensor) -> Tensor:
        """Return `float32[M]`, in units of the scaled reward, for normalised `observations float32[M, D]`."""
        values: Tensor = self.critic(observations).squeeze(-1)
        return values

    def evaluate(self, observations: Tensor, actions: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, both `float32[M]`, of `actions float32[M, A]` or `int64[M]`.

        `shift float32[M, A]` is added to a Gaussian's mean (RPO).
        """
        outputs = self.actor(observations)
        if self.discrete:
            return categorical(outputs, actions)
        return gaussian(outputs if shift is None else outputs + shift, self.log_std, actions)


def gaussian(mean: Tensor, log_std: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-densities and entropies `[M]` of `actions [M, A]` under independent normal distributions."""
    log_norm = log_std.sum() + actions.shape[-1] * LOG_SQRT_2PI
    logprobs = -0.5 * ((actions - mean) * torch.exp(-log_std)).square().sum(-1) - log_norm
    return logprobs, (log_norm + 0.5 * actions.shape[-1]).expand_as(logprobs)


def categorical(logits: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies `[M]` of `choices int64[M]` under the softmax of `logits [M, C]`."""
    logps = torch.log_softmax(logits, dim=-1)
    return logps.gather(-1, choices.unsqueeze(-1)).squeeze(-1), -(logps.exp() * logps).sum(-1)


def _perceptron(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: type[nn.Module],
    last_gain: float,
    generator: torch.Generator,
) -> nn.Sequential:
    """Return a perceptron with orthogonal weights and zero biases (Huang et al. 2022, "37 details", 2)."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, HIDDEN_GAIN, generator), activation()]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, last_gain, generator))


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")  # draws nothing from a global generator
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
