"""Plugins are listed without importing them, loaded by name, and a broken one harms nobody else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker_atropos import ConfigError, EnvironmentSpec, PluginError, load_environment
from tinker_atropos.errors import near
from tinker_atropos.registry import Registry, is_file_reference, load_file

SOUND = """
from tinker_atropos import hookimpl, single_turn, Task

@hookimpl
def environment_spec():
    return single_turn("NAME", tasks=lambda split: [Task("1 + 1 =", "2")], reward=lambda c, t: c.text == t.answer)
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a distribution of one module and one entry point, as pip would leave it; returns the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str | None = SOUND, *, group: str = "envs", distribution: str = "") -> str:
        distribution = distribution or f"third-party-{name}"
        module = f"plug_{distribution.replace('-', '_')}"
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source.replace("NAME", name), encoding="utf-8")
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[tinker_atropos.{group}]\n{name} = {module}\n")
        return module

    yield write
    for module in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[module]


def error_of(name: str, kind: str = "env") -> str:
    with pytest.raises(PluginError) as raised:
        Registry().load(kind, name)  # type: ignore[arg-type]
    return str(raised.value)


def test_listing_names_plugin_and_package_and_imports_nothing(install: Install) -> None:
    module = install("sums")
    (found,) = [plugin for plugin in Registry().listed("env") if plugin.name == "sums"]
    assert (found.distribution, found.version, found.module) == ("third-party-sums", "1.5", module)
    assert module not in sys.modules


def test_one_is_loaded_by_name_and_no_other_imported(install: Install) -> None:
    wanted, other = install("sums"), install("words")
    registry = Registry()
    assert registry.load("env", "sums").name == "sums"
    assert registry.load("env", "sums") is registry.load("env", "SUMS")
    assert wanted in sys.modules
    assert other not in sys.modules


def test_hyphen_equals_underscore_and_case_does_not_count(install: Install) -> None:
    install("my_sums")
    assert Registry().load("env", "My-Sums").name == "my_sums"


def test_an_unknown_name_suggests_the_near_one_and_the_way_on(install: Install) -> None:
    install("number_words")
    text = error_of("Number-Wrods")
    assert "Did you mean 'number_words'?" in text
    assert "pip install" not in text  # nobody knows what a package of that name would be
    assert "See `tinker-atropos env list`." in text


def test_an_unknown_name_unlike_any_other_may_be_a_plugin_to_install(install: Install) -> None:
    install("number_words")
    text = error_of("Chess-Games")
    assert "Did you mean" not in text
    assert "Install a plugin (pip install tinker-atropos-chess-games), or see `tinker-atropos env list`." in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("step_timeout", ""),
        ("Group-Sise", "group_size"),
        ("rum", "run"),
        ("model", "model_name"),
        ("Temperature", "eval_temperature"),
        ("xyz", ""),
        ("", ""),
        ("-", ""),
    ],
)
def test_a_near_name_is_a_slip_or_a_part(typed: str, meant: str) -> None:
    known = ["tokenizer_name", "group_size", "run", "model_name", "eval_temperature"]
    assert near(typed, known) == (f" Did you mean {meant!r}?" if meant else "")


