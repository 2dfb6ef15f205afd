"""The flat public surface is what it says, and naming it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tinker_atropos

HEAVY = ("torch", "tinker", "numpy", "pydantic", "transformers")


def test_all_is_what_the_package_can_give() -> None:
    assert sorted(tinker_atropos.__all__) == sorted([*tinker_atropos._HOME, "__version__"])
    assert dir(tinker_atropos) == sorted(tinker_atropos.__all__)


@pytest.mark.parametrize("name", tinker_atropos.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(tinker_atropos, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tinker_atropos.no_such_name


@pytest.mark.parametrize(
    "code",
    [
        "import tinker_atropos.cli",
        "from tinker_atropos.cli import cli; cli.main(['--help'], standalone_mode=False)",
        "from tinker_atropos.cli import cli; cli.main(['run', '--help'], standalone_mode=False)",
    ],
)
def test_help_loads_nothing_heavy(code: str) -> None:
    probe = f"{code}\nimport sys\nprint(*sorted({set(HEAVY)!r} & sys.modules.keys()), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.strip() == ""
