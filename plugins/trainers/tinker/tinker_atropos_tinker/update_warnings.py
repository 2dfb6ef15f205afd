"""What an update should warn of, from its metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping

RATIO_LIMIT = 20.0
"""An importance ratio that says: some token has become 20 times as likely since it was sampled."""

RATIO_QUIET_STEPS = 5
"""Steps without a second warning of large ratios."""


def mismatch_warning(step: int, metrics: Mapping[str, float], limit: float) -> str | None:
    """Return what to say where sampler and trainer disagree by more than `limit` nats a token, on average."""
    mismatch = metrics.get("train/logprob_mismatch_mean", 0.0)
    if mismatch <= limit:
        return None
    return (
        f"step {step}: sampler and trainer disagree by {mismatch:.3g} nats a token on average (at most "
        f"{metrics['train/logprob_mismatch_max']:.3g}), over tinker.logprob_mismatch_warning={limit:g}; the updates "
        "are biased by that much"
    )


def ratio_warning(step: int, metrics: Mapping[str, float], rate: float, *, stale: bool) -> str | None:
    """Return what to say where the policy has moved so far from stale samples that single tokens rule the update.

    Samples of the policy itself have ratios of 1 but for the engines' arithmetic, which is `mismatch_warning`'s.
    """
    ratio = metrics["train/ratio_max"]
    if not stale or ratio <= RATIO_LIMIT:
        return None
    norm = metrics.get("train/grad_norm")
    beside = "" if norm is None else f", with a gradient norm of {norm:.3g}"
    return (
        f"step {step}: the importance ratio reached {ratio:.3g}{beside}, on samples of an older policy; the loss "
        "importance_sampling does not clip it, so a few tokens rule the update and the run may un-learn. "
        f"rollout.max_staleness=0 or a lower tinker.learning_rate (now {rate:g}) prevents it"
    )
