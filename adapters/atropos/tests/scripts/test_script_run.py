"""Real processes: started, watched, ended with their children; every way to fail is said with the end of the log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinker_atropos.errors import ConfigError, PluginError, RunError

POSTS = """
env_id = register()
for number in range(3):
    post("/scored_data", {"env_id": env_id, "scores": [0.0, 1.0, 0.0, 1.0]})
print("posted", flush=True)
time.sleep(600)
"""


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_groups_arrive_and_the_end_of_the_run_ends_the_script(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any, alive: Any
) -> None:
    path = write_script("open('pid', 'w').write(str(os.getpid()))\n" + POSTS)
    task = asyncio.create_task(make_environment(path, cwd=str(path.parent)).run(endpoint, sink))
    await until(lambda: len(sink.groups) == 3, task)
    pid = int((path.parent / "pid").read_text())
    assert alive(pid)
    await cancelled(task)
    assert not alive(pid)
    written = yaml.safe_load((sink.info.folder / "scripts" / "some_env.yaml").read_text())
    assert len(written["openai"]) == 2
    assert "posted" in (sink.info.folder / "scripts" / "some_env.log").read_text()


async def test_the_configuration_is_for_this_user_alone(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any
) -> None:
    task = asyncio.create_task(make_environment(write_script(POSTS)).run(endpoint, sink))
    await until(lambda: sink.groups, task)
    assert (sink.info.folder / "scripts" / "some_env.yaml").stat().st_mode & 0o077 == 0
    await cancelled(task)


async def test_children_are_ended_too_those_that_ignore_sigterm_and_those_that_left_the_group(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any, alive: Any
) -> None:
    path = write_script(
        """
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        children = [
            subprocess.Popen([sys.executable, "-c", stubborn]),
            subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True),
        ]
        open("pids.part", "w").write(" ".join(str(child.pid) for child in children))
        os.rename("pids.part", "pids")
        time.sleep(600)
        """
    )
    task = asyncio.create_task(make_environment(path, cwd=str(path.parent)).run(endpoint, sink))
    pids = [int(pid) for pid in (await until(lambda: _read(path.parent / "pids"), task)).split()]
    assert all(alive(pid) for pid in pids)
    await cancelled(task)
    assert not any(alive(pid) for pid in pids)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("victim", ["parent", "guard"])
async def test_a_killed_parent_leaves_no_script(tmp_path: Path, until: Any, alive: Any, victim: str) -> None:
    starts = f"""
import os, sys, time
from pathlib import Path
from tinker_atropos_atropos.script_process import start_script
code = "import os, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid'); time.sleep(600)"
process = start_script("x", [sys.executable, "-c", code], folder=Path({str(tmp_path)!r}),
    log=Path({str(tmp_path / "log")!r}), environment=os.environ, stop_seconds=1.0)
