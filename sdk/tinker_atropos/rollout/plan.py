"""From a configuration to what is rolled out: the environment, its tokenizer, and how its groups are sampled."""

from __future__ import annotations

import queue
import threading
from typing import Any

from tinker_atropos.config import Config
from tinker_atropos.errors import ConfigError, DataError, TinkerAtroposError
from tinker_atropos.rollout.episode import EpisodeLimits
from tinker_atropos.rollout.group import GroupPlan


def make_environment(config: Config) -> Any:
    """Return the configured environment; raises `DataError` with the cause if it can't be built."""
    try:
        return config.environment_spec.make(config.environment)
    except TinkerAtroposError:
        raise
    except Exception as error:
        raise DataError(
            f"environment {config.environment_spec.name!r} can't be made: {type(error).__name__}: {error}"
        ) from error


def check_environment_splits(environment: Any, config: Config) -> int:
    """Return how many test tasks an evaluation has; raises `DataError` if there is nothing to train on."""
    name = config.environment_spec.name
    sizes: dict[str, int | None] = {}
    for split in ("train", "test"):
        try:
            sizes[split] = environment.tasks(split)
        except TinkerAtroposError:
            raise
        except Exception as error:
            raise DataError(
                f"environment {name!r} can't load its split {split!r}: {type(error).__name__}: {error}"
            ) from error
    if sizes["train"] == 0:
        raise DataError(f"environment {name!r} has no tasks in split 'train', so there is nothing to train on")
    return config.rollout.eval_tasks if sizes["test"] is None else min(config.rollout.eval_tasks, sizes["test"])


def group_plan(config: Config, environment: Any, context: int | None, *, evaluation: bool = False) -> GroupPlan:
    """Return how groups are rolled out: what the user set, else what the environment suggests."""
    rollout = config.rollout
    suggested: int | None = getattr(environment, "max_tokens", None)
    return GroupPlan(
        sessions=config.adapter_spec.make(config.adapter),
        limits=EpisodeLimits(
            max_tokens=rollout.max_tokens if rollout.max_tokens is not None else suggested,
            max_turns=rollout.max_turns,
            context_length=context,
            context_overflow=rollout.context_overflow,
        ),
        stop=getattr(environment, "stop", config.environment_spec.stop),
        size=config.env.group_size,
        min_size=rollout.min_group_size or config.env.group_size,
        timeout=rollout.episode_timeout,
        retries=rollout.episode_retries,
        temperature=rollout.eval_temperature if evaluation else rollout.temperature,
        top_p=1.0 if evaluation else rollout.top_p,
        top_k=-1 if evaluation else rollout.top_k,
    )


def load_tokenizer(config: Config) -> Any | None:
    """Return the tokenizer that `env.tokenizer_name` names, None where it names none; raises `ConfigError`."""
    name = config.env.tokenizer_name
    return None if name is None else named_tokenizer(name)


def named_tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder or hub id, as `env.tokenizer_name` names it; raises `ConfigError`.

    A hub that does not answer counts as unreachable after 10 s.
    """
    from transformers import AutoTokenizer  # its import does not count as the hub's time

    load = AutoTokenizer.from_pretrained
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(load(name))
        except Exception as error:
            answers.put(error)

    # A thread of its own: one that hangs in a name look-up must not hold the interpreter at its end.
    threading.Thread(target=ask, daemon=True, name="tokenizer").start()
    try:
        found = answers.get(timeout=10.0)
    except queue.Empty:
        found = TimeoutError("no answer within 10 s")
    if isinstance(found, Exception):
        cause = (str(found).strip().splitlines() or [type(found).__name__])[0]
        raise ConfigError(
            f"env.tokenizer_name: {name!r} can't be loaded: {cause}; leave it out to use the model's own tokenizer, or "
            "name a local folder"
        )
    return found


def least_context(*bounds: int | None) -> int | None:
    """Return the smallest of the bounds that are known, in tokens."""
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None