BROKEN = {
    "a missing import": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
    "a syntax error": ("def (:\n", "SyntaxError: invalid syntax"),
    "an exit at import": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "no hook": ("x = 1", "the hook environment_spec is missing"),
    "a hook that raises": (SOUND.replace("return ", "raise RuntimeError('no\\nluck') or "), "RuntimeError: no luck"),
    "a hook that exits": (SOUND.replace("return ", "raise SystemExit(4) or "), "SystemExit: 4"),
    "a hook that returns nothing": (SOUND.replace("return ", "unused = "), "environment_spec returned None"),
    "a hook without @hookimpl": (SOUND.replace("@hookimpl", ""), "lacks the @hookimpl decorator"),
    "a misspelt hook": (SOUND.replace("environment_spec", "enviroment_spec"), "Did you mean 'environment_spec'?"),
    "a listener with a wrong argument": (
        SOUND + "\n@hookimpl\ndef on_metrics(stepp): pass\n",
        "Argument(s) {'stepp'}",
    ),
    "another type": (SOUND.replace("return ", "return 3 or "), "returned int, expected EnvironmentSpec"),
    "another name": (SOUND.replace("NAME", "others"), "calls itself 'others'"),
    "no configuration model": (
        "from tinker_atropos import EnvironmentSpec, hookimpl\n@hookimpl\ndef environment_spec():\n"
        "    return EnvironmentSpec(name='NAME', make=print, config=dict)",
        "expected a class derived from EnvironmentConfig",
    ),
    "nothing to make it with": (
        "from tinker_atropos import EnvironmentSpec, hookimpl\n@hookimpl\ndef environment_spec():\n"
        "    return EnvironmentSpec(name='NAME', make=None)",
        "make is None",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_with_its_cause_and_harms_no_other(case: str, install: Install) -> None:
    source, cause = BROKEN[case]
    install("broken", source)
    install("sound")
    registry = Registry()
    errors = {plugin.name: error for plugin, error in registry.status("env")}
    assert cause in errors["broken"]
    assert "'broken' of third-party-broken" in errors["broken"]
    assert "\n" not in errors["broken"]
    assert errors["sound"] == ""
    assert registry.load("env", "sound").name == "sound"


def test_a_plugin_that_prints_leaves_stdout_to_data(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("chatty", "print('hello')\n" + SOUND)
    Registry().load("env", "chatty")
    assert capsys.readouterr().out == ""


def test_two_of_one_name_name_both_packages(install: Install) -> None:
    install("sums", distribution="first-owner")
    install("sums", distribution="second-owner")
    text = error_of("sums")
    assert "first-owner" in text
    assert "second-owner" in text
    assert [plugin.name for plugin in Registry().listed("env")].count("sums") == 2


def test_names_that_differ_only_in_spelling_are_one_name(install: Install) -> None:
    install("my-sums", distribution="first-owner")
    install("my_sums", distribution="second-owner")
    assert "first-owner" in error_of("my_sums")


def test_one_name_in_two_kinds_is_fine(install: Install) -> None:
    install("sums")
    install("sums", "import no_such_module", group="trainers", distribution="a-trainer")
    assert Registry().load("env", "sums").name == "sums"
    assert "a-trainer" in error_of("sums", "trainer")


def test_unreadable_metadata_of_a_stranger_harms_nobody(install: Install, tmp_path: Path) -> None:
    install("sums")
    stranger = tmp_path / "stranger-1.dist-info"
    stranger.mkdir()
    (stranger / "entry_points.txt").write_text("[tinker_atropos.envs]\nno equals sign here\n")
    assert Registry().load("env", "sums").name == "sums"


def test_a_distribution_without_a_name_is_listed_as_unknown(install: Install, tmp_path: Path) -> None:
    install("sums")
    (tmp_path / "third_party_sums-1.5.dist-info" / "METADATA").unlink()
    assert [p.distribution for p in Registry().listed("env") if p.name == "sums"] == ["unknown"]


def test_listeners_of_a_loaded_plugin_are_called(install: Install) -> None:
    module = install("sums", SOUND + "\nseen = []\n@hookimpl\ndef on_metrics(step, metrics): seen.append(step)\n")
    registry = Registry()
    registry.load("env", "sums")
    registry.hooks.on_metrics(step=7, metrics={})
    assert sys.modules[module].seen == [7]


FILE = """from tinker_atropos import single_turn, Task
env = single_turn('mine', lambda split: [Task('a')], lambda c, t: 1)
"""


def test_a_file_is_an_environment_without_packaging(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(FILE)
    assert isinstance(load_file(f"{tmp_path}/my_env.py:env"), EnvironmentSpec)
    assert load_environment(f"{tmp_path}/my_env.py", system_prompt="Be brief.").tasks("train") == 1


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("word = 'a'")
    (tmp_path / "my_env.py").write_text("from beside_it import word\n" + FILE)
    assert load_file(f"{tmp_path}/my_env.py:env").name == "mine"


def test_settings_of_a_loaded_environment_are_checked(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(FILE)
    for settings, says in (({"sytem_prompt": "x"}, "Did you mean 'system_prompt'?"), ({"prompt_format": 3}, "'chat'")):
        with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
            load_environment(f"{tmp_path}/my_env.py", **settings)


@pytest.mark.parametrize(
    ("source", "reference", "says"),
    [
        (None, "my_env.py:env", "does not exist; give it as ./my_env.py:name"),
        (FILE, "my_env.py:evn", "Did you mean 'env'?"),
        ("env = 3", "my_env.py:env", "is int, expected an EnvironmentSpec"),
        ("x = 1\ndef broken(:\n", "my_env.py:env", "line 2"),
        ("x = 1\n\nx.y\n", "my_env.py:env", "has no attribute 'y' (line 3)"),
        ("x = 1\nraise SystemExit(5)", "my_env.py:env", "SystemExit: 5 (line 2)"),
        (FILE.replace("lambda c, t: 1", "None"), "my_env.py:env", "expected a function (completion, task) -> number"),
        (FILE.replace("'mine'", "'my env!'"), "my_env.py:env", "letters, digits"),
    ],
)
def test_a_file_at_fault_is_named_with_the_line(tmp_path: Path, source: str | None, reference: str, says: str) -> None:
    if source is not None:
        (tmp_path / "my_env.py").write_text(source)
    with pytest.raises(PluginError) as raised:
        load_file(f"{tmp_path}/{reference}")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("./my_env.py:env", True), ("my_env.py", True), ("./envs:env", True), ("gsm8k", False), ("a:b", False)],
)
def test_what_means_a_file(name: str, expected: bool) -> None:
    assert is_file_reference(name) is expected