print(process._process.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    pid = int(await until(lambda: _read(tmp_path / "pid")))
    assert alive(pid)
    os.kill(guard if victim == "guard" else parent.pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    parent.kill()
    parent.wait()
    await until(lambda: not alive(guard))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print('about to fail'); sys.exit(3)", "exit code 3"),
        ("raise RuntimeError('the data set is gone')", "the data set is gone"),
        ("sys.exit(0)", "exit code 0 at step 0 of 2"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import tinker_atropos_gone", "install it there"),
    ],
)
async def test_a_script_that_ends_too_early_ends_the_run_with_its_log(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, body: str, said: str
) -> None:
    with pytest.raises(RunError, match=said) as raised:
        await make_environment(write_script(body)).run(endpoint, sink)
    assert "some_env.log" in str(raised.value)


async def test_a_script_may_end_once_all_groups_are_here(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any
) -> None:
    body = "env_id = register()\n" + 'post("/scored_data", {"env_id": env_id, "scores": [0.0, 1.0]})\n' * 8
    task = asyncio.create_task(make_environment(write_script(body)).run(endpoint, sink))
    await until(lambda: len(sink.groups) == 8, task)
    await asyncio.sleep(1.5)
    assert not task.done()
    await cancelled(task)


async def test_a_silent_script_is_named_then_ended(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_watch.QUIET_SECONDS", 0.5)
    path = write_script("register(); print('thinking about it'); time.sleep(600)")
    with pytest.raises(RunError, match=r"registered and posted no group .*startup_timeout[\s\S]*thinking about it"):
        await make_environment(path, startup_timeout=3.0).run(endpoint, sink)
    assert any("posted no group" in line and "thinking about it" in line for line in sink.lines)


async def test_two_scripts_of_one_file_have_two_names(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any
) -> None:
    path = write_script(POSTS)
    environment = make_environment(path, path)
    assert list(environment.scripts) == ["some_env", "some_env-2"]
    task = asyncio.create_task(environment.run(endpoint, sink))
    await until(lambda: len(sink.groups) == 6, task)
    assert {group.id.rpartition("-")[0] for group in sink.groups} == {"some_env", "some_env-2"}
    await cancelled(task)


async def test_keys_are_not_handed_to_scripts(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-very-secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    path = write_script("print(sorted(os.environ.items())); sys.exit(4)")
    with pytest.raises(RunError):
        await make_environment(path).run(endpoint, sink)
    log = (sink.info.folder / "scripts" / "some_env.log").read_text()
    assert "tml-very-secret" not in log
    assert "127.0.0.1" in log.partition("'NO_PROXY'")[2][:60]


async def test_a_large_log_is_read_from_its_end(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any
) -> None:
    path = write_script("sys.stdout.buffer.write(b'\\xff' * 3_000_000 + b'\\nthe last words\\n'); sys.exit(5)")
    with pytest.raises(RunError, match="the last words") as raised:
        await make_environment(path).run(endpoint, sink)
    assert len(str(raised.value)) < 100_000


def test_an_interpreter_without_atroposlib_is_refused_with_the_way_on(tmp_path: Path, make_environment: Any) -> None:
    path = tmp_path / "env.py"
    path.write_text("")
    with pytest.raises(PluginError, match=r"pip install atroposlib==0\.4\.0"):
        make_environment(path, python=_bare())


def _bare() -> str:
    return getattr(sys, "_base_executable", sys.executable)


def test_wrong_interpreters_and_files_are_refused(tmp_path: Path, write_script: Any, make_environment: Any) -> None:
    path = write_script("")
    for python, said in (
        ("/nowhere/python", "does not exist"),
        (str(tmp_path), "without bin/python"),
        ("sh", "no Python"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_environment(path, python=python)
    with pytest.raises(ConfigError, match="does not exist"):
        make_environment(tmp_path / "gone.py")
    with pytest.raises(ConfigError, match="is a folder"):
        make_environment(tmp_path)


async def test_a_log_begins_anew_before_it_fills_the_disk(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_process.LOG_BYTES", 200_000)
    path = write_script("for number in range(20_000):\n    print(number, 'x' * 100)\nprint('the end'); sys.exit(5)")
    with pytest.raises(RunError, match="the end"):
        await make_environment(path).run(endpoint, sink)
    log = sink.info.folder / "scripts" / "some_env.log"
    assert log.stat().st_size <= 200_000
    assert Path(f"{log}.1").stat().st_size <= 200_000


async def test_a_script_that_talks_while_it_is_ended_is_ended(
    write_script: Any, make_environment: Any, endpoint: Any, sink: Any, until: Any
) -> None:
    path = write_script(
        """
        import signal
        def talk(*_):
            for _ in range(10_000):
                print("y" * 100)
            os._exit(0)
        signal.signal(signal.SIGTERM, talk)
        register()
        post("/scored_data", {"env_id": 0, "scores": [0.0, 1.0]})
        time.sleep(600)
        """
    )
    task = asyncio.create_task(make_environment(path).run(endpoint, sink))
    await until(lambda: sink.groups, task)
    await cancelled(task)
    assert (sink.info.folder / "scripts" / "some_env.log").stat().st_size > 900_000
