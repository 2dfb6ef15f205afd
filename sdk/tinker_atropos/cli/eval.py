"""`tinker-atropos eval`: score a model on an environment; `eval compare` sets two scores side by side."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinker_atropos.cli.output import count, format_option
from tinker_atropos.terminal import one_line, printable, program

if TYPE_CHECKING:
    from tinker_atropos.evaluation.evaluate import Evaluated, Evaluator

SHORT = {
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.eval_temperature",
}
NOTICE = "stopping; what is being asked is waited for and kept. Ctrl-C again stops at once"


class EvalCommand(click.Command):
    """`eval ENV …`, and as `eval compare A B` another command."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["compare"]:
            return compare.make_context(f"{info_name} compare", args[1:], parent=parent, **extra)
        typed = list(args)
        context = super().make_context(info_name, args, parent=parent, **extra)
        context.meta["typed"] = typed
        return context

    def invoke(self, ctx: click.Context) -> Any:
        return ctx.command.invoke(ctx) if ctx.command is not self else super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([("compare A B", "is there a difference between two evaluations?")])


@click.command("eval", cls=EvalCommand, options_metavar="[OPTIONS]")
@click.argument("environment", metavar="ENV")
@click.option(
    "-m",
    "--model",
    required=True,
    help="What to score: an endpoint (https://host/v1#model), stored weights (tinker://…), a run (NAME, "
    "NAME@step-000010, NAME@base), or a model on this machine (smollm2-135m, a folder, a hub id).",
)
@click.option("-n", "--tasks", type=click.IntRange(1), help="How many tasks, from the first on.  [default: 50]")
@click.option("-r", "--samples", type=click.IntRange(1, 1024), default=1, show_default=True, help="Answers per task.")
@click.option("--split", default="test", show_default=True, help="Split of the environment.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of tasks and sampling.")
@click.option("--temperature", type=float, help="Of sampling.  [default: 0 for one answer per task, else 1]")
@click.option("--max-tokens", type=int, help="New tokens per turn.  [default: the environment's]")
@click.option(
    "--pass-threshold",
    type=float,
    help="Reward from which an answer passes.  [default: by the metric 'correct' if there is one, else 1]",
)
@click.option("--concurrency", type=click.IntRange(1, 4096), default=16, show_default=True, help="Episodes at a time.")
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    default=5,
    show_default=True,
    help="Further tries of a request that failed for a passing reason.",
)
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Any other setting; repeatable.")
@click.option("--model-name", help="The model's name at an endpoint, in place of URL#NAME.")
@click.option("--key-env", metavar="VARIABLE", help="Variable with the endpoint's key.  [default: OPENAI_API_KEY]")
@click.option("--body", multiple=True, metavar="KEY=VALUE", help="Goes into each request to an endpoint; repeatable.")
@click.option(
    "--deterministic", is_flag=True, help="On this machine: one seed, one score, whatever runs beside (slower)."
)
@click.option("--runs", type=click.Path(), default="runs", show_default=True, help="Folder of run folders.")
@click.option("--trainer", help="Trainer plugin that serves the model, where several could.")
@click.option("--output", type=click.Path(), default="evals", show_default=True, help="Folder of evaluation folders.")
@click.option("--name", help="Name of this evaluation's folder.  [default: made from its settings]")
@click.option("--resume", is_flag=True, help="Continue; an error where there is nothing to continue.")
@click.option("--dry-run", is_flag=True, help="Print what would be asked, and ask nothing.")
@format_option
@click.pass_context
def command(
    context: click.Context, /, environment: str, dry_run: bool, resume: bool, form: str, **options: Any
) -> None:
    """Score a model on an environment.

    The report goes to stdout, all else to stderr; everything is kept in evals/NAME. Called again with the same
    arguments it goes on where it was, and asks nothing twice. Ctrl-C once waits for what is being asked.
    """
    evaluator = _evaluator(environment, options, dry_run=dry_run)
    if dry_run:
        _dry_run(evaluator, form)
        return
    if resume:
        _refuse_nothing(evaluator)
    evaluated = _run(evaluator)
    again = f"{program()} eval {shlex.join(context.meta['typed'])}"
    _finish(evaluator, evaluated, form, again)


