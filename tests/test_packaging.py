"""The root's development install holds exactly what the distributions publish."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tinker_atropos
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SDK = ROOT / "sdk"
KINDS = {"plugins/envs": "envs", "plugins/trainers": "trainers", "adapters": "adapters"}
PLUGINS = [path for place in KINDS for path in sorted((ROOT / place).iterdir()) if path.is_dir()]
FOLDERS = [SDK, *PLUGINS]

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
each_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda path: path.name)


def read(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def hatch(folder: Path) -> dict[str, Any]:
    wheel: dict[str, Any] = read(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]
    return wheel


def ours(text: str) -> bool:
    return canonicalize_name(Requirement(text).name).startswith("tinker-atropos")


def needs(folder: Path) -> set[str]:
    """Everything that a plugin asks for, its own extras included, but for other parts of this repository."""
    project = read(folder)["project"]
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return {text for entries in lists for text in entries if not ours(text)}


def group(folder: Path) -> str:
    return f"tinker_atropos.{KINDS[folder.parent.relative_to(ROOT).as_posix()]}"


@each_folder
def test_each_folder_is_a_distribution_of_its_own(folder: Path) -> None:
    content = read(folder)
    project = content["project"]
    expected = "tinker-atropos" if folder == SDK else f"tinker-atropos-{canonicalize_name(folder.name)}"
    assert project["name"] == expected
    assert content["build-system"]["build-backend"] == "hatchling.build"
    assert project["requires-python"] == read(ROOT)["project"]["requires-python"]
    assert project["license"] == "MIT"
    assert (folder / project["readme"]).is_file()
    assert not (folder / "src").exists()


@each_folder
def test_each_wheel_holds_one_flat_typed_package(folder: Path) -> None:
    module = "tinker_atropos" if folder == SDK else f"tinker_atropos_{folder.name}"
    assert hatch(folder)["packages"] == [module]
    assert (folder / module / "__init__.py").is_file()
    assert (folder / module / "py.typed").is_file()


@each_folder
def test_each_wheel_carries_the_license(folder: Path) -> None:
    assert (folder / "LICENSE").read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")


@each_folder
def test_versions_are_one(folder: Path) -> None:
    assert read(folder)["project"]["version"] == read(ROOT)["project"]["version"] == tinker_atropos.__version__


@each_folder
def test_parts_of_this_repository_accept_each_other(folder: Path) -> None:
    project = read(folder)["project"]
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    names = {canonicalize_name(read(other)["project"]["name"]) for other in FOLDERS}
    for requirement in (Requirement(text) for entries in lists for text in entries if ours(text)):
        assert canonicalize_name(requirement.name) in names
        assert requirement.specifier, f"{requirement} takes any version; say {requirement.name}~={project['version']}"
        assert tinker_atropos.__version__ in requirement.specifier


@each_plugin
def test_folder_name_is_the_entry_point_and_the_import_name(folder: Path) -> None:
    points = dict(read(folder)["project"]["entry-points"])
    assert points.pop(group(folder)) == {folder.name: f"tinker_atropos_{folder.name}"}
    assert set(points) <= {"tinker_atropos.commands", "tinker_atropos.envs", "tinker_atropos.compat"}
    for target in (target for offered in points.values() for target in offered.values()):
        assert target.startswith(f"tinker_atropos_{folder.name}.")


@each_plugin
def test_each_plugin_needs_the_sdk(folder: Path) -> None:
    assert any(Requirement(text).name == "tinker-atropos" for text in read(folder)["project"]["dependencies"])


def test_the_root_offers_every_entry_point() -> None:
    offered: dict[str, dict[str, str]] = {}
    for folder in PLUGINS:
        for name, points in read(folder)["project"]["entry-points"].items():
            offered.setdefault(name, {}).update(points)
    assert read(ROOT)["project"]["entry-points"] == offered


def test_the_root_is_the_sdk_and_is_not_published() -> None:
    root, sdk = read(ROOT)["project"], read(SDK)["project"]
    assert root["name"] == sdk["name"]
    assert root["dependencies"] == sdk["dependencies"]
    offered = [read(folder)["project"].get("scripts", {}) for folder in FOLDERS]
    assert root["scripts"] == {name: target for scripts in offered for name, target in scripts.items()}
    assert "Private :: Do Not Upload" in root["classifiers"]
    assert "classifiers" not in sdk


def test_the_root_has_the_extras_of_the_sdk_one_per_plugin_and_all_of_them() -> None:
    extras = dict(read(ROOT)["project"]["optional-dependencies"])
    extras.pop("dev")
    (everything,) = (Requirement(text) for text in extras.pop("all"))
    assert everything.name == "tinker-atropos"
    assert everything.extras == set(extras)
    own = read(SDK)["project"]["optional-dependencies"]
    assert {name: set(entries) for name, entries in extras.items()} == {
        canonicalize_name(folder.name): needs(folder) for folder in PLUGINS
    } | {name: set(entries) for name, entries in own.items()}


def test_the_root_installs_every_folder() -> None:
    root = hatch(ROOT)
    assert sorted(root["dev-mode-dirs"]) == sorted(folder.relative_to(ROOT).as_posix() for folder in FOLDERS)
    assert sorted(root["packages"]) == sorted(
        (folder / package).relative_to(ROOT).as_posix() for folder in FOLDERS for package in hatch(folder)["packages"]
    )


def test_every_requirement_has_a_tested_version() -> None:
    pinned = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    project = read(ROOT)["project"]
    for text in [*project["dependencies"], *(t for e in project["optional-dependencies"].values() for t in e)]:
        if not ours(text):
            requirement = Requirement(text)
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
