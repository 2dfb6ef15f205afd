"""The plugin: found by name, light to import."""

from __future__ import annotations

import subprocess
import sys

from tinker_atropos.registry import Registry


def test_it_loads_by_name_and_opens_sessions(tokenizers):
    spec = Registry().load("adapter", "managed-server")
    assert spec.sessions
    session = spec.make(spec.config()).open(tokenizers("chatml"), context_length=50)
    session.observe([{"role": "user", "content": "hi"}])
    assert session.prompt(5).stop is None


def test_importing_it_loads_no_transformers():
    code = "import sys, tinker_atropos_managed_server as m; m.adapter_spec(); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
