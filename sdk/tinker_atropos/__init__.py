"""Joins reinforcement-learning environments to trainers, so that changing either one is a line of configuration."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use: the command line imports this package, and `--help` must not wait for NumPy or pydantic.
_HOME = {
    "AdapterConfig": "adapter",
    "AdapterSpec": "adapter",
    "Prompt": "adapter",
    "SessionFactory": "adapter",
    "TextSession": "adapter",
    "Transcript": "adapter",
    "Episode": "environment",
    "EnvironmentConfig": "environment",
    "EnvironmentSpec": "environment",
    "SingleTurnConfig": "environment",
    "Step": "environment",
    "Task": "environment",
    "TextEnvironment": "environment",
    "single_turn": "environment",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ContextOverflow": "errors",
    "DataError": "errors",
    "EpisodesFailed": "errors",
    "FilteredOut": "errors",
    "MissingCredentials": "errors",
    "PluginError": "errors",
    "PolicyUnavailable": "errors",
    "RunError": "errors",
    "TinkerAtroposError": "errors",
    "TrainerError": "errors",
    "TransientError": "errors",
    "UpdateUncertain": "errors",
    "UserError": "errors",
    "hookimpl": "hookspecs",
    "load_environment": "registry",
    "load_trainer": "registry",
    "Checkpoint": "trainer",
    "Quote": "trainer",
    "RunSpec": "trainer",
    "TextPolicy": "trainer",
    "Trainer": "trainer",
    "TrainerConfig": "trainer",
    "TrainerSpec": "trainer",
    "Update": "trainer",
    "Batch": "trajectory",
    "Completion": "trajectory",
    "Group": "trajectory",
    "Message": "trajectory",
    "PolicyRef": "trajectory",
    "Sample": "trajectory",
    "SamplingParams": "trajectory",
    "Segment": "trajectory",
    "Stop": "trajectory",
    "TaskRef": "trajectory",
    "Trajectory": "trajectory",
}

__all__ = [
    "AdapterConfig",
    "AdapterSpec",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextOverflow",
    "DataError",
    "EnvironmentConfig",
    "EnvironmentSpec",
    "Episode",
    "EpisodesFailed",
    "FilteredOut",
    "Group",
    "Message",
    "MissingCredentials",
    "PluginError",
    "PolicyRef",
    "PolicyUnavailable",
    "Prompt",
    "Quote",
    "RunError",
    "RunSpec",
    "Sample",
    "SamplingParams",
    "Segment",
    "SessionFactory",
    "SingleTurnConfig",
    "Step",
    "Stop",
    "Task",
    "TaskRef",
    "TextEnvironment",
    "TextPolicy",
    "TextSession",
    "TinkerAtroposError",
    "Trainer",
    "TrainerConfig",
    "TrainerError",
    "TrainerSpec",
    "Trajectory",
    "Transcript",
    "TransientError",
    "Update",
    "UpdateUncertain",
    "UserError",
    "__version__",
    "hookimpl",
    "load_environment",
    "load_trainer",
    "single_turn",
]

if TYPE_CHECKING:
    from tinker_atropos.adapter import AdapterConfig, AdapterSpec, Prompt, SessionFactory, TextSession, Transcript
    from tinker_atropos.environment import (
        EnvironmentConfig,
        EnvironmentSpec,
        Episode,
        SingleTurnConfig,
        Step,
        Task,
        TextEnvironment,
        single_turn,
    )
    from tinker_atropos.errors import (
        CheckpointError,
        ConfigError,
        ContextOverflow,
        DataError,
        EpisodesFailed,
        FilteredOut,
        MissingCredentials,
        PluginError,
        PolicyUnavailable,
        RunError,
        TinkerAtroposError,
        TrainerError,
        TransientError,
        UpdateUncertain,
        UserError,
    )
    from tinker_atropos.hookspecs import hookimpl
    from tinker_atropos.registry import load_environment, load_trainer
    from tinker_atropos.trainer import (
        Checkpoint,
        Quote,
        RunSpec,
        TextPolicy,
        Trainer,
        TrainerConfig,
        TrainerSpec,
        Update,
    )
    from tinker_atropos.trajectory import (
        Batch,
        Completion,
        Group,
        Message,
        PolicyRef,
        Sample,
        SamplingParams,
        Segment,
        Stop,
        TaskRef,
        Trajectory,
    )


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tinker_atropos.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tinker_atropos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
