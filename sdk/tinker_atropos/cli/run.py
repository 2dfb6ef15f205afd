"""`tinker-atropos run`: resolve the configuration, show what it will do, then do it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinker_atropos.cli import control_lines
from tinker_atropos.cli.output import count
from tinker_atropos.terminal import one_line, printable, program, resume_command, run_place

if TYPE_CHECKING:
    from tinker_atropos.config import Config
    from tinker_atropos.run import Finished

SHORT = {
    "env": "run.env",
    "env_python": "env.python",
    "trainer": "run.trainer",
    "model": "openai.model_name",
    "steps": "env.total_steps",
    "env_steps": "trainer.total_env_steps",
    "num_envs": "env.num_envs",
    "group_size": "env.group_size",
    "batch_size": "env.batch_size",
    "learning_rate": "trainer.learning_rate",
    "lora_rank": "trainer.lora_rank",
    "seed": "run.seed",
    "state": "run.state",
    "output": "run.output",
    "name": "run.name",
}


def _once(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Click would silently take the last of two values."""
    if len(set(values)) > 1:
        shown = " and ".join(repr(value) for value in values)
        raise click.UsageError(f"{parameter.opts[-1]} is given {len(values)} times, as {shown}; keep one.", context)
    return values[0] if values else None


def _environments(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
    """Several may be named only where each stands behind a plugin's colon."""
    from tinker_atropos.registry import split_reference

    if len(values) > 1 and all(split_reference(value)[1] is not None for value in values):
        return values
    return _once(context, parameter, values)


def _option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, multiple=True, callback=_once, **settings)


