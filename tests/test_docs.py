"""The docs hold: links lead somewhere, commands parse, and the examples are complete files that run.

A Python block whose first line is a comment `# name.py` is such a file; one page's files lie in one folder. A shell
block opened with ```` ```sh runs ```` is run there, after them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tinker_atropos.cli import cli
from tinker_atropos.config import load
from tinker_atropos.progress import PlainProgress
from tinker_atropos.registry import Registry, load_file
from tinker_atropos.run import run
from tinker_atropos.run_folder import RunFolder
from tinker_atropos.testing import check_environment, check_trainer

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in {"runs", "dist"} for part in page.relative_to(ROOT).parts)
)
GUIDE = ROOT / "docs" / "write-an-environment.md"
TRAINER_GUIDE = ROOT / "docs" / "write-a-trainer.md"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    language: str
    runs: bool
    text: str

    @property
    def file(self) -> str | None:
        """The name that the first line gives it."""
        found = re.match(r"# ([\w/]+\.py)\n", self.text)
        return found[1] if found and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    return [
        Block(language, extra.strip() == "runs", text)
        for language, extra, text in FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def commands(block: Block) -> list[list[str]]:
    """The `tinker-atropos` and `make` commands of a shell block, without what the shell does around them."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = []
        for word in lexer:
            if set(word) <= set("|&;<>"):
                break
            words.append(word)
        while words and re.match(r"\w+=", words[0]):  # a variable set for this command
            words.pop(0)
        if words and words[0] in {"tinker-atropos", "make"}:
            found.append(words)
    return found


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}; there is no such heading"


@each_page
def test_commands_exist_with_these_options(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in blocks(page):
        for program, *words in commands(block) if block.language in {"sh", "bash", "console"} else []:
            if program == "make":
                assert {word for word in words if re.fullmatch(r"[a-z-]+", word)} <= targets, f"make {words}"
            else:
                # --help is looked at only after the other options are known to exist.
                cli.main([*words, "--help"], standalone_mode=False)
    capsys.readouterr()


def write_files(page: Path, folder: Path) -> list[str]:
    names = []
    for block in blocks(page):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            names.append(block.file)
    return names


@each_page
def test_what_is_marked_to_run_runs(page: Path, tmp_path: Path) -> None:
    runnable = [block for block in blocks(page) if block.runs]
    write_files(page, tmp_path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in runnable:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, f"{block.text}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.parametrize("name", ["poem.py", "rhyme.py", "guess.py"])
def test_the_guides_environments_keep_the_contract(name: str, tmp_path: Path) -> None:
    assert name in write_files(GUIDE, tmp_path)
    check_environment(load_file(f"{tmp_path / name}:env"))


def test_the_guides_environment_loads_as_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(GUIDE, tmp_path)
    shutil.copy(tmp_path / "guess.py", tmp_path / "tinker_atropos_guess" / "guess.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry([EntryPoint("guess", "tinker_atropos_guess", "tinker_atropos.envs")])
    assert registry.load("env", "guess").kind == "text"


async def test_the_guides_trainer_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(TRAINER_GUIDE, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(
        [
            EntryPoint("tally", "tinker_atropos_tally", "tinker_atropos.trainers"),
            EntryPoint("managed_server", "tinker_atropos_managed_server", "tinker_atropos.adapters"),
        ]
    )
    settings = {
        "run.env": f"{tmp_path / 'seven.py'}:env",
        "run.trainer": "tally",
        "run.output": str(tmp_path),
        "run.name": "guide",
        "env.prompt_format": "completion",
        "env.group_size": 16,
        "env.batch_size": 64,
        "env.total_steps": 20,
        "env.max_batches_offpolicy": 0,
        "rollout.max_tokens": 4,
    }
    config = load(None, [(path, value, "test") for path, value in settings.items()], registry=registry)
    finished = await run(config, PlainProgress(), registry=registry)
    rewards = [row["reward/mean"] for row in RunFolder(finished.folder).read_metrics() if "reward/mean" in row]
    await check_trainer(registry.load("trainer", "tally"))
    assert len(rewards) == 20
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 1
    assert Path(finished.checkpoint.weights).is_file()
