"""Runs foreign scripts for one run: a trajectory API here, each script in a process of its own, all of it watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tinker_atropos.errors import ConfigError, RunError
from tinker_atropos.external import GroupSink, PolicyEndpoint
from tinker_atropos.yaml_file import read_yaml, write_yaml

from tinker_atropos_atropos.script_api import Api, StartApi, serve_here
from tinker_atropos_atropos.script_config import AtroposConfig, Script, script_names
from tinker_atropos_atropos.script_interpreter import (
    Interpreter,
    find_interpreter,
    script_environment,
    warnings_about,
)
from tinker_atropos_atropos.script_process import ScriptProcess, exit_words, start_script
from tinker_atropos_atropos.script_variables import CONFIG_VARIABLE
from tinker_atropos_atropos.script_watch import Limits, Watch, log_words
from tinker_atropos_atropos.script_yaml import Joined, script_configuration

LOOK_SECONDS = 0.5


class ScriptEnvironment:
    """Foreign scripts that post to a trajectory API in this process.

    Making it reads their files and looks at their interpreters; raises `ConfigError` or `PluginError` where one is
    missing or lacks atroposlib.
    """

    def __init__(
        self, config: AtroposConfig, start_api: StartApi = serve_here, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.endpoint: Mapping[str, object] = {"port": config.endpoint_port or 0}
        self._start_api, self._clock = start_api, clock
        self.scripts = dict(zip(script_names(config.scripts), config.scripts, strict=True))
        for name, script in self.scripts.items():
            _check_file(name, script)
        self._own = {name: _own_file(script) for name, script in self.scripts.items()}
        asked = {name: script.python or config.python for name, script in self.scripts.items()}
        found = {given: find_interpreter(given, script_environment()) for given in dict.fromkeys(asked.values())}
        self._interpreters: dict[str, Interpreter] = {name: found[given] for name, given in asked.items()}

    async def run(self, endpoint: PolicyEndpoint, sink: GroupSink) -> None:
        """Start the API and the scripts; watch them until cancelled, then end them.

        Raises `RunError` where one ends before the last step, or is silent for too long, with the end of its log.
        """
        await endpoint.ready()
        for interpreter in {found.path: found for found in self._interpreters.values()}.values():
            for line in warnings_about(interpreter):
                sink.say(f"warning: {line}")
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(
                self._start_api(endpoint, sink, host=self.config.api_host, port=self.config.api_port)
            )
            processes: dict[str, ScriptProcess] = {}
            for name, script in self.scripts.items():
                processes[name] = self._start(name, script, endpoint, sink, api.url)
                stack.push_async_callback(processes[name].close)
            await self._watch(processes, api, sink)

    def _start(
        self, name: str, script: Script, endpoint: PolicyEndpoint, sink: GroupSink, api_url: str
    ) -> ScriptProcess:
        """Write the script's configuration and start it."""
        joined = self._joined(name, script, endpoint)
        written = script_configuration(joined, endpoint, sink.info, api_url, self._own[name])
        for note in written.notes:
            sink.say(f"note: {note}")
        file, log = (sink.info.folder.absolute() / "scripts" / f"{name}.{end}" for end in ("yaml", "log"))
        _write(file, write_yaml(written.content))
        command = [self._interpreters[name].path, str(script.path.expanduser().absolute()), "serve"]
        command += ["--config", str(file), *self.config.args, *script.args]
        sink.say(f"starting {name}: {' '.join(command)}; its log is {log}")
        return start_script(
            name,
            command,
            folder=(script.cwd or self.config.cwd or Path()).expanduser().absolute(),
            log=log,
            environment={**script_environment(), CONFIG_VARIABLE: str(file)},
            stop_seconds=self.config.stop_timeout,
        )

    def _joined(self, name: str, script: Script, endpoint: PolicyEndpoint) -> Joined:
        return Joined(
            tokenizer=endpoint.tokenizer,
            name=name,
            share=script.weight / sum(other.weight for other in self.scripts.values()),
            weight=script.weight,
            server_type=script.server_type or self.config.server_type,
            include_messages=self.config.include_messages,
            min_allocation=script.min_allocation,
        )

    async def _watch(self, processes: Mapping[str, ScriptProcess], api: Api, sink: GroupSink) -> None:
        limits = Limits(self.config.startup_timeout, self.config.idle_timeout, self.config.log_lines)
        watch = Watch(list(self.scripts), limits, lambda name, lines: processes[name].tail(lines), self._clock())
        while True:
            self._refuse_ended(processes, sink)
            enough = sink.waiting >= sink.info.batch_size or sink.step >= sink.info.total_steps
            for line in watch.look(self._clock(), api.seen(), enough=enough):
                sink.say(line)
            await asyncio.sleep(LOOK_SECONDS)

    def _refuse_ended(self, processes: Mapping[str, ScriptProcess], sink: GroupSink) -> None:
        """Raise `RunError` if a script ended while its groups are still needed."""
        info = sink.info
        all_are_here = sink.step * info.batch_size + sink.waiting >= info.total_steps * info.batch_size
        for name, process in processes.items():
            code = process.code
            if code is None or (code == 0 and all_are_here) or sink.step >= info.total_steps:
                continue
            tail = process.tail(self.config.log_lines)
            raise RunError(
                f"the script {name} {exit_words(code)} at step {sink.step} of {info.total_steps}"
                f"{_lacks(tail, self._interpreters[name].path)}{log_words(tail)}\n  (all of it: {process.log})"
            )


def _check_file(name: str, script: Script) -> None:
    path = script.path.expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"env.scripts: {name}: {str(script.path)!r} {what}; give the path of an Atropos script")


def _own_file(script: Script) -> Mapping[str, Any]:
    return {} if script.config is None else read_yaml(script.config.expanduser())


def _write(file: Path, text: str) -> None:
    """Write a file that only this user reads: it may hold the endpoint's token."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file} can't be written: {error.strerror or error}") from error


def _lacks(tail: list[str], python: str) -> str:
    """Return what to do about an end that comes of a missing package."""
    missing = next((line for line in reversed(tail) if "No module named" in line), None)
    if missing is None:
        return ""
    module = missing.rpartition("No module named")[2].strip(" '\"").split(".")[0]
    if module == "tinker_atropos":
        return f": {python} lacks this package; install tinker-atropos and tinker-atropos-atropos there"
    return f": {python} lacks {module}; install it there"
