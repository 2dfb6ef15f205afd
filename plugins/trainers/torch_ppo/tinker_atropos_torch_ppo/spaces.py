"""What the networks must know of Gymnasium's spaces. Reads the spaces' attributes; imports no Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tinker_atropos.control import ControlSpaces
from tinker_atropos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """One task's sizes: observations of shape `observation`; `actions` numbers, or if `discrete` that many choices.

    Choices count from 0; the space's own begin at `start`. `low` and `high` bound each number of a continuous action;
    both are empty for a discrete one.
    """

    task: str
    observation: tuple[int, ...]
    actions: int
    discrete: bool
    start: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def observations(self) -> int:
        """How many numbers one observation has."""
        return math.prod(self.observation)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping; `Shape.from_dict` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Shape:
        """Return the shape of a mapping that may come from JSON."""
        lists: dict[str, Any] = {key: tuple(content[key]) for key in ("observation", "low", "high")}
        return Shape(**{**content, **lists})


def read_spaces(spaces: ControlSpaces) -> Shape:
    """Return the shape of a task with a Box observation and a Box or Discrete action; `ConfigError` for another."""
    observation, action = spaces.observation, spaces.action
    if not _is_box(observation) or not observation.shape:
        raise ConfigError(
            f"env: {spaces.task} observes {observation}; torch_ppo learns from a Box. Wrap the environment in "
            "gymnasium.wrappers.FlattenObservation"
        )
    sizes = tuple(int(size) for size in observation.shape)
    if getattr(action, "shape", None) == () and hasattr(action, "n"):
        return Shape(spaces.task, sizes, int(action.n), discrete=True, start=int(getattr(action, "start", 0)))
    if _is_box(action) and len(action.shape) == 1 and np.issubdtype(action.dtype, np.floating):
        low, high = (tuple(float(bound) for bound in side) for side in (action.low, action.high))
        return Shape(spaces.task, sizes, int(action.shape[0]), discrete=False, low=low, high=high)
    raise ConfigError(
        f"env: {spaces.task} acts in {action}; torch_ppo learns a Box of floats in one dimension, or a Discrete. Wrap "
        "the environment so that its action is one of these"
    )


def _is_box(space: Any) -> bool:
    return hasattr(space, "low") and hasattr(space, "high")
