"""A picture sheet of one episode under a control policy: how it went on the whole, and how it moves."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tinker_atropos.control import ControlPolicy
from tinker_atropos.errors import RunError
from tinker_atropos.rollout.fragments import Actor
from tinker_atropos.rollout.simulations import Shape, ShardArrays, Simulations

MOST_STEPS = 10_000  # of the episode
COLUMNS, PICTURES = 5, 10  # of each part: the whole episode, and a moment of it
WIDTH, GAP, TITLE = 300, 4, 30  # pixels
MOVING_PICTURES_PER_SECOND = 15  # a stride of a walk takes one second at most
USUAL_FPS = 30


def can_render(config: Any) -> bool:
    """Whether an environment's configuration can ask for frames."""
    return "render_mode" in type(config).model_fields


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
    """Return a PNG of one episode of one simulation, in reading order; each picture says its step. Blocking.

    Two rows are spread evenly over the episode; two more follow each other closely from its middle on. The episode is
    played twice with one seed, as its length is not known before its end. Raises whatever rendering raises, and
    `RunError` if it gives no frames.
    """
    arrays = ShardArrays.made(shape)
    simulations = Simulations(environment, name, arrays)
    chosen, logprobs = np.zeros_like(arrays.actions), np.zeros(1, np.float32)

    def play(see: Callable[[int], None]) -> tuple[int, float]:
        """Play it, calling `see(step)` before each; return its length and its return."""
        simulations.reset(seed)
        total = 0.0
        for step in range(MOST_STEPS):
            see(step)
            actor.choose(policy, arrays.observations, None, chosen, logprobs)
            actor.to_space(chosen, arrays.actions)
            simulations.step()
            total += float(arrays.rewards[0])
            if stop.is_set() or (arrays.terminated | arrays.truncated).any():
                return step + 1, total
        return MOST_STEPS, total

    def see(step: int) -> None:
        if step in wanted:
            frames[step] = _frame(environment, name)

    length, total = play(lambda step: None)
    evenly, closely = _steps(length, environment.metadata.get("render_fps") or USUAL_FPS)
    wanted, frames = {*evenly, *closely}, {0: None}
    play(see)
    parts = [[(step, frames[step]) for step in part if frames.get(step) is not None] for part in (evenly, closely)]
    title = f"{name}, policy of step {policy.ref.step}: an episode of {length:,} steps, return {total:,.1f}"
    return _sheet(title, [part for part in parts if part])


def _steps(length: int, fps: float) -> tuple[list[int], list[int]]:
    """Return the steps to show of the whole episode, and those of a moment; the second are none if all are shown."""
    evenly = np.unique(np.linspace(0, length - 1, PICTURES).round().astype(int)).tolist()
    if len(evenly) == length:
        return evenly, []
    every = min(max(1, round(fps / MOVING_PICTURES_PER_SECOND)), max(1, length // PICTURES))
    first = max(0, min(length // 2, length - 1 - every * (PICTURES - 1)))
    return evenly, list(range(first, length, every))[:PICTURES]


def _frame(environment: Any, name: str) -> Any:
    frames: Any = environment.render()
    frame = frames[0] if isinstance(frames, tuple | list) and frames else frames
    if not isinstance(frame, np.ndarray):
        raise RunError(f"render() of environment {name!r} gave {type(frame).__name__}, expected frames uint8[H, W, 3]")
    return frame if frame.ndim == 3 else frame[0]


def _sheet(title: str, parts: list[list[tuple[int, Any]]]) -> bytes:
    from PIL import Image, ImageDraw, ImageFont

    rows = [part[start : start + COLUMNS] for part in parts for start in range(0, len(part), COLUMNS)]
    example = rows[0][0][1]
    height = round(WIDTH * example.shape[0] / example.shape[1])
    size = (COLUMNS * (WIDTH + GAP) - GAP, TITLE + len(rows) * (height + GAP) - GAP)
    sheet = Image.new("RGB", size, "lightgray")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, "black", ImageFont.load_default(18))
    for row, pictures in enumerate(rows):
        for column, (step, frame) in enumerate(pictures):
            x, y = column * (WIDTH + GAP), TITLE + row * (height + GAP)
            picture = Image.fromarray(np.asarray(frame, np.uint8)).convert("RGB").resize((WIDTH, height))
            sheet.paste(picture, (x, y))
            label = (x + GAP, y + GAP)
            draw.rectangle(draw.textbbox(label, f" {step:,} ", ImageFont.load_default(16)), "white")
            draw.text(label, f" {step:,} ", "black", ImageFont.load_default(16))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    return content.getvalue()
