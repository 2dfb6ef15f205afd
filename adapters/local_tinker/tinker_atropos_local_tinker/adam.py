"""The settings of one optimiser step, as the SDK sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.fields import number


@dataclass(frozen=True, slots=True)
class AdamParams:
    """One optimiser step's settings, named as the SDK names them; `grad_clip_norm <= 0` clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def adam_params(fields: Mapping[str, Any]) -> AdamParams:
    """Return the step's settings from the request's JSON."""
    known = {name: fields[name] for name in AdamParams.__dataclass_fields__ if name in fields}
    unknown = sorted(set(fields) - set(known) - {"type"})
    if unknown:
        raise UserError(
            f"optim_step: unknown setting {unknown[0]!r}; known: {', '.join(AdamParams.__dataclass_fields__)}"
        )
    return AdamParams(**{name: number(f"optim_step: {name}", value) for name, value in known.items()})


def check_adam(params: AdamParams) -> None:
    """Raise `UserError` where a setting is out of range."""
    for name, low, high in (
        ("learning_rate", 0.0, 1e3),
        ("beta1", 0.0, 1.0 - 1e-12),
        ("beta2", 0.0, 1.0 - 1e-12),
        ("eps", 1e-30, 1e3),
        ("weight_decay", 0.0, 1e3),
    ):
        value = getattr(params, name)
        if not low <= value <= high:
            raise UserError(f"optim_step: {name}={value} is out of range; choose {low:g} to {high:g}")
    if params.grad_clip_norm != params.grad_clip_norm:
        raise UserError("optim_step: grad_clip_norm is NaN; give a number, or 0 for no clipping")
