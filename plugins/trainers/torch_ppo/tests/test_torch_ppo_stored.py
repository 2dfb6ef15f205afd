"""Checkpoints on disk: which stay, and what `tinker-atropos checkpoint` shows and brings."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker_atropos_torch_ppo as plugin
from tinker_atropos.errors import CheckpointError, ConfigError
from tinker_atropos.run_folder import Manifest, RunFolder
from tinker_atropos.trainer import Checkpoint
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.trainer import TorchPPOTrainer

SMALL: dict[str, Any] = {"hidden_sizes": (8,), "device": "cpu"}


@pytest.fixture
def saved(run_spec, discrete_spaces, tmp_path):
    """Save checkpoints of these names, each with its manifest unless it is named in `without`; return them."""

    def save(names, keep, without=(), finished=()) -> list[Checkpoint]:
        async def go():
            trainer = TorchPPOTrainer(TorchPPOConfig(keep_checkpoints=keep, **SMALL))
            await trainer.start(run_spec(), discrete_spaces, None)
            made = []
            for step, name in enumerate(names):
                made.append(await trainer.save(name))
                if name not in without:
                    manifest(tmp_path, dataclasses.replace(made[-1], step=step), name in finished)
            await trainer.close()
            return made

        return asyncio.run(go())

    return save


def manifest(run: Path, checkpoint: Checkpoint, finished: bool = False) -> None:
    (run / "manifests").mkdir(exist_ok=True)
    RunFolder(run).write_manifest(
        Manifest("run", 0, checkpoint.step, checkpoint, (), {"next": 0, "open": []}, finished=finished)
    )


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_newest_stay_and_those_that_ended_a_run(saved, tmp_path):
    saved(["a", "final", "b", "c", "d", "e"], keep=3, finished=["final"])
    assert kept(tmp_path) == ["c", "d", "e", "final"]


def test_zero_keeps_all(saved, tmp_path):
    saved(["a", "b", "c", "d"], keep=0)
    assert kept(tmp_path) == ["a", "b", "c", "d"]


def test_what_a_resumption_needs_stays_however_old(saved, tmp_path):
    """Newer ones without a manifest are those of a run that was killed between the two, again and again."""
    saved(["a", "b", "c", "d", "e", "f"], keep=1, without=["d", "e", "f"])
    assert kept(tmp_path) == ["b", "c", "f"]


def test_a_removed_checkpoint_can_not_be_exported_and_the_error_names_those_that_can(
    run_spec, discrete_spaces, made_up, tmp_path
):
    from tinker_atropos.control import ControlBatch

    async def go():
        trainer = TorchPPOTrainer(TorchPPOConfig(keep_checkpoints=1, epochs=1, minibatches=1, **SMALL))
        now = await trainer.start(run_spec(), discrete_spaces, None)
        first = now.ref
        for step in range(3):
            await trainer.save(f"s{step}")
            now = await trainer.update(ControlBatch(step, (made_up(now.policy, step),)))
        with pytest.raises(CheckpointError, match=r"step 0 .* checkpoints at steps \[2\]"):
            await trainer.export(first, tmp_path / "export")
        await trainer.close()

    asyncio.run(go())


def test_what_a_killed_process_left_is_removed_and_hinders_no_resumption(saved, tmp_path):
    left = tmp_path / "checkpoints" / ".step-000002.partial"
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(b"half")
    RunFolder(tmp_path)._make_folders()
    saved(["a"], keep=2)
    assert kept(tmp_path) == ["a"]


def catalogue(run: Path) -> Any:
    opened = plugin.trainer_spec().checkpoints
    assert opened is not None

    async def go() -> Any:
        return await opened(TorchPPOConfig(), run)

    return asyncio.run(go())


def test_the_catalogue_lists_weights_and_states_newest_first(saved, tmp_path):
    saved(["a", "b"], keep=0)
    found = asyncio.run(catalogue(tmp_path).list())
    assert [(Path(one.uri).parent.name, one.kind) for one in found] == [
        ("b", "weights"), ("b", "state"), ("a", "weights"), ("a", "state"),
    ]  # fmt: skip
    assert all(one.size and one.created for one in found)


@pytest.mark.parametrize("named_by", ["weights", "state"])
def test_a_download_is_the_exported_policy_also_after_the_folder_moved(saved, tmp_path, named_by):
    (made,) = saved(["a"], keep=0)
    moved = tmp_path.with_name(tmp_path.name + " moved")
    tmp_path.rename(moved)
    folder = asyncio.run(catalogue(moved).download(getattr(made, named_by), moved / "export" / "a"))
    with np.load(folder / "policy.npz") as arrays:
        assert arrays["weight0"].shape == (5, 8)
    assert (folder / "policy.py").exists()


def test_an_unknown_checkpoint_is_answered_with_a_near_one(saved, tmp_path):
    (made,) = saved(["first"], keep=0)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*Did you mean .*first/policy\.npz"):
        asyncio.run(catalogue(tmp_path).info(made.weights.replace("first", "frist")))


def test_a_run_without_checkpoints_has_none_to_list(tmp_path):
    assert list(asyncio.run(catalogue(tmp_path).list())) == []


async def test_there_is_no_account():
    spec = plugin.trainer_spec()
    assert spec.checkpoints is not None
    assert not spec.has_account
    with pytest.raises(ConfigError, match="--run NAME"):
        await spec.checkpoints(TorchPPOConfig(), None)
