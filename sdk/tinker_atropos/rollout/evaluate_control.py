"""Evaluation of a control policy: whole episodes with the mode action, and a picture sheet of one of them."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinker_atropos.control import ControlPolicy
from tinker_atropos.errors import RunError
from tinker_atropos.rollout.fragments import Actor
from tinker_atropos.rollout.simulations import SOUND, Shape, ShardArrays, Simulations

MOST_STEPS = 1_000_000  # of one evaluation: an environment whose episodes never end must not hang a run
PICTURES, COLUMNS, WIDTH = 20, 5, 240


@dataclass(frozen=True, slots=True)
class ControlEvaluation:
    """The episodes of an evaluation, as (return, length), in the order of their simulations."""

    episodes: tuple[tuple[float, int], ...]

    def metrics(self) -> dict[str, float]:
        """Return mean and spread (the standard deviation over episodes) of the return, and the mean length."""
        returns = [total for total, _ in self.episodes]
        return {
            "eval/return": float(np.mean(returns)),
            "eval/return_std": float(np.std(returns)),
            "eval/length": float(np.mean([length for _, length in self.episodes])),
            "eval/episodes": float(len(self.episodes)),
        }


def evaluate_control(
    environment: Any,
    name: str,
    policy: ControlPolicy,
    actor: Actor,
    shape: Shape,
    *,
    episodes: int,
    seed: int,
    stop: threading.Event,
) -> ControlEvaluation | None:
    """Play `episodes` whole episodes with the mode action; None if `stop` was set before they ended.

    Each simulation plays its share of them: taking whichever ends first would prefer short ones. Blocking.
    """
    n = shape.num_envs
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    arrays = ShardArrays.made(shape)
    simulations = Simulations(environment, name, arrays)
    chosen, logprobs = np.zeros_like(arrays.actions), np.zeros(n, np.float32)
    returns, lengths = np.zeros(n), np.zeros(n, np.int64)
    played: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    simulations.reset(seed)
    for _ in range(MOST_STEPS // n):
        if stop.is_set():
            return None
        if actor.choose(policy, arrays.observations, None, chosen, logprobs) is not None:
            raise RunError(f"the policy of step {policy.ref.step} gave NaN actions in an evaluation")
        actor.to_space(chosen, arrays.actions)
        simulations.step()
        returns += arrays.rewards
        lengths += 1
        ended = arrays.terminated | arrays.truncated
        if not ended.any():
            continue
        for i in np.flatnonzero(ended & (arrays.causes == SOUND)):  # one cut off by a NaN is played again
            if len(played[i]) < share[i]:
                played[i].append((float(returns[i]), int(lengths[i])))
        returns[ended], lengths[ended] = 0.0, 0
        if all(len(done) == wanted for done, wanted in zip(played, share, strict=True)):
            return ControlEvaluation(tuple(episode for done in played for episode in done))
    raise RunError(
        f"environment {name!r}: {episodes} evaluation episodes did not end within {MOST_STEPS:,} steps; give it a time "
        "limit, or turn evaluations off with env.steps_per_eval=0"
    )


def picture_sheet(
    environment: Any,
    name: str,
    policy: ControlPolicy,
    actor: Actor,
    shape: Shape,
    *,
    seed: int,
    stop: threading.Event,
) -> bytes:
    """Return a PNG of pictures spread evenly over one episode of one simulation, in reading order. Blocking.

    Raises whatever rendering raises, and `RunError` if it gives no frames.
    """
    arrays = ShardArrays.made(shape)
    simulations = Simulations(environment, name, arrays)
    chosen, logprobs = np.zeros_like(arrays.actions), np.zeros(1, np.float32)
    simulations.reset(seed)
    frames, every = [_frame(environment, name)], 1
    for step in range(1, MOST_STEPS):
        actor.choose(policy, arrays.observations, None, chosen, logprobs)
        actor.to_space(chosen, arrays.actions)
        simulations.step()
        if stop.is_set() or (arrays.terminated | arrays.truncated).any():
            break
        if step % every == 0:
            frames.append(_frame(environment, name))
            if len(frames) == 2 * PICTURES:  # an episode's length is not known before its end
                frames, every = frames[::2], every * 2
    places = np.unique(np.linspace(0, len(frames) - 1, PICTURES).round().astype(int))
    return _sheet([frames[place] for place in places])


def can_render(config: Any) -> bool:
    """Whether an environment's configuration can ask for frames."""
    return "render_mode" in type(config).model_fields


def _frame(environment: Any, name: str) -> Any:
    frames: Any = environment.render()
    frame = frames[0] if isinstance(frames, tuple | list) and frames else frames
    if not isinstance(frame, np.ndarray):
        raise RunError(f"render() of environment {name!r} gave {type(frame).__name__}, expected frames uint8[H, W, 3]")
    return frame if frame.ndim == 3 else frame[0]


def _sheet(frames: list[Any]) -> bytes:
    from PIL import Image

    height = round(WIDTH * frames[0].shape[0] / frames[0].shape[1])
    rows = -(-len(frames) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * WIDTH, rows * height), "white")
    for place, frame in enumerate(frames):
        picture = Image.fromarray(np.asarray(frame, np.uint8)).convert("RGB").resize((WIDTH, height))
        sheet.paste(picture, (place % COLUMNS * WIDTH, place // COLUMNS * height))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    return content.getvalue()
