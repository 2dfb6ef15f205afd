"""Where a run's checkpoints lie on disk, in which order they were made, and which of them can go. Needs no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from tinker_atropos.run_folder import RunFolder

from tinker_atropos_torch_ppo.inference import local_path

FOLDER = "checkpoints"
STATE_FILE = "state.pt"
POLICY_FILE = "policy.npz"
PARTIAL = ".partial"  # how the name of a folder ends that is being written or removed
MANIFESTS = 2  # a resumption takes the newest whole one; the one before, should that be damaged


def newest_first(folder: Path) -> list[Path]:
    """Return the folders of whole checkpoints."""
    found = [place.parent for place in folder.glob(f"[!.]*/{STATE_FILE}")]
    return sorted(found, key=lambda place: ((place / STATE_FILE).stat().st_mtime_ns, place.name), reverse=True)


def prune(run: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints of a run, and return them.

    Those of its newest two manifests stay, since a resumption begins there, and those that ended a run. Raises
    `OSError` where one can't be removed.
    """
    manifests = RunFolder(run).manifests()
    needed = {
        local_path(manifest.checkpoint.state).parent.name
        for place, manifest in enumerate(reversed(manifests))
        if place < MANIFESTS or manifest.finished
    }
    gone = [place for place in newest_first(run / FOLDER)[keep:] if place.name not in needed]
    for place in gone:
        dying = place.with_name(f".{place.name}{PARTIAL}")
        place.rename(dying)  # so that no half of one is ever listed
        shutil.rmtree(dying)
    return gone


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for left in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
