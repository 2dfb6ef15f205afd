"""Puts the terms of a step into Gymnasium's shape: arrays with a mask each. Knows neither physics nor rewards."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinker_atropos_humanoid.locomotion.terms import STATE_TERMS, Terms

Mask: TypeAlias = NDArray[np.bool_]


def gather(
    order: tuple[str, ...], terms: Terms, stepped: Mask | None, stated: Mask | None, count: int
) -> dict[str, Any]:
    """Return the terms in `order`, with their masks as `_name`; a term that no simulation has is left out.

    `stepped bool[N]` marks the simulations that have the terms of a step, `stated` those of a state; None: all.
    """
    masks = {
        of_state: np.ones(count, np.bool_) if mask is None else mask if mask.any() else None
        for of_state, mask in ((False, stepped), (True, stated))
    }
    infos: dict[str, Any] = {}
    for name in order:
        mask = masks[name in STATE_TERMS]
        if mask is not None and name in terms:
            infos[name] = terms[name]
            infos[f"_{name}"] = mask
    return infos


def blank(terms: Terms, rows: Mask, but: frozenset[str] = frozenset()) -> None:
    """Set terms to 0 in some simulations, in place."""
    for name, values in terms.items():
        if name not in but:
            values[rows] = 0


def only(terms: Terms, mask: Mask) -> Terms:
    """Return the (finite) terms with 0 outside of the mask."""
    column = mask[:, None]
    return {name: values * (mask if values.ndim == 1 else column) for name, values in terms.items()}


def excluding(*masks: Mask | None) -> Mask | None:
    """Return what is in none of the masks; None, which stands for all, if there are none."""
    given = [mask for mask in masks if mask is not None]
    return ~np.logical_or.reduce(given) if given else None


def without_state(terms: Terms) -> Terms:
    """Return the terms that only a step has."""
    return {name: values for name, values in terms.items() if name not in STATE_TERMS}
