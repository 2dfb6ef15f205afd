"""`tinker-atropos run-api`: where it may listen, TLS, and what it says about what it can't do."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "tinker_atropos", "run-api"]


def refused(*arguments: str | Path) -> str:
    ended = subprocess.run([*COMMAND, "--port", "0", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_it_is_a_command_that_nothing_is_imported_for() -> None:
    probe = (
        "from tinker_atropos.cli import cli; cli.main(['--help'], standalone_mode=False)\n"
        "import sys; print('aiohttp' in sys.modules, 'tinker_atropos_atropos' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "run-api" in said
    assert said.endswith("False False\n")


def test_beyond_loopback_it_wants_tls_and_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef0123\n")
    assert "--tls-cert and --tls-key" in refused("--host", "0.0.0.0", "--token-file", tmp_path / "token")
    assert "give --token-file" in refused("--host", "0.0.0.0")
    (tmp_path / "short").write_text("abc\n")
    assert "16 or more characters" in refused("--host", "0.0.0.0", "--token-file", tmp_path / "short")
    assert "--token-file" in refused("--token-file", tmp_path / "absent")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--state", "disk"), "state 'disk' is unknown"),
        (("--cap", "0"), "--cap 0"),
        (("--hold", "-1"), "--hold -1"),
        (("--host", "nowhere.example"), "is no address"),
        (("--tls-cert", "x.pem"), "both --tls-cert and --tls-key"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_with_a_token(tmp_path: Path) -> None:
    import urllib.request

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
        ],
        check=True,
        capture_output=True,
    )
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    files = ("--tls-cert", str(certificate), "--tls-key", str(key), "--token-file", str(token))
    server = subprocess.Popen(
        [*COMMAND, "--port", "0", *files], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        assert url.startswith("https://")
        request = urllib.request.Request(f"{url}/info", headers={"Authorization": "Bearer 0123456789abcdef0123"})
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()