@click.command("compare")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--output", type=click.Path(), default="evals", show_default=True, help="Folder of evaluation folders.")
@click.option("--allow", multiple=True, metavar="SETTING", help="A setting in which the two may differ; repeatable.")
@format_option
def compare(first: str, second: str, output: str, allow: tuple[str, ...], form: str) -> None:
    """Is there a difference between two evaluations?

    Paired by task: the interval is of the mean of B's reward minus A's, over the tasks that both have.
    """
    from tinker_atropos.evaluation.compare import compare as paired
    from tinker_atropos.evaluation.compare import find_evaluation, refuse_unlike, task_means, verdict
    from tinker_atropos.evaluation.statistics import LEVEL

    folders = [find_evaluation(name, Path(output)) for name in (first, second)]
    settings = [folder.settings() for folder in folders]
    refuse_unlike(settings[0], settings[1], allow)
    means = [task_means(folder.read_episodes(_say)) for folder in folders]
    found = paired(means[0], means[1])
    names = [folder.path.name for folder in folders]
    said = verdict(found, names[0], names[1])
    if form == "json":
        rows = {
            "first": names[0],
            "second": names[1],
            "tasks": found.tasks,
            "difference": {"mean": found.mean, "low": found.low, "high": found.high, "level": LEVEL},
            "p": found.p,
            "different": found.shown,
            "verdict": said,
        }
        click.echo(json.dumps(rows, indent=1))
        return
    left_out = len(means[0].keys() ^ means[1].keys())
    shared = means[0].keys() & means[1].keys()
    for name, one in zip(names, means, strict=True):
        click.echo(one_line(f"{name}: reward {sum(one[task] for task in shared) / len(shared):.3f}"))
    interval = (
        "no interval, all alike" if found.low is None else f"{LEVEL:.0%} interval {found.low:+.3f} to {found.high:+.3f}"
    )
    click.echo(f"difference {found.mean:+.3f}, {interval}, sign-flip p {found.p:.3g}, {count(found.tasks, 'task')}")
    if left_out:
        click.echo(
            f"{count(left_out, 'task')} that only one of them has is left out"
            if left_out == 1
            else f"{left_out} tasks that only one of them has are left out"
        )
    click.echo(one_line(said))


def _evaluator(environment: str, options: Mapping[str, Any], *, dry_run: bool) -> Evaluator:
    import asyncio

    from tinker_atropos.config import parse_assignment
    from tinker_atropos.errors import MissingCredentials
    from tinker_atropos.evaluation.endpoint import read_key, with_model_name
    from tinker_atropos.evaluation.evaluate import Asked, Evaluator
    from tinker_atropos.evaluation.settings import pose
    from tinker_atropos.evaluation.subject import EndpointSubject, read_subject
    from tinker_atropos.registry import Registry
    from tinker_atropos.validation import check_folder_name

    registry = Registry()
    overrides = [parse_assignment(text) for text in options["assignments"]]
    overrides += [
        (path, options[option], f"--{option.replace('_', '-')}")
        for option, path in SHORT.items()
        if options[option] is not None
    ]
    posed = pose(environment, overrides, options["samples"], registry=registry)
    asked = Asked(
        split=options["split"],
        tasks=options["tasks"],
        samples=options["samples"],
        seed=options["seed"],
        output=Path(options["output"]),
        name=None if options["name"] is None else check_folder_name("--name", options["name"]),
        concurrency=options["concurrency"],
        retries=options["retries"],
        threshold=_finite("--pass-threshold", options["pass_threshold"]),
        key_variable=options["key_env"],
        deterministic=options["deterministic"],
        extra=_body(options["body"]),
    )
    subject = read_subject(
        options["model"],
        runs=Path(options["runs"]),
        name=options["model_name"],
        trainer=options["trainer"],
        registry=registry,
    )
    try:
        if isinstance(subject, EndpointSubject):
            read_key(subject.url, asked.key_variable)
        else:
            subject.check()
    except MissingCredentials as error:
        if not dry_run:
            raise
        _say(f"note: without --dry-run this stops here: {error}")
    if isinstance(subject, EndpointSubject) and not dry_run:
        subject = asyncio.run(with_model_name(subject, asked.key_variable, _say))
    return Evaluator(posed, subject, asked, _say)


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _finite(option: str, value: float | None) -> float | None:
    import math

    from tinker_atropos.errors import ConfigError

    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{option}: got {value}; expected a finite number")
    return value


_OURS = {"model", "messages", "prompt", "seed", "temperature", "max_tokens", "stop", "stream", "n", "top_p", "top_k"}


