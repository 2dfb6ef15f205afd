"""Names that the original tinker-atropos kept in `config` and `trainer`, found among what is installed (drop-ins)."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

GROUP = "tinker_atropos.compat"
DISTRIBUTION = "tinker-atropos-atropos"

NAMES = {
    "tinker_atropos.config": (
        "TinkerAtroposConfig",
        "EnvConfig",
        "OpenAIServerConfig",
        "TinkerConfig",
        "generate_run_suffix",
    ),
    "tinker_atropos.trainer": ("TinkerAtroposTrainer",),
}


def find(module: str, name: str) -> Any:
    """Return what `from <module> import <name>` meant in the original.

    Raises `AttributeError` for a name that it did not have there, and `ImportError` where nothing installed has it.
    """
    if name not in NAMES[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    raise ImportError(
        f"{name} of the original tinker-atropos comes with another package: pip install {DISTRIBUTION}", name=module
    )
