"""atroposlib's own tests of its API, where TINKER_ATROPOS_ATROPOSLIB names a folder that holds atroposlib 0.4.0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    "TINKER_ATROPOS_ATROPOSLIB" not in os.environ,
    reason="needs TINKER_ATROPOS_ATROPOSLIB, a folder with atroposlib 0.4.0 (`make conformance` fetches it)",
)
def test_atroposlib_s_own_protocol_tests_pass() -> None:
    command = [sys.executable, str(ROOT / "conformance" / "protocol.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok ") == 3
