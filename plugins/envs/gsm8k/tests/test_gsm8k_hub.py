"""The hub, unreachable: a clear error, or the copy in the local cache. Each case in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parent / "gsm8k_fixture.jsonl"

LOAD = """
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.environment import make
try:
    environment = make(Gsm8kConfig(**{settings!r}))
    print(environment.tasks("train"), environment.tasks("test"))
except Exception as error:
    print(type(error).__name__, error)
"""

# Leaves in the cache of `datasets` what an earlier download of openai/gsm8k leaves there.
FILL = """
import sys, datasets
builder = datasets.load_dataset_builder("json", "main", data_files={"train": sys.argv[1], "test": sys.argv[1]})
builder.dataset_name = "gsm8k"
builder.download_and_prepare(sys.argv[2] + "/openai___gsm8k/main/0.0.0/hash")
"""


def python(code: str, *arguments: str, home: Path, **environ: str) -> str:
    """Run code with an empty hub cache below `home`; the hub's address is read once, when its library is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, "PYTHONPATH": paths, "HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "cache"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


WAYS_ON = ("can't be reached", "env.dataset=FOLDER", "env.dataset=gsm_symbolic", "env.dataset=arithmetic")


def test_a_hub_that_refuses_is_an_error_that_names_the_ways_on(tmp_path: Path) -> None:
    out = python(LOAD.format(settings={}), home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert out.startswith("DataError env.dataset: ")
    assert all(words in out for words in (*WAYS_ON, "openai/gsm8k", "127.0.0.1:9"))


def test_a_hub_that_never_answers_is_such_an_error_too(tmp_path: Path, silent_hub: str) -> None:
    out = python(LOAD.format(settings={}), home=tmp_path, HF_ENDPOINT=silent_hub)
    assert out.startswith("DataError env.dataset: ")
    assert all(words in out for words in WAYS_ON)


@pytest.mark.parametrize("environ", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path, environ: dict[str, str]) -> None:
    python(FILL, str(FIXTURE), str(tmp_path / "cache"), home=tmp_path)
    assert python(LOAD.format(settings={"test_tasks": 3}), home=tmp_path, **environ) == "8 3"
    other = python(LOAD.format(settings={"subset": "socratic"}), home=tmp_path, **environ)
    assert other.startswith("DataError env.dataset: ")


def test_nothing_else_asks_the_hub_or_imports_its_libraries(tmp_path: Path) -> None:
    code = (
        LOAD + "\nimport sys\nheavy = ('datasets', 'huggingface_hub', 'math_verify')"
        "\nprint([name for name in heavy if name in sys.modules])"
    )
    for dataset in ("arithmetic", "gsm_symbolic", str(FIXTURE)):
        out = python(code.format(settings={"dataset": dataset}), home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
        assert out.splitlines()[-1] == "[]", dataset


def test_the_plugin_module_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, tinker_atropos_gsm8k as plugin; name = plugin.environment_spec().name\n"
        "heavy = ('datasets', 'math_verify', 'sympy', 'reasoning_gym', 'pyarrow', 'torch')\n"
        "print(name, [name for name in heavy if name in sys.modules])"
    )
    assert python(code, home=tmp_path) == "gsm8k []"
