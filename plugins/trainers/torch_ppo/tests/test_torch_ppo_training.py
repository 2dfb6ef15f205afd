"""The trainer: exact repetition, exact resumption, what it refuses, and export."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker_atropos.control import ControlBatch, ControlSpaces
from tinker_atropos.errors import CheckpointError, ConfigError, TrainerError
from tinker_atropos.trainer import Checkpoint
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.inference import NumpyPolicy, open_snapshot
from tinker_atropos_torch_ppo.trainer import TorchPPOTrainer

SMALL = {"epochs": 3, "minibatches": 4, "hidden_sizes": (8, 8), "device": "cpu", "total_env_steps": 1000}


@pytest.fixture(params=["continuous_spaces", "discrete_spaces"])
def spaces(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def trainer(request):
    made: list[TorchPPOTrainer] = []

    def make(**settings) -> TorchPPOTrainer:
        made.append(TorchPPOTrainer(TorchPPOConfig(**{**SMALL, **settings})))
        return made[-1]

    yield make
    for one in made:
        asyncio.run(one.close())


def numbers(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


async def learn(trainer, now, made_up, steps, first=0):
    """Return the metrics of updates on two made-up fragments each, and the last update."""
    curve = []
    for step in range(first, first + steps):
        fragments = (made_up(now.policy, 2 * step, width=4), made_up(now.policy, 2 * step + 1, width=3))
        now = await trainer.update(ControlBatch(step, fragments))
        curve.append(numbers(now.metrics))
    return curve, now


def same_policy(one: NumpyPolicy, other: NumpyPolicy) -> bool:
    return one.snapshot.to_bytes() == other.snapshot.to_bytes()


@pytest.mark.parametrize("settings", [{}, {"schedule": "async"}, {"rpo_alpha": 0.1, "value_clip": 0.2}])
async def test_the_same_seed_and_fragments_give_the_same_curve(trainer, run_spec, spaces, made_up, settings):
    ends = []
    for _ in range(2):
        mine = trainer(**settings)
        ends.append(await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 3))
    assert ends[0][0] == ends[1][0]
    assert same_policy(ends[0][1].policy, ends[1][1].policy)


async def test_returns_are_summed_by_shard_however_batches_are_made_up(trainer, run_spec, continuous_spaces, made_up):
    """Two shards; one of them comes twice in a batch, then not at all, and once in two parts."""
    mine = trainer()
    now = await mine.start(run_spec(), continuous_spaces, None)
    pieces = {(shard, t): made_up(now.policy, 10 * shard + t, width=2) for shard in (0, 1) for t in range(4)}
    order = [[(0, 0), (0, 1)], [(1, 0), (1, 1), (0, 2)], [(0, 3), (1, 2), (1, 3)]]
    for step, batch in enumerate(order):
        fragments = tuple(dataclasses.replace(pieces[place], shard=place[0]) for place in batch)
        await mine.update(ControlBatch(step, fragments))
    expected = []
    for shard in (0, 1):
        running = np.zeros(2)
        for t in range(4):
            fragment = pieces[shard, t]
            for rewards, ends in zip(fragment.rewards, fragment.terminated | fragment.truncated, strict=True):
                running = 0.99 * running + rewards
                expected.append(running)
                running = np.where(ends, 0.0, running)
    moments = mine._running().learner.rewards.moments
    assert moments.count == 2 * 2 * 4 * 16
    np.testing.assert_allclose(moments.variance, np.var(expected), rtol=1e-9)
    np.testing.assert_allclose(moments.mean, np.mean(expected), rtol=1e-9)


async def test_another_seed_gives_other_weights(trainer, run_spec, spaces):
    one = await trainer().start(run_spec(seed=1), spaces, None)
    other = await trainer().start(run_spec(seed=2), spaces, None)
    assert not same_policy(one.policy, other.policy)


async def test_training_draws_nothing_from_global_generators(trainer, run_spec, spaces, made_up):
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())
    mine = trainer(rpo_alpha=0.1)
    await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before


async def test_a_checkpoint_continues_bit_for_bit(trainer, run_spec, spaces, made_up):
    mine = trainer(rpo_alpha=0.1)
    _, now = await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 2)
    kept = await mine.save("two")
    curve, end = await learn(mine, now, made_up, 2, first=2)

    other = trainer(rpo_alpha=0.1)
    resumed = await other.start(run_spec(lineage=1, seed=99), spaces, kept)
    assert resumed.ref.step == 2
    assert same_policy(resumed.policy, now.policy)
    again, end_again = await learn(other, resumed, made_up, 2, first=2)
    assert again == curve
    assert same_policy(end_again.policy, end.policy)
    # Going back within one trainer too, as after a failed update.
    back = await mine.start(run_spec(lineage=2), spaces, kept)
    assert (await learn(mine, back, made_up, 2, first=2))[0] == curve


async def test_another_number_of_threads_is_said_on_resume(trainer, run_spec, spaces):
    mine = trainer()
    await mine.start(run_spec(), spaces, None)
    kept = await mine.save("start")
    said: list[str] = []
    await mine.start(run_spec(say=said.append), spaces, kept)
    assert not said
    await trainer(threads=2).start(run_spec(say=said.append), spaces, kept)
    assert "1 torch threads" in said[0]
    assert "2 torch threads" in said[0]


async def test_a_checkpoint_of_another_task_or_network_is_refused(trainer, run_spec, spaces, tmp_path):
    mine = trainer()
    await mine.start(run_spec(), spaces, None)
    kept = await mine.save("start")
    with pytest.raises(CheckpointError, match=f"task is {spaces.task}, here Other-v0"):
        await trainer().start(run_spec(), dataclasses.replace(spaces, task="Other-v0"), kept)
    with pytest.raises(CheckpointError, match=r"hidden_sizes is \[8, 8\], here \[16\]"):
        await trainer(hidden_sizes=(16,)).start(run_spec(), spaces, kept)
    with pytest.raises(CheckpointError, match="its manifest says 7"):
        await trainer().start(run_spec(), spaces, dataclasses.replace(kept, step=7))


async def test_a_missing_or_damaged_checkpoint_is_refused(trainer, run_spec, spaces, tmp_path):
    lost = Checkpoint("lost", 0, (tmp_path / "lost.pt").as_uri(), (tmp_path / "lost.npz").as_uri())
    with pytest.raises(CheckpointError, match="can't be read"):
        await trainer().start(run_spec(), spaces, lost)
    (tmp_path / "lost.pt").write_bytes(b"half a fi")
    with pytest.raises(CheckpointError, match="damaged"):
        await trainer().start(run_spec(), spaces, lost)


async def test_a_name_is_never_overwritten_and_no_part_stays(trainer, run_spec, spaces, tmp_path):
    mine = trainer()
    await mine.start(run_spec(), spaces, None)
    one, two = await mine.save("same"), await mine.save("same")
    assert one.state != two.state
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["same", "same-2"]
    for name in ("", "..", "a/b", ".hidden"):
        with pytest.raises(CheckpointError, match="can't be a folder's"):
            await mine.save(name)


async def test_the_event_loop_goes_on_while_the_learner_works(trainer, run_spec, spaces, made_up):
    mine = trainer(epochs=50)
    now = await mine.start(run_spec(), spaces, None)
    learning = asyncio.create_task(mine.update(ControlBatch(0, (made_up(now.policy, 0),))))
    turns = 0
    while not learning.done():
        now.policy.act(np.ones((2, 5), np.float32), None)
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    assert learning.result().ref.step == 1


async def test_a_loss_that_is_not_finite_stops_training_until_a_checkpoint(
    trainer, run_spec, continuous_spaces, made_up
):
    mine = trainer(normalize_returns=False)
    now = await mine.start(run_spec(), continuous_spaces, None)
    kept = await mine.save("start")
    with pytest.raises(TrainerError, match=r"step 0: the loss is (inf|nan).*learning_rate.*--resume"):
        await mine.update(ControlBatch(0, (made_up(now.policy, 0, scale=1e30),)))
    for call in (mine.update(ControlBatch(0, (made_up(now.policy, 0),))), mine.save("bad")):
        with pytest.raises(TrainerError, match="go back to the last checkpoint"):
            await call
    now = await mine.start(run_spec(lineage=1), continuous_spaces, kept)
    assert (await mine.update(ControlBatch(0, (made_up(now.policy, 0),)))).ref.step == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: {"rewards": np.where(np.arange(4) == 2, np.nan, f.rewards)}, "rewards at step 0 of simulation 2"),
        (lambda f: {"observations": f.observations * np.inf}, "observations at step 0 of simulation 0"),
        (lambda f: {"observations": f.observations[:-1]}, r"observations have shape \(16, 4, 5\), \(17, 4, 5\)"),
        (lambda f: {"actions": f.actions[..., None]}, "actions have shape"),
        (lambda f: {"finals": f.finals[1:]}, "finals have shape"),
    ],
)
async def test_a_broken_fragment_is_named_and_changes_nothing(trainer, run_spec, spaces, made_up, change, says):
    mine = trainer()
    now = await mine.start(run_spec(), spaces, None)
    sound = made_up(now.policy, 0)
    with pytest.raises(TrainerError, match=f"fragment f0: {says}"):
        await mine.update(ControlBatch(0, (dataclasses.replace(sound, **change(sound)),)))
    other = trainer()
    await other.start(run_spec(), spaces, None)
    assert numbers((await mine.update(ControlBatch(0, (sound,)))).metrics) == numbers(
        (await other.update(ControlBatch(0, (sound,)))).metrics
    )


async def test_a_batch_of_another_step_or_too_small_is_refused(trainer, run_spec, spaces, made_up):
    mine = trainer(minibatches=40)
    now = await mine.start(run_spec(), spaces, None)
    with pytest.raises(TrainerError, match="for step 3, the trainer is at step 0"):
        await mine.update(ControlBatch(3, (made_up(now.policy, 0),)))
    with pytest.raises(TrainerError, match=r"64 environment steps, too few for torch_ppo\.minibatches=40"):
        await mine.update(ControlBatch(0, (made_up(now.policy, 0),)))


async def test_the_first_pass_starts_from_the_acting_policy(trainer, run_spec, spaces, made_up):
    """One minibatch, one pass: nothing has moved yet, so no ratio is clipped and the KL is 0 up to rounding."""
    for settings in ({}, {"schedule": "async"}):
        mine = trainer(epochs=1, minibatches=1, **settings)
        now = await mine.start(run_spec(), spaces, None)
        _, now = await learn(mine, now, made_up, 1)
        (metrics,), _ = await learn(mine, now, made_up, 1, first=1)
        assert metrics["clip_fraction"] == 0
        assert abs(metrics["kl"]) < 1e-6


async def test_an_update_ends_early_above_the_target_kl(trainer, run_spec, spaces, made_up):
    mine = trainer(target_kl=1e-9, learning_rate=0.01)
    (metrics,), _ = await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 1)
    assert metrics["epochs"] == 1
    assert metrics["kl"] > 1e-9


async def test_rpos_shift_of_the_mean_is_no_kl(trainer, run_spec, continuous_spaces, made_up):
    """The policy hardly moves at this rate: what is measured with the shift would be of the order of 0.1."""
    mine = trainer(target_kl=0.02, rpo_alpha=0.5, learning_rate=1e-5)
    (metrics,), _ = await learn(mine, await mine.start(run_spec(), continuous_spaces, None), made_up, 1)
    assert metrics["epochs"] == 3
    assert abs(metrics["kl"]) < 1e-3
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("anneal", "total", "said"), [(True, 2000, True), (True, 1000, False), (False, 2000, False)])
async def test_an_annealed_rate_that_jumps_up_in_a_longer_run_is_said(
    trainer, run_spec, spaces, made_up, anneal, total, said
):
    mine = trainer(anneal=anneal, learning_rate=0.01)
    await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 2)
    kept = await mine.save("two")
    heard: list[str] = []
    await trainer(anneal=anneal, learning_rate=0.01, total_env_steps=total).start(
        run_spec(say=heard.append), spaces, kept
    )
    assert any("total_env_steps was 1,000 and is 2,000" in text and "jumps" in text for text in heard) == said
    assert not any("may differ in the last digits" in text for text in heard)


async def test_the_learning_rate_falls_with_the_environment_steps(trainer, run_spec, spaces, made_up):
    mine = trainer(learning_rate=0.01, total_env_steps=224)
    curve, _ = await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 3)
    np.testing.assert_allclose([one["learning_rate"] for one in curve], [0.01, 0.005, 0.0], atol=1e-12)
    assert curve[2]["grad_norm"] > 0


ALONE = """
import sys
for name in ("torch", "onnx", "gymnasium", "tinker_atropos", "tinker_atropos_torch_ppo"):
    sys.modules[name] = None  # an import of it fails
