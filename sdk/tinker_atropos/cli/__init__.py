"""The command line. This module and its siblings import nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from typing import Any

import click

from tinker_atropos import __version__

COMMANDS = {
    "run": "train a policy on an environment",
    "eval": "score a model on an environment; compare two scores",
    "env": "environments that are installed",
    "trainer": "trainers that are installed",
    "checkpoint": "stored checkpoints of a run",
    "serve": "serve one part of the system",
}


PLUGIN_COMMANDS = "tinker_atropos.commands"
"""Entry points of further commands: the name is typed, the value leads to a click command."""


class LazyGroup(click.Group):
    """Imports a command's module when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *_plugin_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _load_plugin_command(cmd_name)
        module = import_module(f"tinker_atropos.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        offered = {name: f"of {_owner(points[0])}" for name, points in _plugin_commands().items()}
        if offered:
            with formatter.section("Commands of installed adapters"):
                formatter.write_dl(list(offered.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            if args[0] not in known:
                from tinker_atropos.errors import near

                ctx.fail(f"no command is called {args[0]!r}.{near(args[0], known)} Commands: {', '.join(known)}")
        return super().resolve_command(ctx, args)


def _plugin_commands() -> dict[str, list[EntryPoint]]:
    """Return what installed distributions add, by name; none of it is imported."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=PLUGIN_COMMANDS):
        if point.name not in COMMANDS:
            found.setdefault(point.name, {})[point.value] = point  # one distribution may be found twice on sys.path
    return {name: list(points.values()) for name, points in sorted(found.items())}


def _load_plugin_command(name: str) -> click.Command | None:
    from tinker_atropos.errors import PluginError

    points = _plugin_commands().get(name)
    if not points:
        return None
    if len(points) > 1:
        owners = " and ".join(map(_owner, points))
        raise PluginError(f"{len(points)} commands are called {name!r}: of {owners}; uninstall all but one")
    try:
        made = points[0].load()
    except Exception as error:
        raise PluginError(
            f"the command {name!r} of {_owner(points[0])} can't be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, click.Command):
        raise PluginError(f"{points[0].value!r} of {_owner(points[0])} is no click command")
    return made


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinker-atropos")
def cli() -> None:
    """Join reinforcement-learning environments to trainers.

    \b
    Through the hosted Tinker API:
      tinker-atropos run --env gsm8k --trainer tinker
    On this machine, with neither an account nor a network:
      tinker-atropos run --env gsm8k --trainer tinker --local --set env.dataset=arithmetic
    A simulated body, on this machine too:
      tinker-atropos run --env humanoid --trainer torch-ppo --env-steps 1000000
    """


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; the exit code is 0 only where all went well, 2 for something typed wrong."""
    from tinker_atropos.errors import TinkerAtroposError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # what a model says must not end a run on a terminal that lacks the letter
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _complain("aborted")
        code = 130
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "tinker-atropos"
        said = error.format_message()
        _complain(f"error: {said}{'' if said.rstrip(')').endswith(('.', '?', '!')) else '.'} See `{command} --help`")
        code = error.exit_code
    except click.ClickException as error:
        _complain(f"error: {error.format_message()}")
        code = error.exit_code
    except TinkerAtroposError as error:
        # 130: the user asked for it, and it went as it should.
        _complain(f"{error}" if error.exit_code == 130 else f"error: {error}")
        code = error.exit_code
    except BrokenPipeError:  # the reader of our output has gone
        code = 141
    except OSError as error:
        _complain(f"error: {error}")
        code = 1
    except Exception as error:
        if os.environ.get("TINKER_ATROPOS_TRACEBACK"):
            raise
        _complain(
            f"error: unexpected {type(error).__name__}: {error} (a defect, here or in a plugin; the traceback is in "
            "the run's run.log, and TINKER_ATROPOS_TRACEBACK=1 shows it)"
        )
        code = 1
    _flush()
    code = code if isinstance(code, int) else 0
    if arguments is None and _others_alive():
        # A thread that an environment left would keep the process for ever; this is a program's end, not a library's.
        atexit._run_exitfuncs()
        _flush()
        os._exit(code)
    sys.exit(code)


def _others_alive() -> bool:
    return any(
        thread.is_alive() and not thread.daemon and thread is not threading.current_thread()
        for thread in threading.enumerate()
    )


def _complain(text: str) -> None:
    from tinker_atropos.terminal import one_line

    with suppress(OSError):
        print(one_line(text), file=sys.stderr)


def _flush() -> None:
    """Flush here, so that a reader who has gone is no noise at the interpreter's end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