class RunCommand(click.Command):
    """Says to hands that know another tool's spelling how the same is written here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            hint = _hint(typed)
            if not hint:
                raise
            raise click.UsageError(error.format_message() + hint, ctx) from None


def _hint(typed: list[str]) -> str:
    for place, word in enumerate(typed):
        before = typed[place - 1] if place else ""
        path, equals, value = word.lstrip("-").partition("=")
        if before in ("--set", "-c", "--config", "--env", "--output") or path.count(".") != 1 or "/" in path:
            continue
        if word.startswith("--") and not equals:  # as Atropos has it: --env.group_size 8
            value = typed[place + 1] if place + 1 < len(typed) else "VALUE"
        if word.startswith("--") or equals:
            return f" Other settings are written --set {path}={value}."
    if "--resume" in typed[:-1] and not typed[typed.index("--resume") + 1].startswith("-"):
        return f" To continue that run say --resume --name {typed[typed.index('--resume') + 1]}."
    return ""


@click.command("run", cls=RunCommand)
@_option("-c", "--config", type=click.Path(), help="YAML file; sections as in Atropos, and run, rollout, trainer.")
@click.option(
    "--env",
    multiple=True,
    callback=_environments,
    help="Environment plugin, ./my_env.py:env, or an Atropos script as atropos:PATH[=WEIGHT]; that one is repeatable.",
)
@_option("--env-python", metavar="PYTHON", help="Interpreter for an Atropos script.  [default: this one]")
@_option("--trainer", help="Trainer plugin.")
@click.option("--local", is_flag=True, help="Train on this machine: no key, no network.")
@_option("--model", help="Model to train: hosted name; with --local a packaged name, a folder or a hub id.")
@_option("--steps", type=int, help="Optimiser steps; for control trainer updates.")
@_option("--env-steps", type=int, help="Control: environment steps of the whole run, in place of --steps.")
@_option("--num-envs", type=int, help="Control: how many simulations.")
@_option("--group-size", type=int, help="Episodes per task.")
@_option("--batch-size", type=int, help="Trajectories per step, a multiple of the group size.")
@_option(
    "--learning-rate", type=float, help="Default: by model size; for control as the trainer and the environment say."
)
@_option("--lora-rank", type=int, help="Rank of the LoRA adapter.")
@_option("--seed", type=int, help="Seed of tasks, sampling and initial weights.")
@_option("--state", help="Where groups wait: memory, or redis://host:port/0.  [default: memory]")
@_option("--output", type=click.Path(), help="Folder of run folders.  [default: runs]")
@_option("--name", help="Name of this run's folder.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable.")
@click.option("--resume", is_flag=True, help="Continue the run of that --name from its newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and start nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a run that costs money.")
def command(
    config: str | None,
    local: bool,
    assignments: tuple[str, ...],
    resume: bool,
    dry_run: bool,
    yes: bool,
    **short: Any,
) -> None:
    """Train a policy on an environment.

    Steps go to stdout, notices to stderr; everything is kept in runs/NAME. Ctrl-C once stops with a checkpoint, twice
    at once.
    """
    from tinker_atropos.registry import Registry

    registry = Registry()
    resolved = _resolve(registry, config, local, assignments, resume, short)
    with _no_exit(resolved):
        _check(resolved, dry_run=dry_run, resume=resume)
        if dry_run:
            click.echo(describe(resolved))
            return
        environment = _confirm(resolved, yes)
        finished = _train(resolved, registry, resume, environment)
    with suppress(OSError):  # whoever read stdout has gone, which the run has said
        click.echo(summary(resolved, finished))


@contextmanager
def _no_exit(config: Config) -> Iterator[None]:
    """Within the block `SystemExit` is an error: no plugin decides how this program ends."""
    from tinker_atropos.errors import RunError

    try:
        yield
    except SystemExit as error:
        raise RunError(
            f"something called sys.exit({error.code!r:.80}): the environment, the trainer or what they import. Let it "
            f"raise an error instead; what is saved goes on with `{resume_command(config)}`"
        ) from error


def _resolve(
    registry: Any, file: str | None, local: bool, assignments: tuple[str, ...], resume: bool, short: dict[str, Any]
) -> Config:
    from tinker_atropos.config import load, parse_assignment, peek
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.sections import RunSection
    from tinker_atropos.validation import validate
    from tinker_atropos.yaml_file import read_yaml

    path = Path(file) if file is not None else None
    overrides = [parse_assignment(text) for text in assignments]
    overrides += [
        (SHORT[option], value, f"--{option.replace('_', '-')}") for option, value in short.items() if value is not None
    ]
    if local:
        overrides.append(("trainer.local", True, "--local"))
    base = None
    if resume:
        asked = {key: peek(path, overrides, f"run.{key}") for key in ("name", "output", "env")}
        place = validate(RunSection, {key: value for key, value in asked.items() if value is not None}, path="run")
        if place.name is None:
            raise ConfigError(f"--resume: which run? Say --name NAME.{_runs(place.output)}")
        written = place.output / place.name / "config.yaml"
        if written.is_file():
            base = read_yaml(written)
        elif place.env is None:
            raise ConfigError(
                f"--resume: there is no run called {place.name!r} in {str(place.output)!r}.{_runs(place.output)}"
            )
    return load(path, overrides, registry=registry, base=base)


def _runs(output: Path) -> str:
    names = sorted(path.parent.name for path in output.glob("*/config.yaml")) if output.is_dir() else []
    return f" Runs there: {', '.join(names[-8:])}" if names else " There are no runs yet"


def _check(config: Config, *, dry_run: bool, resume: bool) -> None:
    from tinker_atropos.errors import MissingCredentials
    from tinker_atropos.run import check_folder

    check_folder(config, resume=resume)
    if config.adapter_spec is not None:
        # Refuses what it can't work with, such as a template that is not there.
        config.adapter_spec.make(config.adapter)
    if config.trainer_spec.check is None:
        return
    try:
        config.trainer_spec.check(config.trainer, config.model)
    except MissingCredentials as error:
        if not dry_run:
            raise
        click.echo(f"note: without --dry-run this stops here: {error}", err=True)


def _confirm(config: Config, yes: bool) -> Any:
    """Say what a run will use; before a hosted one, ask. Returns the environment: it bounds the tokens of a turn."""
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.rollout.control_plan import is_control
    from tinker_atropos.rollout.plan import make_environment

    price = config.trainer_spec.quote(config.trainer, config.model) if config.trainer_spec.quote is not None else None
    environment = None if is_control(config) else make_environment(config)
    for line in (*(price.lines if price is not None else ()), *volume(config, environment)):
        click.echo(printable(line), err=True)
    for path, reason in config.unused.items():
        origin = config.origins.get(path, "configuration")
        click.echo(one_line(f"note: {path} ({origin}) has no effect: {reason}"), err=True)
    if price is None or not price.hosted or yes:
        return environment
    if not sys.stdin.isatty():
        raise ConfigError("this run costs money and there is no terminal to ask on; say --yes to start it")
    click.confirm("Start?", abort=True, err=True)
    return environment


def volume(config: Config, environment: Any = None) -> list[str]:
    """Return lines on how much a run samples and trains; more is known once the environment is made."""
    if config.environment_spec.kind == "control":
        return control_lines.volume(config)
    per_step = config.env.batch_size
    per_turn = config.rollout.max_tokens or getattr(environment, "max_tokens", None)
    tokens = ", whose tokens nothing bounds but the model's context"
    if config.env.max_token_length is not None:
        tokens = f" of up to {config.env.max_token_length:,} tokens: {per_step * config.env.max_token_length:,} a step"
    elif per_turn is not None:
        tokens = f" of up to {per_turn:,} sampled tokens a turn: {per_step * per_turn:,} a step for each turn"
    beside = ["replaced groups"] if config.env.ensure_scores_are_not_same else []
    beside += ["evaluations"] if config.env.steps_per_eval else []
    return [
        f"{count(config.env.total_steps, 'step')} of {count(per_step, 'episode')} "
        f"({count(config.groups_per_batch, 'group')} of {config.env.group_size}){tokens}"
        + (f"; {' and '.join(beside)} come on top" if beside else ""),
        f"run folder {config.folder}",
    ]


def _train(config: Config, registry: Any, resume: bool, environment: Any) -> Finished:
    import asyncio

    from tinker_atropos.cli.interrupts import interruptible
    from tinker_atropos.progress import make_progress
    from tinker_atropos.run import run

    async def main() -> Finished:
        stop = asyncio.Event()
        progress = make_progress()
        try:
            with interruptible(stop, progress.say):
                return await run(config, progress, resume=resume, registry=registry, stop=stop, environment=environment)
        finally:
            progress.close()

    return asyncio.run(main())


def describe(config: Config) -> str:
    """Return the resolved configuration as YAML, each value with its origin, then what has no effect."""
    from tinker_atropos.rollout.control_plan import control_plan, idle_keys, is_control
    from tinker_atropos.yaml_file import write_yaml

    lines, meaningless = [], idle_keys(config)
    for section, all_values in config.as_dict().items():
        values = {key: value for key, value in all_values.items() if f"{section}.{key}" not in meaningless}
        if not values:
            continue
        lines.append(f"{section}:")
        for key, value in values.items():
            shown = write_yaml({key: value}).rstrip("\n").split("\n")
            origin = f"# {one_line(_origin(config, f'{section}.{key}'))}"
            # A comment can't follow the first of several lines: it might stand within quotes there.
            lines += [f"  {shown[0]:<44}  {origin}"] if len(shown) == 1 else [f"  {origin}", f"  {shown[0]}"]
            lines.extend(f"  {line}" if line else "" for line in shown[1:])
    if config.trainer_spec.quote is not None:
        quote = config.trainer_spec.quote(config.trainer, config.model)
        lines.extend(f"# {one_line(line)}" for line in quote.lines)
    lines.append("# " + "; ".join(volume(config)))
    staleness = control_plan(config).max_staleness if is_control(config) else config.max_staleness
    lines.append(f"# max_staleness {staleness}")
    if config.unused:
        lines.append("# accepted keys that have no effect in this mode:")
        lines.extend(f"#   {one_line(path)}: {one_line(reason)}" for path, reason in config.unused.items())
    else:
        lines.append("# every key that was given has an effect")
    lines.append(
        f"# environment {config.environment_spec.name} and trainer {config.trainer_spec.name} fit; nothing started"
    )
    return "\n".join(lines)


def _origin(config: Config, path: str) -> str:
    origin = config.origins.get(path, "default")
    if path == "openai.model_name" and origin == "default":
        return f"default of {config.trainer_spec.name}"
    if path == "run.name" and origin == "default":
        return "environment, trainer and time"
    if path == "openai.api_key" and config.openai.api_key is not None:
        return f"{origin}: not shown, it has no effect"
    return origin


def summary(config: Config, finished: Finished) -> str:
    """Return the last lines of a run: results, weights path, the next commands."""
    call, place = program(), run_place(config, "--run")
    local = " --local" if getattr(config.trainer, "local", False) else ""
    control = config.environment_spec.kind == "control"
    if control:
        lines, longer = control_lines.results(config, finished), control_lines.next_length(config, finished)
    else:
        lines = [f"finished {count(finished.steps, 'step')} in {finished.folder}"]
        longer = f"--steps {finished.steps * 2}"
    stored = () if control and config.trainer_spec.checkpoints is None else ("download", "list")
    first, last = finished.first_evaluation.get("eval/reward"), finished.last_evaluation.get("eval/reward")
    if first is not None and last is not None:
        lines.append(f"evaluation reward {first:.3f} before, {last:.3f} after")
    return "\n".join(
        [
            *lines,
            f"weights {finished.checkpoint.weights}",
            "next:",
            *(f"  {call} checkpoint {word}{local} {place}" for word in stored),
            f"  {resume_command(config)} {longer}",
        ]
    )
