"""`launch_training.py` of the original tinker-atropos, also installed as `tinker-atropos-launch`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from tinker_atropos.errors import TinkerAtroposError, UserError

from tinker_atropos_atropos.compat_config import TinkerAtroposConfig
from tinker_atropos_atropos.script_config import without_secret

FLAGS = {
    "base_model": "base_model",
    "lora_rank": "lora_rank",
    "learning_rate": "learning_rate",
    "num_steps": "num_steps",
    "batch_size": "batch_size",
    "group_size": "group_size",
    "wandb_project": "wandb_project",
    "wandb_group": "wandb_group",
}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags: the original's, then this project's own."""
    parser = argparse.ArgumentParser(
        prog="tinker-atropos-launch",
        description="Train on what Atropos environments post to a trajectory API (tinker-atropos run-api).",
    )
    parser.add_argument("--config", help="YAML file with the sections env, openai and tinker")
    parser.add_argument("--base-model", help="model to train")
    parser.add_argument("--lora-rank", type=int, help="rank of the LoRA adapter")
    parser.add_argument("--learning-rate", type=float, help="learning rate of AdamW")
    parser.add_argument("--num-steps", type=int, help="optimiser steps")
    parser.add_argument("--batch-size", type=int, help="trajectories per optimiser step")
    parser.add_argument(
        "--group-size",
        type=int,
        help="trajectories of the groups that environments post: what a batch and the API's room count with",
    )
    parser.add_argument("--wandb-project", help="project that environments are told, for their logs")
    parser.add_argument("--wandb-group", help="group that environments are told")
    parser.add_argument(
        "--no-wandb", action="store_true", help="no effect, which is said: the trainer logs to files alone"
    )
    own = parser.add_argument_group("of this project")
    own.add_argument("--local", action="store_true", help="train on this machine: no key, no network")
    own.add_argument("--name", help="name of the run's folder")
    own.add_argument("--output", help="folder of run folders")
    own.add_argument("--resume", action="store_true", help="continue the run of that --name")
    own.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    return parser.parse_args(arguments)


def load_config(args: argparse.Namespace) -> TinkerAtroposConfig:
    """Return the file's configuration, or the defaults, with the flags laid over it."""
    config = TinkerAtroposConfig.from_yaml(args.config) if args.config else TinkerAtroposConfig()
    for flag, name in FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            setattr(config, name, value)
    if getattr(args, "no_wandb", False):
        config.use_wandb = False  # type: ignore[misc]
    return config


def own_overrides(args: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """Return what this project's own flags set."""
    from tinker_atropos.config import parse_assignment

    found = [parse_assignment(text) for text in args.set]
    for path, value, flag in (
        ("run.name", args.name, "--name"),
        ("run.output", args.output, "--output"),
        ("trainer.local", True if args.local else None, "--local"),
    ):
        if value is not None:
            found.append((path, value, flag))
    return found


def describe(config: TinkerAtroposConfig) -> str:
    """Return what the run is going to do, for the terminal."""
    told = f"environments are told project {config.wandb_project}, group {config.wandb_group or '(the run)'}"
    rows = {
        "model": config.base_model,
        "LoRA rank": config.lora_rank,
        "learning rate": config.learning_rate,
        "steps": config.num_steps,
        "batch": f"{config.batch_size} trajectories in groups of {config.group_size}",
        "tokens": f"{config.max_token_env_length} by the environment, {config.max_token_trainer_length} trained",
        "trajectory API": without_secret(config.atropos_api_url),
        "inference": without_secret(config.inference_api_url),
        "wandb": told + "; the trainer's own metrics go to metrics.jsonl",
    }
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch training; return 0 only where all steps were done, 2 for something typed wrong."""
    from pydantic import ValidationError
    from tinker_atropos.cli.run import summary

    from tinker_atropos_atropos.compat_trainer import TinkerAtroposTrainer, resolve

    args = parse_args(arguments)
    try:
        config, overrides = load_config(args), own_overrides(args)
        print(describe(config), file=sys.stderr)
        trainer = TinkerAtroposTrainer(config=config)
        asyncio.run(trainer.run(overrides, resume=args.resume))
        assert trainer.finished is not None
        print(summary(resolve(config, overrides), trainer.finished))
    except FileNotFoundError as error:
        return _failed(error, 2)
    except ValidationError as error:  # of a flag
        return _failed(
            "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()), 2
        )
    except UserError as error:
        return _failed(error, 2)
    except TinkerAtroposError as error:
        return _failed(error, error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except Exception as error:
        if os.environ.get("TINKER_ATROPOS_TRACEBACK"):
            raise
        return _failed(f"unexpected {type(error).__name__}: {error} (TINKER_ATROPOS_TRACEBACK=1 shows where)", 1)
    return 0


def command() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(main())


def _failed(what: object, code: int) -> int:
    print(f"error: {what}", file=sys.stderr)
    return code
