"""The command line: what is typed wrong ends with code 2, one line and nothing heavy; what is right does its work."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.cli import main
from tinker_atropos.cli.output import count, size, when
from tinker_atropos.registry import Registry
from tinker_atropos.terminal import program
from tinker_atropos.yaml_file import read_yaml

# A package as a stranger would write it: environments, trainers and an adapter in one module each.
PLUGINS = {
    "envs": {
        "sums": """
from tinker_atropos import Task, hookimpl, single_turn

@hookimpl
def environment_spec():
    return single_turn("sums", lambda split: [Task("1 + 1 =", "2")], lambda c, t: c.text == t.answer)
""",
        "walker": """
from tinker_atropos import EnvironmentSpec, hookimpl

@hookimpl
def environment_spec():
    return EnvironmentSpec("walker", make=print, kind="control", description="two\\nlines \\x1b[31m")
""",
        "shattered": "import no_such_module_anywhere",
    },
    "trainers": {
        "stubborn": """
import asyncio
from tinker_atropos import TrainerSpec, hookimpl

class Trainer:
    def __init__(self, config):
        pass

    async def start(self, spec, resume):
        spec.say("the trainer is up")
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if spec.name != "stubborn":
                    raise
                spec.say("not yet")

    async def close(self):
        pass

async def open_policy(ref, config):
    raise AssertionError

@hookimpl
def trainer_spec():
    return TrainerSpec("stubborn", make=Trainer, open_policy=open_policy, kinds=frozenset({"text"}))
""",
        "walks": """
from tinker_atropos import TrainerSpec, hookimpl

@hookimpl
def trainer_spec():
    return TrainerSpec("walks", make=print, open_policy=print, kinds=frozenset({"control"}))
""",
    },
    "adapters": {
        "plain_chat": """
from tinker_atropos import AdapterSpec, hookimpl

@hookimpl
def adapter_spec():
    return AdapterSpec("plain_chat", make=lambda config: None, sessions=True)
"""
    },
}

HEAVY = ("torch", "tinker", "transformers", "datasets", "grpc", "mujoco", "accelerate", "peft")

# Runs many command lines in one process, and says after each how it ended and what it had loaded by then.
PROBE = """
import contextlib, io, json, sys
from tinker_atropos.cli import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(set(json.loads(sys.argv[2])) & sys.modules.keys())]))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    loaded: list[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stranger's package, to be put on the path, and a few files to stumble over."""
    root = tmp_path_factory.mktemp("place")
    info = root / "a_stranger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-stranger\nVersion: 1\n")
    lines = []
    for group, plugins in PLUGINS.items():
        lines.append(f"[tinker_atropos.{group}]")
        for name, source in plugins.items():
            (root / f"stranger_{name}.py").write_text(source)
            lines.append(f"{name} = stranger_{name}")
    (info / "entry_points.txt").write_text("\n".join(lines))
    (root / "a_file").write_text("")
    (root / "bad.yaml").write_text("env:\n  group_sise: 3\n")
    (root / "torn.yaml").write_text("env: [\n")
    (root / "syntax.py").write_text("x = 1\nenv = (\n")
    (root / "interrupted.py").write_text("raise KeyboardInterrupt")
    (root / "number.py").write_text("env = 3")
    (root / "runs" / "old").mkdir(parents=True)
    (root / "runs" / "old" / "config.yaml").write_text("run: {env: sums}\n")
    return root


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(place), "TERM": "dumb"}


def probe(place: Path, commands: list[list[str]], heavy: tuple[str, ...] = HEAVY) -> list[Ended]:
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands), json.dumps(heavy)],
        capture_output=True,
        text=True,
        cwd=place,
        env=environment(place),
        timeout=120,
        check=True,
    )
    return [Ended(*json.loads(line)) for line in ended.stdout.splitlines()]


RUN = ["run", "--env", "sums", "--trainer", "stubborn", "--set", "rollout.adapter=plain_chat"]

