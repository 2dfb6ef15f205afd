"""Losses and gradients against NumPy references and finite differences that use no product code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker_atropos_torch_ppo.policy import categorical, gaussian
from tinker_atropos_torch_ppo.ppo import clipped_policy_loss, normalized, value_loss

CLIP = 0.2


def reference_policy_loss(logprobs, old, advantages):
    total = 0.0
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = np.exp(new - before)
        low, high = 1 - CLIP, 1 + CLIP
        inside = low if ratio < low else high if ratio > high else ratio
        total += ratio * advantage if ratio * advantage < inside * advantage else inside * advantage
    return -total / len(logprobs)


def reference_value_loss(values, old, targets, clip):
    total = 0.0
    for value, before, target in zip(values, old, targets, strict=True):
        error = (value - target) ** 2
        if clip is not None:
            moved = max(-clip, min(clip, value - before))
            error = max(error, (before + moved - target) ** 2)
        total += error
    return 0.5 * total / len(values)


def reference_gaussian(mean, log_std, actions):
    std = np.exp(log_std)
    density = np.exp(-0.5 * ((actions - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    return np.log(density).sum(1), np.full(len(mean), np.log(std * np.sqrt(2 * np.pi * np.e)).sum())


def reference_categorical(logits, choices):
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.log(chances[np.arange(len(choices)), choices]), -(chances * np.log(chances)).sum(1)


def differences(function, array, step=1e-6):
    """Return the gradient by central differences."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        up, down = array.copy(), array.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def tensor(array):
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_the_clipped_loss_and_its_gradient(rng):
    logprobs, old, advantages = rng.normal(size=(3, 40)) * [[0.3], [0.3], [1.0]]
    x = tensor(logprobs)
    loss = clipped_policy_loss(x, torch.tensor(old), torch.tensor(advantages), CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(reference_policy_loss(logprobs, old, advantages))
    expected = differences(lambda a: reference_policy_loss(a, old, advantages), logprobs)
    np.testing.assert_allclose(x.grad, expected, atol=1e-7)
    assert (expected == 0).any(), "no step was clipped, so the test shows nothing"
    assert (expected != 0).any()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_value_loss_and_its_gradient(rng, clip):
    values, old, targets = rng.normal(size=(3, 40))
    x = tensor(values)
    loss = value_loss(x, torch.tensor(old), torch.tensor(targets), clip)
    loss.backward()
    assert loss.item() == pytest.approx(reference_value_loss(values, old, targets, clip))
    expected = differences(lambda a: reference_value_loss(a, old, targets, clip), values)
    np.testing.assert_allclose(x.grad, expected, atol=1e-7)


def test_the_gaussian_and_its_gradients(rng):
    mean, actions, log_std = rng.normal(size=(6, 3)), rng.normal(size=(6, 3)), rng.normal(size=3) * 0.5
    m, s = tensor(mean), tensor(log_std)
    logprobs, entropies = gaussian(m, s, torch.tensor(actions))
    expected = reference_gaussian(mean, log_std, actions)
    np.testing.assert_allclose(logprobs.detach(), expected[0])
    np.testing.assert_allclose(entropies.detach(), expected[1])
    (logprobs.sum() + 2 * entropies.sum()).backward()
    for leaf, which in ((m, 0), (s, 1)):

        def total(array, which=which):
            found = reference_gaussian(mean if which else array, array if which else log_std, actions)
            return found[0].sum() + 2 * found[1].sum()

        np.testing.assert_allclose(leaf.grad, differences(total, [mean, log_std][which]), atol=1e-6)


def test_the_categorical_and_its_gradient(rng):
    logits, choices = rng.normal(size=(6, 4)), rng.integers(0, 4, 6)
    x = tensor(logits)
    logprobs, entropies = categorical(x, torch.tensor(choices))
    expected = reference_categorical(logits, choices)
    np.testing.assert_allclose(logprobs.detach(), expected[0])
    np.testing.assert_allclose(entropies.detach(), expected[1])
    (logprobs.sum() + 2 * entropies.sum()).backward()

    def total(array):
        found = reference_categorical(array, choices)
        return found[0].sum() + 2 * found[1].sum()

    np.testing.assert_allclose(x.grad, differences(total, logits), atol=1e-6)


def test_advantages_are_normalised_over_the_minibatch(rng):
    advantages = rng.normal(5.0, 3.0, 64)
    expected = (advantages - advantages.mean()) / advantages.std(ddof=1)
    np.testing.assert_allclose(normalized(torch.tensor(advantages)), expected, rtol=1e-6)
    assert (normalized(torch.ones(8)) == 0).all()
