"""PPO: what one update does with a batch, from top to bottom. Knows no files, no event loop and no simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker_atropos.control import ControlBatch, Fragment
from tinker_atropos.errors import TrainerError
from tinker_atropos.trajectory import FloatArray
from torch import Tensor, nn

from tinker_atropos_torch_ppo.advantages import following_values, gae, vtrace
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.fragments import check_batch
from tinker_atropos_torch_ppo.inference import Snapshot
from tinker_atropos_torch_ppo.normalization import OBSERVATION_CLIP, Moments, RewardScale
from tinker_atropos_torch_ppo.policy import ActorCritic
from tinker_atropos_torch_ppo.spaces import Shape

ADAM_EPSILON = 1e-5
ADVANTAGE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """M steps ready to be learned from, on the learner's device: normalised `observations [M, D]`, all others `[M]`.

    `logprobs` are those of the policy that acted, `values` the critic's before the update.
    """

    observations: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.logprobs)

    def minibatches(self, order: Tensor, count: int) -> Iterator[Steps]:
        """Yield all steps in `order int64[M]`, cut into `count` parts."""
        columns = (getattr(self, name)[order].tensor_split(count) for name in self.__slots__)
        for parts in zip(*columns, strict=True):
            yield Steps(*parts)


class Learner:
    """Weights, optimiser, statistics, counters and random numbers of one run. One thread at a time.

    Everything random comes from its own generator on the CPU, so the same seed, batches and number of threads give the
    same weights.
    """

    def __init__(self, shape: Shape, config: TorchPPOConfig, seed: int, device: torch.device) -> None:
        self.shape, self.config, self.device = shape, config, device
        self.generator = torch.Generator().manual_seed(seed)
        self.model = ActorCritic(shape, config, self.generator).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.learning_rate, eps=ADAM_EPSILON, fused=True)
        self.observations = Moments.zero(shape.observations)
        self.rewards = RewardScale(config.gamma)
        self.step = 0
        self.env_steps = 0

    def check(self, batch: ControlBatch) -> None:
        """Raise `TrainerError` for a batch that can't be learned from."""
        check_batch(batch, self.shape, self.step, self.config.minibatches)

    def update(self, batch: ControlBatch) -> dict[str, float]:
        """Learn from a batch that `check` has passed; return the metrics.

        Raises `TrainerError` for a loss or gradient that is not finite, with the weights of the minibatch before.
        """
        began = time.perf_counter()
        self._merge_first(batch)
        steps = self._prepare(batch)
        prepared = time.perf_counter()
        rate = self._set_learning_rate()
        metrics = self._optimize(steps)
        optimized = time.perf_counter()
        self._merge_observations(batch)
        self.step += 1
        self.env_steps += len(steps)
        metrics["learning_rate"] = rate
        metrics["explained_variance"] = _explained_variance(steps)
        metrics["policy/std"] = self._deviation()
        metrics["time/advantages"] = prepared - began
        metrics["time/optimization"] = optimized - prepared
        return metrics

    def snapshot(self) -> Snapshot:
        """Return the actor as it is now, with the statistics that it acts under."""
        mean, scale, clip = self._normalizer()
        linear = [layer for layer in self.model.actor if isinstance(layer, nn.Linear)]
        return Snapshot(
            shape=self.shape,
            mean=mean,
            scale=scale,
            clip=clip,
            weights=tuple(np.ascontiguousarray(_numpy(layer.weight).T) for layer in linear),
            biases=tuple(_numpy(layer.bias) for layer in linear),
            activation=self.config.activation,
            log_std=None if self.shape.discrete else _numpy(self.model.log_std),
        )

    def state(self) -> dict[str, Any]:
        """Return all that the next update depends on, as tensors, numbers and strings; `load` is its inverse."""
        moments = {"observations": self.observations, "rewards": self.rewards.moments}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "moments": {
                name: {"mean": torch.from_numpy(m.mean), "variance": torch.from_numpy(m.variance), "count": m.count}
                for name, m in moments.items()
            },
            "returns": [torch.from_numpy(running) for running in self.rewards.carried],
            "generator": self.generator.get_state(),
            "step": self.step,
            "env_steps": self.env_steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken; raises whatever torch does if it is of another model."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        observations, rewards = (
            Moments(m["mean"].numpy().copy(), m["variance"].numpy().copy(), int(m["count"]))
            for m in (state["moments"]["observations"], state["moments"]["rewards"])
        )
        self.observations = observations
        self.rewards = RewardScale(self.config.gamma, rewards, [run.numpy().copy() for run in state["returns"]])
        self.generator.set_state(state["generator"])
        self.step, self.env_steps = int(state["step"]), int(state["env_steps"])

    # One update, in the order of what happens.

    def _merge_first(self, batch: ControlBatch) -> None:
        """Take the statistics of returns, and of the very first batch's observations, before learning from them.

        The first policy acted without statistics. Its output hardly depends on its input (see `ACTOR_GAIN`), so its
        log-probabilities hold under those of its own batch, and the networks never learn from raw numbers.
        """
        if self.config.normalize_returns:
            for fragment in batch.fragments:
                ends = fragment.terminated | fragment.truncated
                self.rewards.merge(fragment.shard, fragment.rewards, ends, fragment.fresh)
        if self.step == 0:
            self._merge_observations(batch)

    def _prepare(self, batch: ControlBatch) -> Steps:
        prepared = [self._prepare_fragment(fragment) for fragment in batch.fragments]
        if len(prepared) == 1:
            return prepared[0]
        return Steps(*(torch.cat([getattr(steps, name) for steps in prepared]) for name in Steps.__slots__))

    @torch.no_grad()
    def _prepare_fragment(self, fragment: Fragment) -> Steps:
        observations = self._normalize(fragment.observations)
        values = _numpy(self.model.values(observations))
        ends = fragment.terminated | fragment.truncated
        finals = _numpy(self.model.values(self._normalize(fragment.finals))) if ends.any() else np.zeros(0)
        rewards = self.rewards.apply(fragment.rewards) if self.config.normalize_returns else fragment.rewards
        following = following_values(values, finals, fragment.terminated, fragment.truncated)
        observations = observations[:-1].flatten(0, 1)
        actions = torch.as_tensor(fragment.actions, device=self.device).flatten(0, 1)
        logprobs = torch.as_tensor(fragment.logprobs, device=self.device).flatten()
        gamma, lam = self.config.gamma, self.config.gae_lambda
        if self.config.schedule == "async" and self.config.correction == "vtrace":
            now, _ = self.model.evaluate(observations, actions)
            ratios = _numpy(torch.exp(now - logprobs)).reshape(rewards.shape)
            estimate = vtrace(rewards, values[:-1], following, ends, ratios, gamma, lam)
        else:
            estimate = gae(rewards, values[:-1], following, ends, gamma, lam)
        advantages, targets, before = (
            torch.as_tensor(array, device=self.device).flatten()
            for array in (estimate.advantages, estimate.targets, values[:-1])
        )
        return Steps(observations, actions, logprobs, before, advantages, targets)

    def _optimize(self, steps: Steps) -> dict[str, float]:
        """Take the optimiser steps of all passes; return the mean metrics of their minibatches."""
        config = self.config
        rows: list[Tensor] = []
        passes = 0
        for _ in range(config.epochs):
            order = torch.randperm(len(steps), generator=self.generator).to(self.device)
            rows += [self._step(batch) for batch in steps.minibatches(order, config.minibatches)]
            passes += 1
            kl = float(torch.stack(rows[-config.minibatches :])[:, KL].mean())
            if config.target_kl is not None and kl > config.target_kl:
                break
        means = torch.stack(rows).mean(0).tolist()
        return {**dict(zip(METRICS, means, strict=True)), "epochs": float(passes)}

    def _step(self, batch: Steps) -> Tensor:
        """Take one optimiser step; return `float32[len(METRICS)]`."""
        config = self.config
        shift = self._shift(batch.actions)
        logprobs, entropies = self.model.evaluate(batch.observations, batch.actions, shift)
        with torch.no_grad():  # how far the policy itself went, which RPO's random shift of its mean would drown
            unshifted = logprobs if shift is None else self.model.evaluate(batch.observations, batch.actions)[0]
        values = self.model.values(batch.observations)
        advantages = normalized(batch.advantages)
        policy_loss = clipped_policy_loss(logprobs, batch.logprobs, advantages, config.clip_range)
        critic_loss = value_loss(values, batch.values, batch.targets, config.value_clip)
        entropy = entropies.mean()
        loss = policy_loss + config.value_coefficient * critic_loss - config.entropy_coefficient * entropy

        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm or math.inf)
        self._refuse_broken(float(loss.detach()), float(norm))
        self.optimizer.step()
        with torch.no_grad():
            log_ratio = unshifted - batch.logprobs
            ratio = log_ratio.exp()
            kl = (ratio - 1 - log_ratio).mean()  # Schulman 2020, "Approximating KL Divergence", k3
            clipped = ((ratio - 1).abs() > config.clip_range).float().mean()
            return torch.stack([policy_loss, critic_loss, loss, entropy, kl, clipped, norm])

    # Parts of the above.

    def _normalizer(self) -> tuple[FloatArray, FloatArray, float]:
        width = self.shape.observations
        if not self.config.normalize_observations:
            return np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32), math.inf
        mean, scale = self.observations.mean, self.observations.scale()
        return mean.astype(np.float32), scale.astype(np.float32), OBSERVATION_CLIP

    def _normalize(self, observations: FloatArray) -> Tensor:
        mean, scale, clip = self._normalizer()
        raw = torch.as_tensor(observations, device=self.device).flatten(-len(self.shape.observation))
        normal = (raw - torch.as_tensor(mean, device=self.device)) * torch.as_tensor(scale, device=self.device)
        return normal.clamp_(-clip, clip)

    def _merge_observations(self, batch: ControlBatch) -> None:
        if self.config.normalize_observations and not (self.step == 0 and self.observations.count):
            for fragment in batch.fragments:
                self.observations.merge(fragment.observations[:-1].reshape(-1, self.shape.observations))

    def _set_learning_rate(self) -> float:
        rate, total = self.config.learning_rate, self.config.total_env_steps
        if self.config.anneal and total is not None:
            rate *= max(0.0, 1.0 - self.env_steps / total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _shift(self, actions: Tensor) -> Tensor | None:
        """Return RPO's shift of the mean (Rahman and Xue 2022, arXiv 2212.07536), None where it is off."""
        if self.config.rpo_alpha == 0 or self.shape.discrete:
            return None
        unit = torch.rand(actions.shape, generator=self.generator).to(self.device)
        return (2 * unit - 1) * self.config.rpo_alpha

    def _deviation(self) -> float:
        return 0.0 if self.shape.discrete else float(self.model.log_std.detach().exp().mean())

    def _refuse_broken(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainerError(
                f"step {self.step}: the loss is {loss} and the gradient's norm {norm}, so the weights after it would "
                f"be useless; lower torch_ppo.learning_rate (now {self.config.learning_rate:g}) or set "
                "torch_ppo.max_grad_norm=0.5, then continue with --resume"
            )


METRICS = ("loss/policy", "loss/value", "loss/total", "entropy", "kl", "clip_fraction", "grad_norm")
KL = METRICS.index("kl")


def normalized(advantages: Tensor) -> Tensor:
    """Return them with mean 0 and deviation 1, over the minibatch."""
    return (advantages - advantages.mean()) / (advantages.std() + ADVANTAGE_EPSILON)


def clipped_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Return PPO's loss, all `[M]` (Schulman et al. 2017, arXiv 1707.06347, equation 7).

    `-mean(min(r * A, clip(r, 1 - c, 1 + c) * A))` with `r = exp(logprobs - old_logprobs)`.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Return half the mean squared error, all `[M]`; with `clip` the larger error of the value and of the clipped one.

    The clipped value moves by `clip` at most from the one before the update (Huang et al. 2022, "37 details", 9).
    """
    errors = (values - targets).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.max(errors, (near - targets).square())
    return 0.5 * errors.mean()


def _explained_variance(steps: Steps) -> float:
    """Return how much of the targets' variance the critic foresaw before the update: 1 all, 0 none."""
    variance = float(steps.targets.var(correction=0))
    return 1 - float((steps.targets - steps.values).var(correction=0)) / variance if variance > 0 else 0.0


def _numpy(tensor: Tensor) -> FloatArray:
    """Return a copy that no later optimiser step changes."""
    return np.array(tensor.detach().cpu().numpy(), dtype=np.float32)