import numpy as np
from policy import load
act = load("policy.npz")
np.save("found.npy", act(np.load("observations.npy")))
try:
    act(np.zeros((1, 7)))
except ValueError as error:
    assert "expected N of [5]" in str(error), error
"""


@pytest.fixture
async def exported(trainer, run_spec, spaces, made_up, tmp_path):
    """An export of a trained policy, observations, and the actions that the policy takes, as the space has them."""
    mine = trainer(learning_rate=0.05)
    _, now = await learn(mine, await mine.start(run_spec(), spaces, None), made_up, 2)
    observations = np.random.default_rng(0).normal(2, 30, (64, 5)).astype(np.float32)
    expected = now.policy.act(observations, None).actions
    if hasattr(spaces.action, "start"):
        expected = expected + spaces.action.start
    else:
        assert (np.abs(expected) > 0.4).any(), "nothing to clip"
        expected = expected.clip(-0.4, 0.4)
    return await mine.export(now.ref, tmp_path / "model"), observations, expected


def test_an_export_acts_in_a_process_that_has_numpy_alone(exported):
    folder, observations, expected = exported
    np.save(folder / "observations.npy", observations)
    subprocess.run([sys.executable, "-c", ALONE], cwd=folder, check=True, timeout=60)
    np.testing.assert_allclose(np.load(folder / "found.npy"), expected, atol=1e-6)


def test_an_exported_onnx_file_acts_as_the_policy_does(exported):
    reference = pytest.importorskip("onnx.reference")
    folder, observations, expected = exported
    (found,) = reference.ReferenceEvaluator(str(folder / "policy.onnx")).run(None, {"observations": observations})
    np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_without_onnx_the_export_has_the_numpy_files(trainer, run_spec, spaces, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mine = trainer()
    now = await mine.start(run_spec(), spaces, None)
    folder = await mine.export(now.ref, tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["policy.npz", "policy.py"]


async def test_onnxruntime_runs_an_export(trainer, run_spec, spaces, tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    mine = trainer()
    now = await mine.start(run_spec(), spaces, None)
    folder = await mine.export(now.ref, tmp_path / "model")
    session = onnxruntime.InferenceSession(folder / "policy.onnx", providers=["CPUExecutionProvider"])
    observations = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = now.policy.act(observations, None).actions + getattr(spaces.action, "start", 0)
    np.testing.assert_allclose(session.run(None, {"observations": observations})[0], expected, atol=1e-5)


async def test_policies_that_were_kept_can_be_exported(trainer, run_spec, spaces, made_up, tmp_path):
    mine = trainer()
    first = await mine.start(run_spec(), spaces, None)
    kept = await mine.save("start")
    await learn(mine, first, made_up, 1)
    await mine.export(first.ref, tmp_path / "of a step")
    await mine.export(dataclasses.replace(first.ref, uri=kept.weights), tmp_path / "of a file")
    with pytest.raises(CheckpointError, match=r"step 5 .* not kept"):
        await mine.export(dataclasses.replace(first.ref, step=5), tmp_path / "none")
    with pytest.raises(CheckpointError, match="exists"):
        await mine.export(first.ref, tmp_path / "of a step")
    assert same_policy(first.policy, NumpyPolicy(first.ref, open_snapshot(kept.weights)))


async def test_spaces_that_it_cannot_learn_are_refused(trainer, run_spec, continuous_spaces):
    spaces = continuous_spaces
    odd = type("MultiDiscrete", (), {"nvec": np.array([2, 3]), "shape": (2,), "dtype": np.dtype(np.int64)})()
    with pytest.raises(ConfigError, match=r"Walk-v0 acts in .*a Box of floats in one dimension, or a Discrete"):
        await trainer().start(run_spec(), ControlSpaces(spaces.observation, odd, "Walk-v0"), None)
    with pytest.raises(ConfigError, match="FlattenObservation"):
        await trainer().start(run_spec(), ControlSpaces(odd, spaces.action, "Walk-v0"), None)


async def test_observations_of_two_dimensions_are_flattened(trainer, run_spec, discrete_spaces, made_up, any_ref):
    grid = type("Grid", (), {"low": 0, "high": 1, "shape": (5, 1), "dtype": np.dtype(np.float32)})()
    mine = trainer()
    flat = await trainer().start(run_spec(), discrete_spaces, None)
    now = await mine.start(run_spec(), dataclasses.replace(discrete_spaces, observation=grid), None)
    fragment = made_up(flat.policy, 0)
    np.testing.assert_array_equal(
        now.policy.act(fragment.observations[0][..., None], None).actions,
        flat.policy.act(fragment.observations[0], None).actions,
    )
    deep = dataclasses.replace(
        fragment, observations=fragment.observations[..., None], finals=fragment.finals[..., None]
    )
    assert (await mine.update(ControlBatch(0, (deep,)))).ref.step == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
async def test_a_device_that_is_not_there_is_refused(trainer, run_spec, continuous_spaces):
    with pytest.raises(ConfigError, match=r"torch_ppo\.device='cuda' is not on this machine"):
        await trainer(device="cuda").start(run_spec(), continuous_spaces, None)


async def test_nothing_works_before_start_or_after_close(run_spec, discrete_spaces):
    mine = TorchPPOTrainer(TorchPPOConfig(**SMALL))
    with pytest.raises(TrainerError, match="not started"):
        await mine.save("early")
    await mine.start(run_spec(), discrete_spaces, None)
    await mine.close()
    with pytest.raises(TrainerError, match="not started"):
        await mine.update(ControlBatch(0, ()))


def test_checkpoints_live_in_the_run_folder(trainer, run_spec, discrete_spaces, tmp_path):
    async def go() -> Checkpoint:
        mine = trainer()
        await mine.start(run_spec(), discrete_spaces, None)
        return await mine.save("start")

    kept = asyncio.run(go())
    assert kept.state == (tmp_path / "checkpoints" / "start" / "state.pt").as_uri()
    assert Path(kept.weights.removeprefix("file://")).exists()