WRONG: list[tuple[list[str], str]] = [
    (["rum"], "Did you mean 'run'?"),
    (["run", "--stepps", "3"], "No such option '--stepps'"),
    (["run", "--steps", "three"], "'three' is not a valid integer"),
    (["run", "gsm8k"], "unexpected extra argument"),
    ([*RUN, "--env.group_size", "8"], "Other settings are written --set env.group_size=8."),
    ([*RUN, "env.group_size=8"], "Other settings are written --set env.group_size=8."),
    ([*RUN, "--env.group_size=8"], "Other settings are written --set env.group_size=8."),
    (["run", "--resume", "old"], "To continue that run say --resume --name old."),
    (["run"], "run.env: not given; say `--env gsm8k`, or your own `--env ./my_env.py:env`. Installed: "),
    (["run", "--env", "sums"], "run.trainer: not given; say `--trainer tinker`. Installed: "),
    (["run", "--env", "sum", "--trainer", "stubborn"], "no environment is called 'sum'. Did you mean 'sums'?"),
    (["run", "--env", "sums", "--trainer", "stuborn"], "no trainer is called 'stuborn'. Did you mean 'stubborn'?"),
    (["run", "--env", "shattered", "--trainer", "stubborn"], "'shattered' of a-stranger can't be imported"),
    (
        ["run", "--env", "walker", "--trainer", "stubborn"],
        "kind 'control', and trainer 'stubborn' learns text. Installed trainers that could: ",
    ),
    ([*RUN, "--steps", "3", "--steps", "4"], "--steps is given 2 times, as 3 and 4; keep one"),
    ([*RUN, "--steps", "3", "--set", "env.total_steps=4"], "given as 4 (--set env.total_steps) and 3 (--steps)"),
    ([*RUN, "--steps", "0"], "env.total_steps: input should be greater than or equal to 1, got 0 (int), from --steps"),
    ([*RUN, "--lora-rank", "3"], "trainer.lora_rank: unknown key"),
    ([*RUN, "--set", "env.group_sise=3"], "Did you mean 'group_size'?"),
    ([*RUN, "--set", 'env.group_size="3"'], "got '3' (str), from --set env.group_size"),
    ([*RUN, "--set", "group_size"], "expected section.key=value"),
    ([*RUN, "--batch-size", "7"], "must be a multiple of env.group_size 16"),
    ([*RUN, "-c", "bad.yaml"], "env.group_sise: unknown key. Did you mean 'group_size'?"),
    ([*RUN, "-c", "torn.yaml"], "torn.yaml:2: "),
    ([*RUN, "-c", "none.yaml"], "configuration file 'none.yaml' does not exist"),
    ([*RUN, "--output", "a_file/runs"], "'a_file' is a file; choose another with --output"),
    ([*RUN, "--name", "a/b"], "run.name: 'a/b' can't name a folder"),
    ([*RUN, "--name", "\x1b[31m"], "run.name: '\\x1b[31m' can't name a folder"),
    (["run", "--resume"], "--resume: which run? Say --name NAME. Runs there: old"),
    (["run", "--resume", "--name", "odd"], "there is no run called 'odd' in 'runs'. Runs there: old"),
    (["run", "--resume", "--name", "old", "--set", "run.output=5"], "run.output: input should be a valid string"),
    (["run", "--env", "./none.py:env", "--trainer", "stubborn"], "environment file './none.py' does not exist"),
    (["run", "--env", "syntax.py:env", "--trainer", "stubborn"], "syntax.py, line 2"),
    (["run", "--env", "number.py:evn", "--trainer", "stubborn"], "defines no 'evn'"),
    (["run", "--env", "number.py", "--trainer", "stubborn"], "is int, expected an EnvironmentSpec"),
    (["env", "inf"], "Did you mean 'info'?"),
    (["env", "info"], "Missing argument 'NAME'"),
    (["env", "info", "sum"], "Did you mean 'sums'?"),
    (["env", "list", "--format", "yaml"], "'yaml' is not one of 'table', 'json'"),
    (["trainer", "info", "walk"], "Did you mean 'walks'?"),
    (["serve", "tinkr"], "nothing installed serves 'tinkr'."),
    (["checkpoint", "list", "--local"], "name it with --run NAME"),
    (["checkpoint", "list", "--run", "new"], "there is no run 'new' in 'runs'; runs there: old"),
    (["checkpoint", "list", "--run", "old"], "config.yaml: damaged, it names no run.trainer"),
]