def _body(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Return the further fields of each request; raises `ConfigError` for one that an option sets."""
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.yaml_file import parse_value

    found: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--body {text!r}: expected KEY=VALUE, such as repetition_penalty=1.1")
        if key.strip() in _OURS:
            raise ConfigError(f"--body: {key.strip()} is set by an option, by --set, or not at all; leave it out")
        found[key.strip()] = parse_value(value)
    return found


def _refuse_nothing(evaluator: Evaluator) -> None:
    from tinker_atropos.errors import ConfigError

    folder = evaluator.folder()
    if not folder.exists():
        there = sorted(path.parent.name for path in folder.path.parent.glob("*/settings.json"))
        raise ConfigError(
            f"--resume: there is no evaluation {folder.path.name!r} in {str(folder.path.parent)!r}; there are "
            f"{', '.join(there[-8:]) or 'none'}"
        )


def _run(evaluator: Evaluator) -> Evaluated:
    import asyncio

    from tinker_atropos.cli.interrupts import interruptible
    from tinker_atropos.errors import RunError
    from tinker_atropos.evaluation.meter import Meter

    folder = evaluator.folder()
    folder.refuse_other(evaluator.settings())
    _say(f"{_volume(evaluator)}; kept in {folder.path}")

    async def main() -> Evaluated:
        stop = asyncio.Event()
        with interruptible(stop, _say, NOTICE):
            return await evaluator.run(stop, Meter)

    try:
        return asyncio.run(main())
    except SystemExit as error:
        raise RunError(f"something called sys.exit({error.code!r:.80}): the environment or what it imports") from error


def _finish(evaluator: Evaluator, evaluated: Evaluated, form: str, again: str) -> None:
    """Print the report; raise where not all of it is there, with the way on."""
    from tinker_atropos.errors import EpisodesFailed
    from tinker_atropos.evaluation.report import lines
    from tinker_atropos.supervise import Stopped

    outcome = evaluated.outcome
    if evaluated.report is not None:
        shown = {"name": evaluated.folder.name, "folder": str(evaluated.folder), **evaluated.report}
        if form == "json":
            click.echo(json.dumps(shown, indent=1))
        else:
            for line in lines(evaluated.report):
                click.echo(printable(line))
            click.echo(printable(f"kept            {evaluated.folder / 'episodes.jsonl'}"))
    if evaluated.halted:
        raise Stopped(
            f"stopped with {len(outcome.records)} of {evaluator.episodes} episodes, as asked; continue with `{again}`"
        )
    if outcome.failed:
        causes = ", ".join(f"{cause} {number}" for cause, number in sorted(outcome.failed.items()))
        raise EpisodesFailed(
            f"{sum(outcome.failed.values())} of {evaluator.episodes} episodes failed ({causes}); the last cause: "
            f"{outcome.last_error}. The same command tries those again: `{again}`"
        )


def _volume(evaluator: Evaluator) -> str:
    turns = evaluator.max_tokens
    tokens = "as many tokens as the model has room for" if turns is None else f"up to {turns:,} sampled tokens"
    return (
        f"{count(evaluator.tasks, 'task')} x {count(evaluator.asked.samples, 'sample')}: "
        f"{count(evaluator.episodes, 'episode')}, each of one request or more of {tokens} a turn"
    )


def _dry_run(evaluator: Evaluator, form: str) -> None:
    """Print what would be asked."""
    import asyncio

    async def prompts() -> list[Any]:
        try:
            return await evaluator.first_prompts(2)
        finally:
            await evaluator.close()

    shown = asyncio.run(prompts())
    settings, folder = evaluator.settings(), evaluator.folder()
    folder.refuse_other(settings)
    there = sum(not record.get("failed") for record in folder.read_episodes(_say).values()) if folder.exists() else 0
    missing = evaluator.episodes - there
    turns, most = evaluator.posed.rollout.max_turns, evaluator.max_tokens
    planned = {
        "folder": str(folder.path),
        "settings": settings,
        "episodes": evaluator.episodes,
        "there": there,
        "requests_at_least": missing,
        "requests_at_most": missing * turns,
        "sampled_tokens_at_most_a_turn": most,
        "sampled_tokens_at_most_for_one_turn_each": None if most is None else missing * most,
        "pass_threshold": evaluator.threshold,
        "first_prompts": shown,
    }
    if form == "json":
        click.echo(json.dumps(planned, indent=1, default=str))
        return
    from tinker_atropos.yaml_file import write_yaml

    click.echo(printable(write_yaml(settings).rstrip()))
    click.echo(f"# {_volume(evaluator)}")
    tokens = "whatever room there is" if most is None else f"{missing * most:,} for one turn each"
    click.echo(
        f"# {count(there, 'episode')} there already; {count(missing, 'request')} at least, {missing * turns:,} at most "
        f"({count(turns, 'turn')} an episode, rollout.max_turns)"
    )
    click.echo(f"# sampled tokens at most: {tokens}")
    for place, observation in enumerate(shown):
        said = observation if isinstance(observation, str) else json.dumps(list(observation), ensure_ascii=False)
        text = printable(said).replace("\n", "\n#   ")
        click.echo(f"# task {place} is asked:{os.linesep}#   {text}")
    click.echo(printable(f"# would be kept in {folder.path}; nothing was asked"))
