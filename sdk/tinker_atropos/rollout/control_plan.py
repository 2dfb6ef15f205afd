"""From a configuration to a control run's sizes and length; what of the configuration means nothing to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinker_atropos.errors import ConfigError, PluginError
from tinker_atropos.layers import RUN_CONFIG, Given
from tinker_atropos.registry import normal
from tinker_atropos.rollout.control import Pace

if TYPE_CHECKING:
    from tinker_atropos.config import Config
    from tinker_atropos.rollout.shards import Workers

FOR_TEXT = {
    "env": "group_size batch_size max_token_length max_num_workers ensure_scores_are_not_same tokenizer_name",
    "openai": "model_name num_requests_for_eval base_url api_key weight server_type",
    "rollout": (
        "adapter max_filtered_groups max_failed_groups max_tokens max_turns temperature top_p top_k episode_timeout "
        "episode_retries min_group_size context_overflow eval_tasks eval_temperature show_every"
    ),
    "run": "previews state",
}
FOR_CONTROL = {"env": "shards", "rollout": "workers eval_episodes max_broken_episodes"}
# What our own rollout of episodes reads, and an environment that drives itself decides alone.
FOR_EPISODES = {
    "env": "tokenizer_name",
    "openai": "num_requests_for_eval",
    "rollout": (
        "max_tokens max_turns temperature top_p top_k episode_timeout episode_retries min_group_size context_overflow "
        "eval_tasks eval_temperature"
    ),
    "run": "previews",
}


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """The sizes of a control run. `steps` T of each of `num_envs` N simulations are one update's batch."""

    num_envs: int
    shards: int
    workers: Workers
    steps: int
    schedule: str
    max_staleness: int
    total_updates: int

    @property
    def batch_steps(self) -> int:
        """Environment steps of one update: T times N."""
        return self.steps * self.num_envs

    @property
    def envs_per_shard(self) -> int:
        """Simulations of one shard."""
        return self.num_envs // self.shards

    @property
    def pace(self) -> Pace:
        """How far and how much to collect."""
        return Pace(self.steps, self.batch_steps, self.total_updates, self.max_staleness)


def is_control(config: Config) -> bool:
    """Whether a configuration is that of a control run."""
    return bool(config.environment_spec.kind == "control")


def control_plan(config: Config) -> ControlPlan:
    """Return the sizes; raises `ConfigError` for shards that don't divide, `PluginError` for plugins without a size."""
    num_envs, steps, schedule = _sizes(config)
    shards = config.env.shards
    if num_envs % shards:
        fitting = ", ".join(str(n) for n in range(1, num_envs + 1) if num_envs % n == 0)
        raise ConfigError(
            f"env.shards: {shards} equal shards can't be made of env.num_envs={num_envs} simulations; use one of "
            f"{fitting}"
        )
    return ControlPlan(
        num_envs=num_envs,
        shards=shards,
        workers=config.rollout.workers or ("inline" if shards == 1 else "thread"),
        steps=steps,
        schedule=schedule,
        max_staleness=0 if schedule == "sync" else config.max_staleness,
        total_updates=config.env.total_steps,
    )


def settle_length(config: Config, written: Mapping[str, Given]) -> Config:
    """Return the configuration with both lengths set, `env.total_steps` and the trainer's `total_env_steps`.

    The one that the user wrote decides (the command line goes before a file); else the trainer's default, if it has
    one. Raises `ConfigError` where one source gives both, unless they say the same.
    """
    section = normal(config.trainer_spec.name)
    by_updates, by_steps = "env.total_steps", f"{section}.total_env_steps"
    num_envs, steps, _ = _sizes(config)
    batch = num_envs * steps
    asked, updates = config.trainer.total_env_steps, config.env.total_steps
    of = {path: _rank(written.get(path)) for path in (by_updates, by_steps)}
    same = asked is not None and -(-asked // batch) == updates
    if asked is not None and of[by_updates] == of[by_steps] > 0 and not same:
        origins = [written[path].origin for path in (by_updates, by_steps)]
        raise ConfigError(
            f"{by_updates}={updates} ({origins[0]}) and {by_steps}={asked} ({origins[1]}) both say where the run ends; "
            f"keep one (an update learns from {batch} environment steps)"
        )
    origins_now = dict(config.origins)
    if asked is None or of[by_updates] > of[by_steps]:
        # The trainer is told too: schedules that end with the run need its length.
        trainer = config.trainer.model_copy(update={"total_env_steps": updates * batch})
        origins_now[by_steps] = f"from {by_updates}"
        return replace(config, trainer=trainer, origins=origins_now)
    if not same:
        origins_now[by_updates] = f"from {by_steps}"
    return replace(config, env=config.env.model_copy(update={"total_steps": -(-asked // batch)}), origins=origins_now)


def idle_keys(config: Config) -> dict[str, str]:
    """Return the keys that have no effect because of the environment's kind, with the reason."""
    control = is_control(config)
    reason = "there are no groups and no tokens in control" if control else "the environment is no control environment"
    idle = {
        f"{section}.{key}": reason
        for section, keys in (FOR_TEXT if control else FOR_CONTROL).items()
        for key in keys.split()
    }
    if config.environment_spec.kind == "external":
        idle |= {
            f"{section}.{key}": "the environment drives itself"
            for section, keys in FOR_EPISODES.items()
            for key in keys.split()
        }
    if control and getattr(config.trainer, "schedule", "sync") == "sync":
        section = normal(config.trainer_spec.name)
        idle["env.max_batches_offpolicy"] = idle["rollout.max_staleness"] = (
            f"{section}.schedule is sync, so every step is of the newest policy"
        )
    if control and not config.env.steps_per_eval:
        idle["rollout.eval_episodes"] = "env.steps_per_eval is 0, so nothing is evaluated"
    return idle


def with_envs(config: Any, num_envs: int, **changes: Any) -> Any:
    """Return an environment's configuration for another number of simulations."""
    return config.model_copy(update={"num_envs": num_envs, **changes})


def _sizes(config: Config) -> tuple[int, int, str]:
    environment, trainer = config.environment_spec, config.trainer_spec
    if "num_envs" not in environment.config.model_fields:
        raise PluginError(
            f"environment {environment.name!r} is of kind 'control' and its configuration has no field 'num_envs'; "
            "add one, and make that many simulations"
        )
    missing = [
        name for name in ("steps_per_update", "schedule", "total_env_steps") if name not in trainer.config.model_fields
    ]
    if missing:
        raise PluginError(
            f"trainer {trainer.name!r} learns 'control' and its configuration has no field {missing[0]!r}; add it"
        )
    return config.environment.num_envs, config.trainer.steps_per_update, config.trainer.schedule


def _rank(given: Given | None) -> int:
    """How much a source weighs: a default, the resumed run, a file, the command line."""
    if given is None or given.origin.startswith("suits "):
        return 0
    if given.origin == RUN_CONFIG:
        return 1
    return 3 if given.override else 2