def test_what_is_typed_wrong_ends_with_code_2_in_one_line_before_anything_heavy(place: Path) -> None:
    for (arguments, says), ended in zip(WRONG, probe(place, [line for line, _ in WRONG]), strict=True):
        assert says in ended.err, (arguments, ended)
        assert (ended.code, ended.out, ended.loaded) == (2, "", []), (arguments, ended)
        assert ended.err.startswith("error: "), (arguments, ended)
        assert ended.err.count("\n") == 1, (arguments, ended)
        assert "\x1b" not in ended.err


COMMANDS = [
    [],
    ["run"],
    ["env"],
    ["env", "list"],
    ["env", "info"],
    ["trainer"],
    ["trainer", "list"],
    ["trainer", "info"],
    ["checkpoint"],
    ["checkpoint", "list"],
    ["checkpoint", "info"],
    ["checkpoint", "download"],
]


def test_help_of_every_command_works_and_loads_nothing(place: Path) -> None:
    commands = [[*command, option] for command in COMMANDS for option in ("--help", "-h")]
    for command, ended in zip(commands, probe(place, commands, (*HEAVY, "numpy", "pydantic", "pluggy")), strict=True):
        assert (ended.code, ended.err, ended.loaded) == (0, "", []), (command, ended)
        assert "Usage:" in ended.out
        assert "..." not in ended.out.partition("Commands:")[2], "a summary was cut"


def test_what_asks_for_nothing_shows_the_help_and_fails(place: Path) -> None:
    for ended in probe(place, [[], ["env"]]):
        assert (ended.code, ended.out) == (2, "")
        assert "Commands:" in ended.err
    (version,) = probe(place, [["--version"]])
    assert (version.code, version.out.startswith("tinker-atropos, version ")) == (0, True)


def test_serve_help_lists_what_adapters_serve_and_loads_nothing_heavy(place: Path) -> None:
    (ended,) = probe(place, [["serve", "--help"]])
    assert (ended.code, ended.loaded) == (0, [])


def test_lists_and_descriptions_as_tables_and_as_json(place: Path) -> None:
    commands = [
        ["env", "list"],
        ["env", "list", "--format", "json"],
        ["trainer", "list", "--format", "json"],
        ["env", "info", "SUMS", "--format", "json"],
        ["trainer", "info", "walks", "--format", "json"],
        ["env", "info", "sums"],
        ["env", "info", "walker"],
    ]
    table, envs, trainers, sums, walks, plain, walker = probe(place, commands)
    assert {ended.code for ended in (table, envs, trainers, sums, walks, plain, walker)} == {0}
    rows = {row["name"]: row for row in json.loads(envs.out)}
    assert rows["sums"]["package"] == "a-stranger 1"
    assert rows["sums"]["status"] == "ok"
    assert rows["shattered"]["status"].startswith("broken: ")
    assert "no_such_module_anywhere" in rows["shattered"]["status"]
    assert {row["name"] for row in json.loads(trainers.out)} >= {"stubborn", "walks"}
    (described,) = json.loads(sums.out)
    assert described["kind"] == "text"
    assert "env.system_prompt" in [row["setting"] for row in described["settings"]]
    assert json.loads(walks.out)[0]["kinds"] == ["control"]
    assert "env.prompt_format" in plain.out
    assert len(table.out.splitlines()) == 1 + len(rows)
    assert "\x1b" not in walker.out
    assert table.loaded == []


