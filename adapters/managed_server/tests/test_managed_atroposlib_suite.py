"""atroposlib's own tests of its ManagedServer and of its proxy, run as they are in its wheel, against the endpoints."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PYTHON = os.environ.get("TINKER_ATROPOS_ATROPOSLIB_PYTHON") or (
    sys.executable if importlib.util.find_spec("atroposlib") else ""
)
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="atroposlib is not installed; TINKER_ATROPOS_ATROPOSLIB_PYTHON may name a Python that has it"
)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizers):
    """A tokenizer that both interpreters read."""
    from tinker_atropos_managed_server.client_tokenizer import write_client_tokenizer

    return write_client_tokenizer(tokenizers("chatml"), None, tmp_path_factory.mktemp("tokenizer"))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_theirs(name, folder, tmp_path, *arguments, **environment):
    """Run one of atroposlib's test files; return how many passed, failed and were skipped."""
    where = [PYTHON, "-c", "import atroposlib, os; print(os.path.dirname(atroposlib.__file__))"]
    hidden = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    package = subprocess.run(where, capture_output=True, text=True, check=True, timeout=120, env=hidden).stdout.strip()
    tests = Path(package) / "tests" / name
    # Our own packages are for the backend alone: it runs in this interpreter.
    backend = tmp_path / "backend"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    backend.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    backend.chmod(0o755)
    command = [PYTHON, "-m", "pytest", str(tests), "-p", "atroposlib_plugin", "-p", "no:cacheprovider", "-q", "-rfE"]
    environment = {
        **hidden,
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "ATROPOSLIB_BACKEND_PYTHON": str(backend),
        "ATROPOSLIB_TOKENIZER": folder,
        **environment,
    }
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=400, env=environment, cwd=tmp_path
    )
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    assert not {"failed", "error", "errors"} & counts.keys(), done.stdout[-4000:] + done.stderr[-1000:]
    return counts


def test_the_proxys_integration_tests_pass(folder, tmp_path):
    name = "test_managed_server_proxy_integration.py"
    counts = run_theirs(name, folder, tmp_path, "--run-gpu", ATROPOSLIB_PORT=str(free_port()))
    assert counts["passed"] == 8


def test_the_managed_servers_tests_pass_over_http(folder, tmp_path):
    port, replies = free_port(), tmp_path / "replies.json"
    environment = {
        **os.environ,
        "ATROPOSLIB_REPLIES": str(replies),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(HERE / "atroposlib_backend.py"), "--model", folder, "--port", str(port)]
    backend = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except urllib.error.URLError:
                assert backend.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
        url = f"http://127.0.0.1:{port}/v1"
        counts = run_theirs(
            "test_managed_server.py", folder, tmp_path, ATROPOSLIB_URL=url, ATROPOSLIB_REPLIES=str(replies)
        )
        assert counts["passed"] == 14  # the other five are for tools, and ask for vLLM
    finally:
        backend.terminate()
        backend.wait(30)
