"""What a user types for scripts: references, arguments, allocations; wrong ones are refused with the way on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.config import validate
from tinker_atropos.errors import ConfigError
from tinker_atropos_atropos.script import environment_spec, make, read_references
from tinker_atropos_atropos.script_config import AtroposConfig, parse_reference, script_names


def settings(**values: Any) -> AtroposConfig:
    return validate(AtroposConfig, values, path="env")


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("a.py", {"path": "a.py"}),
        ("a.py=2", {"path": "a.py", "weight": 2.0}),
        ("dir=x/a.py", {"path": "dir=x/a.py"}),
        ("dir=x/a.py=0.5", {"path": "dir=x/a.py", "weight": 0.5}),
        ("C:a.py", {"path": "C:a.py"}),
    ],
)
def test_a_reference_is_a_path_and_perhaps_a_weight(text: str, entry: dict[str, Any]) -> None:
    assert parse_reference(text) == entry


@pytest.mark.parametrize("text", ["", "=2", "a.py=", "a.py=heavy"])
def test_a_reference_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="atropos:"):
        parse_reference(text)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_is_a_finite_number_above_0(weight: str) -> None:
    with pytest.raises(ConfigError):
        settings(**read_references([f"a.py={weight}"]))


def test_several_references_are_several_scripts() -> None:
    config = settings(**read_references(["a.py=2", "b.py", "c/a.py"]))
    assert [(script.path, script.weight) for script in config.scripts] == [
        (Path("a.py"), 2.0),
        (Path("b.py"), 1.0),
        (Path("c/a.py"), 1.0),
    ]
    assert script_names(config.scripts) == ["a", "b", "a-2"]


def test_names_are_also_names_of_files() -> None:
    names = [{"path": "x.py", "name": name} for name in ("a/b", "a_b", "../..", "ü m", "…", "a" * 300)]
    assert script_names(settings(scripts=names).scripts) == ["a_b", "a_b-2", "_..", "ü_m", "_", "a" * 80]


@pytest.mark.parametrize(
    "argument",
    [
        "--config",
        "--config=x.yaml",
        "--slurm",
        "--testing=true",
        "--openai.base_url",
        "--env.rollout_server_url=http://elsewhere",
        "--env.tokenizer_name",
        "--env.total_steps",
    ],
)
def test_an_argument_that_would_cut_the_script_off_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="can't be given to a script"):
        settings(scripts=[{"path": "a.py", "args": [argument]}])
    with pytest.raises(ConfigError, match="can't be given to a script"):
        settings(args=[argument])


def test_other_arguments_pass() -> None:
    assert settings(args=["--env.difficulty", "hard", "--env.configuration=x"]).args[1] == "hard"


def test_allocations_are_no_more_than_a_batch() -> None:
    with pytest.raises(ConfigError, match="no more than 1 to give"):
        settings(scripts=[{"path": "a.py", "min_allocation": 0.7}, {"path": "b.py", "min_allocation": 0.4}])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port", 3])
def test_an_address_is_an_address(url: Any) -> None:
    with pytest.raises(ConfigError, match="api_url"):
        settings(api_url=url)


@pytest.mark.parametrize("url", ["https://:s3cret@host:8000", "http://user:s3cret@host", "https://s3cret@host:x"])
def test_an_address_holds_no_token_and_none_is_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="TINKER_ATROPOS_API_TOKEN") as refused:
        settings(api_url=url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "--env atropos:path/to/script.py"),
        ({"scripts": [{"path": "a.py"}], "api_url": "http://127.0.0.1:8000"}, "not both"),
        ({"scripts": [{"path": "gone.py"}]}, "does not exist"),
    ],
)
def test_an_environment_that_can_not_be_made_says_why(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(settings(**values))


def test_no_setting_is_called_as_one_that_every_run_has() -> None:
    from tinker_atropos.sections import EnvSection

    assert not set(EnvSection.model_fields) & set(environment_spec().config.model_fields)