def test_a_dry_run_prints_a_file_and_starts_nothing(place: Path) -> None:
    (ended,) = probe(place, [[*RUN, "--steps", "7", "--set", "env.system_prompt=Be brief: no words", "--dry-run"]])
    assert (ended.code, ended.err, ended.loaded) == (0, "", [])
    printed = place / "printed.yaml"
    printed.write_text(ended.out)
    assert read_yaml(printed)["env"]["total_steps"] == 7
    assert read_yaml(printed)["sums"]["system_prompt"] == "Be brief: no words"
    (again,) = probe(place, [["run", "-c", "printed.yaml", "--dry-run"]])
    assert again.code == 0
    assert [line.partition("  # ")[0] for line in again.out.splitlines()] == [
        line.partition("  # ")[0] for line in ended.out.splitlines()
    ]
    assert not (place / "runs" / read_yaml(printed)["run"]["name"]).exists()


def start(place: Path, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tinker_atropos", *arguments],
        cwd=place,
        env=environment(place),
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


def test_a_reader_who_has_gone_is_no_traceback(place: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(place, "env", "info", "sums", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode not in (0, 2)


THREAD = """
import atexit, sys, threading
from tinker_atropos import Task, single_turn

threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "tidied up", file=sys.stderr)
env = single_turn("lasting", lambda split: [Task("1 + 1 =", "2")], lambda c, t: 0)
"""


def test_a_thread_that_an_environment_leaves_does_not_keep_the_process(place: Path) -> None:
    (place / "thread.py").write_text(THREAD)
    process = start(place, "env", "info", "thread.py")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "tidied up\n")
    assert out.startswith("lasting: ")


def test_an_interrupt_before_the_run_is_no_traceback(place: Path) -> None:
    (ended,) = probe(place, [["run", "--env", "interrupted.py", "--trainer", "stubborn"]])
    assert (ended.code, ended.err.strip()) == (130, "aborted")


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended before it said {text!r}")


@pytest.fixture
def hang_up_counts() -> Iterator[None]:
    """A test run under `nohup` ignores SIGHUP, and so would what it starts: that is respected on purpose."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_counts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_interrupt_at_the_start_stops_cleanly_and_leaves_the_name_free(place: Path, number: signal.Signals) -> None:
    process = start(place, *RUN, "--name", "patient")
    read_until(process, "the trainer is up")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this step" in err
    assert "the same command begins again" in err
    assert "error" not in err
    assert not (place / "runs" / "patient" / "config.yaml").exists()
    assert "Traceback" not in err


def test_a_second_interrupt_stops_at_once(place: Path) -> None:
    process = start(place, *RUN, "--name", "stubborn")
    read_until(process, "the trainer is up")
    process.send_signal(signal.SIGINT)
    read_until(process, "not yet")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


OWN = """
from tinker_atropos import Task, single_turn

def tasks(split):
    return [Task(f"{split} {n}:", str(n)) for n in range(20)]

def even(completion, task):
    return completion.text.isdigit() and int(completion.text) % 2 == 0

env = single_turn("my_own", tasks, even)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry) -> Path:
    """A folder with an environment of ten lines; `run` finds the fake trainer there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("tinker_atropos.registry.Registry", lambda: registry)
    (tmp_path / "my_env.py").write_text(OWN)
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


SMALL = ["--trainer", "fake", "--group-size", "4", "--batch-size", "8", "--steps", "2"]
FAKES = ["--set", "rollout.adapter=fake_sessions", "--set", "env.steps_per_eval=1"]


def test_a_file_of_ten_lines_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--env", "./my_env.py:env", *SMALL, *FAKES, "--name", "my run", "--output", "out") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line[:10] for line in steps] == ["step 1 / 2", "step 2 / 2"]
    assert sum("test problem 1" in line for line in lines) == 2
    weights = next(line for line in lines if line.startswith("weights ")).split(" ", 1)[1]
    assert Path(weights).is_file()
    assert lines[-3:] == [
        "  tinker-atropos checkpoint download --run 'my run' --output out",
        "  tinker-atropos checkpoint list --run 'my run' --output out",
        "  tinker-atropos run --resume --name 'my run' --output out --steps 4",
    ]
    assert "2 steps of 8 episodes (2 groups of 4)" in err
    assert {row["step"] for row in map(json.loads, (here / "out/my run/metrics.jsonl").open())} == {0, 1, 2}

    again = ["run", "--resume", "--name", "my run", "--output", "out", "--steps", "3"]
    assert call(*again) == 0
    assert "step 3 / 3" in capsys.readouterr().out
    assert call("run", "--env", "./my_env.py:env", *SMALL, *FAKES, "--name", "my run", "--output", "out") == 2
    assert "holds a run already; continue it with --resume" in capsys.readouterr().err


def test_a_run_is_not_resumed_with_another_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--env", "./my_env.py:env", *SMALL, *FAKES, "--name", "mine") == 0
    assert call("run", "--resume", "--name", "mine", "--group-size", "2") == 2
    assert "env.group_size was 4, now 2" in capsys.readouterr().err


def test_a_reward_that_fails_ends_the_run_with_its_cause(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_env.py").write_text(OWN.replace("return completion.text.isdigit() and", "return float('nan') or"))
    assert call("run", "--env", "my_env.py", *SMALL, *FAKES) != 0
    err = capsys.readouterr().err
    assert "reward 'even' of environment 'my_own' returned nan" in err
    assert "Traceback" not in err


def test_next_commands_name_the_program_as_it_can_be_called(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == "tinker-atropos"
    monkeypatch.setattr("shutil.which", lambda name: None)
    binaries = here / "my venv" / "bin"
    binaries.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    assert program() == "'my venv/bin/python' -m tinker_atropos"
    (binaries / "tinker-atropos").touch()
    assert program() == "'my venv/bin/tinker-atropos'"
    monkeypatch.chdir(binaries)
    assert program() == "./tinker-atropos"


def test_sys_exit_in_a_plugin_is_an_error_of_the_run(
    here: Path, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.on_update = lambda step: sys.exit(0)
    assert call("run", "--env", "my_env.py", *SMALL, *FAKES, "--name", "exits", "--output", "out") == 1
    err = capsys.readouterr().err
    assert "error: something called sys.exit(0)" in err
    assert "`tinker-atropos run --resume --name exits --output out`" in err


def test_a_reader_who_goes_away_does_not_end_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert call("run", "--env", "my_env.py", *SMALL, *FAKES, "--name", "deaf") == 0
    assert capsys.readouterr().err.count("stdout is closed") == 1
    assert len((here / "runs" / "deaf" / "metrics.jsonl").read_text().splitlines()) == 3


def test_numbers_and_times_as_people_read_them() -> None:
    assert (count(1, "step"), count(2, "group"), count(0, "step")) == ("1 step", "2 groups", "0 steps")
    assert [size(number) for number in (None, 999, 1000, 999_960, 53_700_000, 2 * 10**15)] == [
        *(None, "999 B", "1.0 kB", "1.0 MB", "53.7 MB", "2000.0 TB")
    ]
    assert when("2026-01-02T03:04:05.678901+01:00") == "2026-01-02 02:04 UTC"
    assert (when(None), when("2026-01-02T03:04:05"), when("soon")) == (None, "2026-01-02 03:04", "soon")


def test_the_quickstart_takes_name_and_folder_from_its_options() -> None:
    script = Path(__file__).parents[2] / "scripts" / "quickstart.py"
    namespace = runpy.run_path(str(script))
    plan, root = namespace["plan"], namespace["ROOT"]
    options, metrics = plan(["--steps", "8"])
    assert options[:3] == ["--steps", "8", "--name"]
    assert metrics == root / "runs" / options[3] / "metrics.jsonl"
    assert plan(["--name=x", "--output", "out"]) == (["--name=x", "--output", "out"], root / "out/x/metrics.jsonl")
    assert plan(["--set", "run.name=x"]) == (["--set", "run.name=x"], root / "runs/x/metrics.jsonl")
    assert plan(["--dry-run"])[1] is None
    assert plan(["--resume", "--name", "x"]) == (["--resume", "--name", "x"], None)
