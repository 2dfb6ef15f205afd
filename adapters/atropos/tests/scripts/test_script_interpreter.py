"""An interpreter's packages are looked at before anything starts; a script gets nothing that is not its own."""

from __future__ import annotations

import sys

import pytest
from tinker_atropos_atropos.script_interpreter import Interpreter, script_environment, warnings_about


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"transformers": "5.24.0"}, "transformers==4.57.6"),
        ({"gymnasium": "1.4.0"}, "gymnasium==1.2.3"),
    ],
)
def test_versions_that_break_scripts_are_said_with_what_to_install(versions: dict[str, str | None], said: str) -> None:
    (line,) = warnings_about(Interpreter(sys.executable, versions))
    assert said in line


@pytest.mark.parametrize("versions", [{"transformers": "4.57.6", "gymnasium": "1.2.3"}, {"transformers": None}, {}])
def test_others_are_not_complained_of(versions: dict[str, str | None]) -> None:
    assert warnings_about(Interpreter(sys.executable, versions)) == []


def test_a_scripts_environment_has_no_key_and_reaches_this_machine_without_a_proxy() -> None:
    base = {"TINKER_API_KEY": "tml-x", "NO_PROXY": "example.org", "SLURM_JOB_NODELIST": "a,b", "PATH": "/bin"}
    base |= {"TINKER_ATROPOS_REDIS_PASSWORD": "secret", "TINKER_ATROPOS_API_TOKEN": "secret"}
    base |= {"TINKER_CREDENTIAL_CMD": "print-secret"}
    environment = script_environment(base)
    assert "TINKER_API_KEY" not in environment
    assert not any("secret" in value for value in environment.values())
    assert "SLURM_JOB_NODELIST" not in environment
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"
    assert environment["no_proxy"] == "127.0.0.1,localhost,::1"
    assert (environment["PATH"], environment["WANDB_MODE"]) == ("/bin", "disabled")
    assert script_environment({"WANDB_MODE": "online"})["WANDB_MODE"] == "online"
