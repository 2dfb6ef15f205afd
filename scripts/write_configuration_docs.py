"""Writes docs/configuration.md, the reference of every setting, from the models that check them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from tinker_atropos.registry import PluginKind, Registry, normal
from tinker_atropos.sections import UNUSED, EnvSection, OpenAISection, RolloutSection, RunSection

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by scripts/write_configuration_docs.py; change the models, then run it. -->

A setting has a path, `section.key`. It is written in a YAML file, in the section of that name, or on the command line
as `--set section.key=value`. The command line goes before the file, the file before what a plugin suggests, and that
before the defaults below. `tinker-atropos run … --dry-run` prints every value of a run and where it comes from; the
same file is kept in the run's folder as `config.yaml`.

The environment's own settings may stand in `env` or in a section of its name, the trainer's in `trainer` or in a
section of its name: `env.X` and `<environment>.X` are one setting, and so are `trainer.X` and `<trainer>.X`. With gsm8k
and tinker, `--set env.dataset=arithmetic` is `--set gsm8k.dataset=arithmetic`, and `trainer.lora_rank` is
`tinker.lora_rank`. Two different values for one setting are refused. The adapter's settings stand only in a section of
its name. Installed plugins that are not listed here describe themselves: `tinker-atropos env info NAME`,
`tinker-atropos trainer info NAME`.

A control run ends after `env.total_steps` updates (`--steps`) or after the trainer's `total_env_steps` environment
steps (`--env-steps`): name one of them. Both is an error, whether in one place or in two; `null` takes one that a file
names back. A resumed run ends where it was to, unless one of the two says otherwise.

A key that nobody knows is refused. Keys of Atropos that are accepted and have no effect are marked *no effect*; a run
names those that were given.
"""

# Heading, section of the paths, model, and what it is.
COMMON: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("run", RunSection, "What runs, and where it writes."),
    ("env", EnvSection, "Sizes and schedule; the keys of Atropos' `env`. The environment's own settings come beside."),
    ("openai", OpenAISection, "The model; one entry of Atropos' `openai`, or a list of which the first counts."),
    ("rollout", RolloutSection, "How episodes are rolled out."),
)

PLUGINS: tuple[tuple[PluginKind, str, str], ...] = (
    ("adapter", "managed_server", "The adapter that is used unless `rollout.adapter` names another."),
    ("trainer", "tinker", "Trainer for text: LoRA through the Tinker SDK; also written `trainer.X`."),
    ("trainer", "torch_ppo", "Trainer for control: PPO on this machine; also written `trainer.X`."),
    ("env", "gsm8k", "Environment: grade-school maths; also written `env.X`."),
    ("env", "math_server", "Environment: competition mathematics in `\\boxed{}`; also written `env.X`."),
    ("env", "atropos", "Environment: scripts written for Atropos, unchanged; also written `env.X`."),
    ("env", "humanoid", "Environment for control: MuJoCo's Humanoid-v5; also written `env.X`."),
    ("env", "gymnasium", "Environment for control: any registered Gymnasium id; also written `env.X`."),
)


def page() -> str:
    """Return the text of the page."""
    registry = Registry()
    parts = [INTRODUCTION]
    parts += [section(name, model, text) for name, model, text in COMMON]
    for kind, name, text in PLUGINS:
        spec = registry.load(kind, name)
        parts.append(section(normal(spec.name), spec.config, text))
    parts.append(
        "## slurm, testing\n\nTrue or false, as in the original's files; *no effect*: "
        f"{UNUSED['slurm']}, and {UNUSED['testing']}.\n"
    )
    return "\n".join(parts)


def section(name: str, model: type[BaseModel], text: str) -> str:
    """Return a section's heading and table."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for key, field in model.model_fields.items():
        path = f"{name}.{key}"
        meaning = field.description or ""
        if path in UNUSED:
            meaning = f"*no effect*: {UNUSED[path]} ({meaning})"
        rows.append(f"| `{path}` | {default(field)} | {cell(meaning)} |")
    return f"## {name}\n\n{text}\n\n" + "\n".join(rows) + "\n"


def default(field: Any) -> str:
    """Return a default as YAML would have it; a dash where there is none until the run is known."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(typed(item) for item in value)}]`"
    return f"`{typed(value)}`"


def typed(value: Any) -> str:
    """Return a value as a user types it, so that infinity is `.inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf"}.get(str(value), ".nan")
    return str(value)


def cell(text: str) -> str:
    """Return text that can stand in a table's cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE)
