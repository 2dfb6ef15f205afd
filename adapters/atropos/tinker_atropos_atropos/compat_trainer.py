"""`TinkerAtroposTrainer` of the original tinker-atropos: the same constructor and `run()`, over this project's run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinker_atropos.errors import ConfigError

from tinker_atropos_atropos.compat_config import TinkerAtroposConfig
from tinker_atropos_atropos.script_config import check_address, without_secret
from tinker_atropos_atropos.script_remote import CLASSIC_PORT

if TYPE_CHECKING:
    from tinker_atropos.config import Config
    from tinker_atropos.run import Finished

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # the original's files name any of these

Override = tuple[str, Any, str]


class TinkerAtroposTrainer:
    """Trains on what environments post to the trajectory API at `config.atropos_api_url`.

    They sample from endpoints that `run` serves on this machine, on the port of `config.inference_api_url`.
    """

    def __init__(self, config: TinkerAtroposConfig) -> None:
        self.config = config
        self.base_model = config.base_model
        self.lora_rank = config.lora_rank
        self.learning_rate = config.learning_rate
        self.atropos_api_url = config.atropos_api_url
        self.num_steps = config.num_steps
        self.finished: Finished | None = None

    async def run(self, overrides: Iterable[Override] = (), *, resume: bool = False) -> None:
        """Train until the last step; `finished` then says where the weights are.

        `overrides` are settings of this project, `(path, value, origin)`. Raises a `TinkerAtroposError` where the run
        can't begin or go on: a return means that all steps were done.
        """
        from tinker_atropos.cli.interrupts import interruptible
        from tinker_atropos.progress import make_progress
        from tinker_atropos.run import run

        resolved = resolve(self.config, overrides)
        check(resolved)
        stop, progress = asyncio.Event(), make_progress()
        try:
            for path, reason in {**ignored(self.config), **resolved.unused}.items():
                progress.say(f"note: {path} has no effect: {reason}")
            with interruptible(stop, progress.say):
                self.finished = await run(resolved, progress, resume=resume, stop=stop)
        finally:
            progress.close()


def resolve(config: TinkerAtroposConfig, overrides: Iterable[Override] = ()) -> Config:
    """Return this project's configuration of the same run. Raises `ConfigError` or `PluginError`."""
    from tinker_atropos.config import load

    return load(None, list(overrides), base=sections(config))


def check(config: Config) -> None:
    """Refuse, before anything starts, what can't work here, such as a missing key."""
    if config.trainer_spec.check is not None:
        config.trainer_spec.check(config.trainer, config.model)


def ignored(config: TinkerAtroposConfig) -> dict[str, str]:
    """Return what was given and has no effect on the trainer, with the reason; an environment reads `env` itself."""
    found = {}
    if config.slurm:
        found["slurm"] = "everything runs on this machine"
    if config.testing:
        found["testing"] = "nothing depends on it"
    if "use_wandb" in config.env.model_fields_set:
        found["env.use_wandb"] = (
            "the trainer's metrics go to metrics.jsonl alone; environments log as their own files and flags say"
        )
    return found


def sections(config: TinkerAtroposConfig) -> dict[str, Any]:
    """Return the same settings by this project's names. Raises `ConfigError` for an address that can't be served."""
    own = {name: dict(section) for name, section in (config.model_extra or {}).items()}
    tinker = config.tinker
    made: dict[str, dict[str, Any]] = {
        "run": {
            "env": "atropos",
            "trainer": "tinker",
            "name": _folder_name(f"{tinker.wandb_run_name}-{tinker.wandb_run_suffix}"),
        },
        "env": {
            "group_size": config.env.group_size,
            "batch_size": config.env.batch_size,
            "total_steps": config.env.total_steps,
            "max_batches_offpolicy": config.env.max_batches_offpolicy,
            "ensure_scores_are_not_same": config.env.ensure_scores_are_not_same,
            # Theirs is the environment's own limit of a completion; what the API tells as the limit of a whole
            # sequence is the trainer's.
            "max_token_length": tinker.max_token_trainer_length,
            "steps_per_eval": max(0, config.env.steps_per_eval),
        },
        "openai": {"model_name": config.base_model},
        "tinker": {
            "lora_rank": tinker.lora_rank,
            "learning_rate": tinker.learning_rate,
            "max_token_trainer_length": tinker.max_token_trainer_length,
            "save_checkpoint_interval": tinker.save_checkpoint_interval,
        },
        "atropos": {
            "api_url": _api_url(config.atropos_api_url),
            "endpoint_port": _port(config.inference_api_url),
            "wandb_project": tinker.wandb_project,
            "wandb_group": tinker.wandb_group,
        },
    }
    if "checkpoint_dir" in tinker.model_fields_set:
        made["atropos"]["checkpoint_dir"] = tinker.checkpoint_dir
    if "tool_call_parser" in tinker.model_fields_set:
        made["managed_server"] = {"tool_parser": tinker.tool_call_parser}
    for name, section in own.items():
        made[name] = {**made.get(name, {}), **section}
    return made


def _api_url(url: str) -> str:
    try:
        return check_address(url)
    except ValueError as error:
        raise ConfigError(f"env.rollout_server_url: {error}, got {without_secret(url)!r}") from None


def _port(url: str) -> int:
    """Return the port to serve inference on."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if host not in LOOPBACK:
        raise ConfigError(
            f"openai.base_url: {without_secret(url)!r} is not on this machine; the trainer serves its policy on "
            f"loopback, so give http://localhost:{CLASSIC_PORT}/v1"
        )
    if scheme != "http":
        raise ConfigError(
            f"openai.base_url: {without_secret(url)!r}: the trainer serves its policy without TLS, so give "
            f"http://{host}:{CLASSIC_PORT}/v1"
        )
    if not port:
        raise ConfigError(
            f"openai.base_url: {without_secret(url)!r} names no port that clients could ask; give "
            f"http://{host}:{CLASSIC_PORT}/v1"
        )
    return port


def _folder_name(name: str) -> str:
    """Return a run's name as a folder may have it."""
    kept = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).lstrip(".-")
    return kept[:100] or "atropos-tinker-run"
