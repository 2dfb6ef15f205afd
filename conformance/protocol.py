"""`make conformance`: atroposlib's own tests of its trajectory API, unchanged, against ours.

Installs the wheel atroposlib 0.4.0 from the package index into a folder of its own (without what it depends on: the
tests need none of it) and runs the three test files that speak to the API. They start `atroposlib.cli.run_api` on port
8000 of localhost; replaced are only that command, by `tinker-atropos run-api`, and that port, by a free one.
`TINKER_ATROPOS_ATROPOSLIB` names a folder that holds atroposlib already.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ATROPOSLIB = "atroposlib==0.4.0"
FILES = {"test_api_compression.py": 7, "test_api_messages_handling.py": 26, "test_api_legacy.py": 3}
PORT = "TINKER_ATROPOS_PROTOCOL_PORT"


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: point the tests at our API."""
    import requests

    port = os.environ[PORT]
    real_popen, real_request = subprocess.Popen, requests.Session.request

    def popen(command: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(command, list) and "atroposlib.cli.run_api" in command:
            ours = [sys.executable, "-m", "tinker_atropos", "run-api"]
            rest = command[command.index("atroposlib.cli.run_api") + 1 :]
            command = [*ours, *(port if word == "8000" else word for word in rest)]
            settings |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return real_popen(command, *arguments, **settings)

    def request(self: Any, method: str, url: str, *arguments: Any, **settings: Any) -> Any:
        url = url.replace("http://localhost:8000/", f"http://localhost:{port}/")
        return real_request(self, method, url, *arguments, **settings)

    subprocess.Popen = popen  # type: ignore[assignment, misc]
    requests.Session.request = request  # type: ignore[assignment, method-assign]


def install(target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), ATROPOSLIB], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_file(site: Path, name: str) -> tuple[int, str]:
    """Run one file of tests; return how many passed, and what pytest said."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(site), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, PORT: str(free_port())}
    # A configuration of its own: this repository's does not fit another's tests.
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "protocol", "-c", os.devnull, "--rootdir", str(site)),
        *("-p", "no:cacheprovider", str(site / "atroposlib" / "tests" / name)),
    ]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=300)
    passed = re.search(r"(\d+) passed", done.stdout)
    return (int(passed[1]) if passed and done.returncode == 0 else 0), done.stdout + done.stderr


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        given = os.environ.get("TINKER_ATROPOS_ATROPOSLIB")
        site = Path(given).resolve() if given else Path(temporary) / "site"
        if not given:
            install(site)
        for name, expected in FILES.items():
            passed, said = run_file(site, name)
            good = passed == expected
            print(
                f"{'ok  ' if good else 'FAIL'} {name}: {passed} of {expected}" + ("" if good else f"\n{said[-3000:]}"),
                flush=True,
            )
            failed |= not good
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
