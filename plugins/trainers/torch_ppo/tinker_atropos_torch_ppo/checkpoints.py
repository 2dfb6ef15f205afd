"""Checkpoints on disk: a folder with `state.pt`, which resumes exactly, and `policy.npz`, which acts and exports."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tinker_atropos.errors import CheckpointError
from tinker_atropos.trainer import Checkpoint

from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.inference import local_path
from tinker_atropos_torch_ppo.ppo import Learner
from tinker_atropos_torch_ppo.spaces import Shape
from tinker_atropos_torch_ppo.stored import PARTIAL, POLICY_FILE, STATE_FILE, sweep

VERSION = 1


def save(learner: Learner, name: str, folder: Path) -> Checkpoint:
    """Write a checkpoint below `folder`, whole or not at all; a name that is taken gets a number behind it."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise CheckpointError(f"checkpoint name {name!r} can't be a folder's; use letters, digits, '-' and '_'")
    buffer = io.BytesIO()
    content = {
        "version": VERSION,
        "fits": fits(learner.shape, learner.config),
        "place": _place(learner),
        "total_env_steps": learner.config.total_env_steps,
        "learner": learner.state(),
    }
    torch.save(content, buffer)
    part = folder / f".{name}{PARTIAL}"
    try:
        sweep(folder)
        part.mkdir(parents=True)
        _write(part / STATE_FILE, buffer.getvalue())
        _write(part / POLICY_FILE, learner.snapshot().to_bytes())
        _sync(part)
        place = _free_place(folder, name)
        part.rename(place)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {name} can't be written to {folder}: {error.strerror or error}; free space, then continue "
            "with --resume"
        ) from error
    place = place.resolve()
    return Checkpoint(name, learner.step, (place / STATE_FILE).as_uri(), (place / POLICY_FILE).as_uri())


def load(learner: Learner, checkpoint: Checkpoint) -> list[str]:
    """Put a checkpoint's state into a learner; `CheckpointError` if it is missing, damaged or of another task.

    Return what makes the run go on otherwise than it would have without a break, as lines to say.
    """
    path = local_path(checkpoint.state)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        version, kept, state = content["version"], content["fits"], content["learner"]
        place = content["place"]
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.state} can't be read: {error.strerror or error}; resume from another"
        ) from error
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, zipfile's and more for damaged content
        raise CheckpointError(f"checkpoint {checkpoint.state} is damaged ({error}); resume from another") from error
    if version != VERSION:
        raise CheckpointError(f"checkpoint {checkpoint.state} has version {version}, this program reads {VERSION}")
    here = fits(learner.shape, learner.config)
    differences = [f"{key} is {kept.get(key)}, here {here[key]}" for key in here if kept.get(key) != here[key]]
    if differences:
        raise CheckpointError(
            f"checkpoint {checkpoint.state} is of another task or network ({'; '.join(differences)}); resume with the "
            "environment and the torch_ppo section that it was made with"
        )
    learner.load(state)
    if learner.step != checkpoint.step:
        raise CheckpointError(
            f"checkpoint {checkpoint.state} holds step {learner.step}, its manifest says {checkpoint.step}; resume "
            "from another"
        )
    now, said = _place(learner), []
    if place != now:
        said.append(
            f"the checkpoint was made with {place}, now it is {now}: the curve may differ in the last digits from one "
            "without a break"
        )
    return said + _other_length(learner, content.get("total_env_steps"))  # older ones don't have it


def _other_length(learner: Learner, before: int | None) -> list[str]:
    """Return a line on the jump of an annealed learning rate where the run's length changed."""
    config, done = learner.config, learner.env_steps
    now = config.total_env_steps
    if not config.anneal or before is None or now is None or before == now:
        return []
    old, new = (config.learning_rate * max(0.0, 1 - done / total) for total in (before, now))
    return [
        f"total_env_steps was {before:,} and is {now:,}, so the annealed learning rate jumps from {old:.2g} to "
        f"{new:.2g} here: the curve is not that of one run of this length"
    ]


def fits(shape: Shape, config: TorchPPOConfig) -> dict[str, Any]:
    """Return what a state must agree on with the learner that loads it."""
    critic = config.hidden_sizes if config.value_hidden_sizes is None else config.value_hidden_sizes
    return {
        "task": shape.task,
        "observations": list(shape.observation),
        "action": ("discrete" if shape.discrete else "continuous") + f"[{shape.actions}]",
        "bounds": [shape.start] if shape.discrete else [list(shape.low), list(shape.high)],
        "hidden_sizes": list(config.hidden_sizes),
        "value_hidden_sizes": list(critic),
        "activation": config.activation,
        "normalize_observations": config.normalize_observations,
        "normalize_returns": config.normalize_returns,
    }


def _place(learner: Learner) -> str:
    return f"{learner.config.threads} torch threads on {learner.device.type}, torch {torch.__version__}"


def _free_place(folder: Path, name: str) -> Path:
    place, number = folder / name, 1
    while place.exists():
        number += 1
        place = folder / f"{name}-{number}"
    return place


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
