"""`tinker-atropos checkpoint`: list, describe and download what a run stored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinker_atropos.cli.output import format_option, show, size, when

if TYPE_CHECKING:
    from tinker_atropos.trainer import CheckpointInfo, TrainerSpec

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Store:
    """Whose checkpoints: a trainer and its configuration, and the run they belong to, None for the whole account."""

    spec: TrainerSpec
    config: Any
    folder: Path | None


def store_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say whose checkpoints are meant."""
    for option in (
        click.option("--trainer", help="Trainer plugin, where no --run names it."),
        click.option("--output", type=click.Path(), default="runs", show_default=True, help="Folder of run folders."),
        click.option("--local", is_flag=True, help="The run was trained on this machine."),
        click.option("--run", "run_name", help="Name of a run; without it, all that the account holds."),
    ):
        function = option(function)
    return function


@click.group("checkpoint")
def command() -> None:
    """Stored checkpoints of a run, or of the hosted account."""


@command.command("list")
@store_options
@format_option
def list_(run_name: str | None, local: bool, output: str, trainer: str | None, form: str) -> None:
    """List checkpoints, newest first."""
    store = open_store(run_name, local, output, trainer)
    found = _with(store, lambda catalogue: catalogue.list())
    show([_row(info, form) for info in found], form, empty="there are no checkpoints yet")


@command.command("info")
@click.argument("uri", required=False)
@store_options
@format_option
def info(uri: str | None, run_name: str | None, local: bool, output: str, trainer: str | None, form: str) -> None:
    """Describe one checkpoint; without URI the run's newest weights."""
    store = open_store(run_name, local, output, trainer)
    wanted = uri or newest_weights(store)
    found = _with(store, lambda catalogue: catalogue.info(wanted))
    if form == "json":
        show([asdict(found)], form, empty="")
        return
    for name, value in _row(found, form).items():
        click.echo(f"{name:<12} {'-' if value is None else value}")


@command.command("download", short_help="Download weights for use elsewhere.")
@click.argument("uri", required=False)
@store_options
@click.option("--to", type=click.Path(), help="New folder to write.  [default: export/NAME in the run's folder]")
def download(
    uri: str | None, run_name: str | None, local: bool, output: str, trainer: str | None, to: str | None
) -> None:
    """Download weights as a folder that others load.

    For LoRA that is a PEFT adapter, for torch_ppo a policy for NumPy and ONNX. URI is one that `checkpoint list` shows;
    without it the newest weights of --run are taken. The folder's path is printed.
    """
    from tinker_atropos.errors import ConfigError

    store = open_store(run_name, local, output, trainer)
    wanted = uri or newest_weights(store)
    if to is None and store.folder is None:
        raise ConfigError("--to: name a folder to download into (with --run it is put into the run's folder)")
    target = Path(to) if to is not None else store.folder / "export" / _folder_name(wanted)  # type: ignore[operator]
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to: {str(target)!r} exists already; name a new folder with --to")
    click.echo(str(_with(store, lambda catalogue: catalogue.download(wanted, target))))


def _folder_name(uri: str) -> str:
    """Return a checkpoint's name: the last part of its address; of a file's address the folder that it lies in."""
    *_, folder, last = ("", *uri.rstrip("/").split("/"))
    return folder if uri.startswith("file:") and Path(last).suffix else last


def open_store(run_name: str | None, local: bool, output: str, trainer: str | None) -> Store:
    """Return the store that the options mean; raises `ConfigError` if they don't name one."""
    from tinker_atropos.config import validate
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.registry import Registry, normal
    from tinker_atropos.run_folder import RunFolder
    from tinker_atropos.yaml_file import read_yaml

    registry = Registry()
    if run_name is None:
        if local:
            raise ConfigError("--local: checkpoints of this machine belong to a run; name it with --run NAME")
        spec = registry.load("trainer", trainer or _only_trainer(registry))
        _check(spec, validate(spec.config, {}), None)
        return Store(spec, validate(spec.config, {}), None)
    folder = RunFolder(Path(output) / run_name)
    if not folder.exists():
        names = sorted(path.parent.name for path in Path(output).glob("*/config.yaml"))
        raise ConfigError(
            f"--run: there is no run {run_name!r} in {output!r}; runs there: {', '.join(names) or 'none'}"
        )
    content = read_yaml(folder.config_file)
    try:
        name, model = content["run"]["trainer"], content["openai"]["model_name"]
    except (KeyError, TypeError):
        raise ConfigError(f"{folder.config_file}: damaged, it names no run.trainer and openai.model_name") from None
    spec = registry.load("trainer", str(name))
    config = validate(spec.config, content.get(normal(spec.name)) or {}, path=normal(spec.name))
    if local and not hasattr(config, "local"):
        raise ConfigError(f"--local: trainer {spec.name!r} knows only this machine; leave --local out")
    if local and not config.local:
        raise ConfigError(f"--local: run {run_name!r} was not trained on this machine; leave --local out")
    _check(spec, config, model)
    return Store(spec, config, folder.path)


def newest_weights(store: Store) -> str:
    """Return the weights of the run's newest manifest; raises `ConfigError` if there is none."""
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.run_folder import RunFolder, latest_manifest

    if store.folder is None:
        raise ConfigError("name a checkpoint (tinker://…), or a run with --run NAME")
    manifest = latest_manifest(RunFolder(store.folder))
    if manifest is None:
        raise ConfigError(f"the run in {str(store.folder)!r} has no checkpoint yet; continue it with run --resume")
    return manifest.checkpoint.weights


def _row(info: CheckpointInfo, form: str) -> dict[str, Any]:
    row = asdict(info)
    if form == "json":
        return row
    return {**row, "size": size(info.size), "created": when(info.created), "expires": when(info.expires)}


def _check(spec: Any, config: Any, model: str | None) -> None:
    from tinker_atropos.errors import PluginError

    if spec.checkpoints is None:
        raise PluginError(f"trainer {spec.name!r} keeps no checkpoints that can be listed")
    if spec.check is not None:
        spec.check(config, model)


def _only_trainer(registry: Any) -> str:
    from tinker_atropos.errors import ConfigError

    able: list[str] = [plugin.name for plugin, error in registry.status("trainer") if not error]
    able = [
        name for name in able if (spec := registry.load("trainer", name)).checkpoints is not None and spec.has_account
    ]
    if len(able) != 1:
        raise ConfigError(
            f"name a run with --run, or one of the trainers with --trainer: {', '.join(able) or 'none installed'}"
        )
    return able[0]


def _with(store: Store, work: Callable[[Any], Awaitable[Result]]) -> Result:
    import asyncio

    async def main() -> Result:
        assert store.spec.checkpoints is not None, "open_store has checked it"
        catalogue = await store.spec.checkpoints(store.config, store.folder)
        try:
            return await work(catalogue)
        finally:
            await catalogue.close()

    return asyncio.run(main())
