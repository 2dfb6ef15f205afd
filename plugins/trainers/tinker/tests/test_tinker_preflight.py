from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tinker_atropos.errors import ConfigError, PluginError
from tinker_atropos.registry import Registry
from tinker_atropos_tinker import trainer_spec
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.local import local_adapter
from tinker_atropos_tinker.preflight import HOSTED_MODEL, check, default_model, quote, unused

HOSTED = TinkerConfig()
LOCAL = TinkerConfig(local=True)


def test_without_a_key_both_ways_on_are_named() -> None:
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY=tml-.*--local"):
        check(HOSTED, None)


@pytest.mark.parametrize(("name", "value"), [("TINKER_API_KEY", "tml-x"), ("TINKER_CREDENTIAL_CMD", "pass tinker")])
def test_a_key_or_a_command_that_prints_one_will_do(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    check(HOSTED, None)


def test_a_key_that_the_sdk_has_stored_will_do() -> None:
    stored = Path("~/.tinker/credentials.json").expanduser()
    stored.parent.mkdir(parents=True)
    stored.write_text(
        json.dumps({"version": 1, "default": "a", "keys": {"a": {"type": "manual", "key": "tml-x", "name": "a"}}})
    )
    check(HOSTED, None)


def test_a_key_of_another_service_is_refused_without_printing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "sk-very-secret")
    with pytest.raises(ConfigError, match="begins with 'tml-'") as caught:
        check(HOSTED, None)
    assert "secret" not in str(caught.value)


def test_a_server_on_this_machine_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    check(TinkerConfig(base_url="http://127.0.0.1:1"), HOSTED_MODEL)
    monkeypatch.setenv("TINKER_BASE_URL", "http://localhost:1")
    check(HOSTED, HOSTED_MODEL)


def test_a_hosted_model_of_unknown_size_needs_a_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    with pytest.raises(ConfigError, match=r"tinker.learning_rate.*acme/Big"):
        check(HOSTED, "acme/Big")
    check(TinkerConfig(learning_rate=1e-5), "acme/Big")


def test_local_without_its_adapter_names_the_pip_command() -> None:
    with pytest.raises(PluginError, match="pip install tinker-atropos-local-tinker"):
        local_adapter(Registry([]))


def test_a_broken_adapter_is_said_to_be_broken_not_absent() -> None:
    point = EntryPoint(name="local_tinker", value="no_such_module_here", group="tinker_atropos.adapters")
    with pytest.raises(PluginError, match="can't be imported"):
        local_adapter(Registry([point]))


def test_an_unknown_local_model_is_refused() -> None:
    pytest.importorskip("tinker_atropos_local_tinker")
    check(LOCAL, None)
    with pytest.raises(ConfigError, match="smollm2-135m"):
        check(LOCAL, "smollm2-135")


def test_quote_says_what_is_spent_where() -> None:
    hosted = quote(HOSTED, None)
    assert hosted.hosted
    assert HOSTED_MODEL in " ".join(hosted.lines)
    assert "learning rate   8.3e-05" in hosted.lines
    assert not quote(LOCAL, None).hosted
    assert "0.0005" in " ".join(quote(LOCAL, None).lines)
    assert not quote(TinkerConfig(base_url="http://127.0.0.1:1", learning_rate=0), "m").hosted


def test_keys_without_effect_are_named_only_when_set() -> None:
    assert unused(LOCAL) == {}
    assert set(unused(HOSTED)) == {"run.deterministic"}  # named by the run where it is set
    idle = unused(TinkerConfig(local=True, wandb_group="g", tool_call_parser="hermes"))
    assert set(idle) == {"wandb_group", "tool_call_parser"}


def test_default_models() -> None:
    assert default_model(HOSTED) == HOSTED_MODEL
    assert default_model(LOCAL) == "smollm2-135m"


def test_the_specification_is_complete() -> None:
    spec = trainer_spec()
    assert spec.name == "tinker"
    assert spec.kinds == {"text"}
    assert spec.can == {"token_advantages"}
    assert all([spec.check, spec.quote, spec.unused, spec.default_model, spec.checkpoints, spec.description])


def test_loading_and_checking_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tinker_atropos.registry import Registry\n"
        "from tinker_atropos_tinker import trainer_spec\n"
        "spec = trainer_spec()\n"
        "config = spec.config(base_url='http://127.0.0.1:1', learning_rate=0)\n"
        "spec.check(config, 'm'); spec.quote(config, 'm'); spec.unused(config); spec.make(config)\n"
        "import tinker_atropos_tinker.catalogue, tinker_atropos_tinker.policy\n"
        "print([name for name in ('tinker', 'torch', 'transformers', 'huggingface_hub') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
