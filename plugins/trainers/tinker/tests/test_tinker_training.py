"""The trainer and its policies with the real SDK, over a real socket, against a local Tinker server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from tinker_atropos.errors import CheckpointError, ConfigError, RunError, TrainerError, UpdateUncertain, UserError
from tinker_atropos.testing import check_trainer
from tinker_atropos.trainer import Checkpoint, RunSpec, Trainer, Update
from tinker_atropos.trajectory import (
    Batch,
    Group,
    PolicyRef,
    Sample,
    SamplingParams,
    Segment,
    TaskRef,
    Trajectory,
)
from tinker_atropos_tinker import trainer_spec
from tinker_atropos_tinker.catalogue import open_catalogue
from tinker_atropos_tinker.config import TinkerConfig
from tinker_atropos_tinker.policy import TinkerPolicy, open_policy
from tinker_atropos_tinker.trainer import TinkerTrainer, _refuse_broken

pytest.importorskip("tinker_atropos_local_tinker")

PROMPT = np.arange(40, 52, dtype=np.int32)
SPEC = trainer_spec()


def config(server: Any, **values: Any) -> TinkerConfig:
    return TinkerConfig(**{"base_url": server.url, "lora_rank": 4, "learning_rate": 1e-2, **values})


def run_spec(
    made: TinkerConfig, model: Path, folder: Path, *, lineage: int = 0, said: list[str] | None = None
) -> RunSpec:
    say = print if said is None else said.append
    return RunSpec("run", folder, made, str(model), seed=0, deterministic=True, lineage=lineage, say=say)


@asynccontextmanager
async def started(
    made: TinkerConfig, model: Path, folder: Path, resume: Checkpoint | None = None, **of_spec: Any
) -> AsyncIterator[tuple[TinkerTrainer, PolicyRef]]:
    trainer = TinkerTrainer(made)
    try:
        yield trainer, await trainer.start(run_spec(made, model, folder, **of_spec), resume)
    finally:
        await trainer.close()


def trajectory(sample: Sample, reward: float) -> Trajectory:
    tokens = np.concatenate([PROMPT, sample.tokens])
    mask = np.arange(len(tokens)) >= len(PROMPT)
    logprobs = np.concatenate([np.zeros(len(PROMPT), dtype=np.float32), sample.logprobs])
    return Trajectory((Segment(tokens, logprobs, mask),), (reward,), (sample.stop_reason,), (sample.ref,), ())


def batch(samples: list[Sample], rewards: list[float], step: int) -> Batch:
    made = tuple(trajectory(sample, reward) for sample, reward in zip(samples, rewards, strict=True))
    return Batch(step, (Group(f"group-{step}", TaskRef("train", step, 0), made),))


async def sample(policy: TinkerPolicy, seed: int = 1, n: int = 4, length: int = 8) -> list[Sample]:
    return await policy.sample(PROMPT, SamplingParams(length, seed=seed, stop=[]), n)


async def take_step(trainer: TinkerTrainer, made: TinkerConfig, ref: PolicyRef) -> Update:
    samples = await sample(await open_policy(ref, made), seed=ref.step + 1)
    return await trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.5], ref.step))


async def scored(policy: TinkerPolicy, samples: list[Sample]) -> np.ndarray:
    rows = [(await policy.logprobs(np.concatenate([PROMPT, s.tokens])))[len(PROMPT) :] for s in samples]
    return np.stack(rows)


def same(left: list[Sample], right: list[Sample]) -> bool:
    return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(left, right, strict=True))


async def test_the_trainer_keeps_the_contract(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        as_contract: Trainer = trainer
        policy: Any = await SPEC.open_policy(ref, made)
        assert (ref.step, ref.lineage, ref.endpoint, policy.context_length) == (0, 0, server.url, 128)
        assert policy.tokenizer().decode([64]) == policy.tokenizer().convert_ids_to_tokens(64)
        update = await take_step(trainer, made, ref)
        assert (update.ref.step, update.ref.lineage) == (1, 0)
        assert update.ref.uri != ref.uri
        assert [a.shape for a in update.advantages[0][0]] == [(20,)]
        assert {"loss", "train/kl_sample_train_v1", "train/grad_norm", "time/save_weights"} <= set(update.metrics)
        assert update.metrics["train/tokens"] == 32
        assert update.metrics["train/logprob_mismatch_max"] < 1e-3
        await as_contract.release(ref)


async def test_the_contract_test_of_trainers_passes(server: Any, tiny_model: Path) -> None:
    settings = {"base_url": server.url, "lora_rank": 4, "learning_rate": 1e-2}
    await check_trainer(SPEC, config=settings, model=str(tiny_model))


async def test_what_was_rewarded_becomes_likelier_and_what_was_not_less(
    server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        policy = await open_policy(ref, made)
        samples = await sample(policy)
        before = await scored(policy, samples)
        np.testing.assert_allclose(before, np.stack([s.logprobs for s in samples]), atol=1e-4)
        update = await trainer.update(batch(samples, [1.0, 0.0, 0.0, 1.0], 0))
        gain = (await scored(await open_policy(update.ref, made), samples) - before).sum(axis=1)
        assert gain[0] > 0 > gain[1]
        assert gain[3] > 0 > gain[2]


async def test_advantages_of_the_environment_decide_by_token(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        policy = await open_policy(ref, made)
        samples = await sample(policy, n=1)
        before = await scored(policy, samples)
        base = trajectory(samples[0], 0.0)
        own = np.zeros(20, dtype=np.float32)
        own[len(PROMPT)], own[len(PROMPT) + 1] = 1.0, -1.0
        made_own = replace(base, segments=(replace(base.segments[0], advantages=own),))
        update = await trainer.update(Batch(0, (Group("g", TaskRef("train", 0, 0), (made_own,)),)))
        assert update.advantages[0][0][0].tolist() == own.tolist()
        gain = (await scored(await open_policy(update.ref, made), samples) - before)[0]
        assert gain[0] > 0 > gain[1]


async def test_an_old_policy_stays_what_it_was(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        old = await open_policy(ref, made)
        before = await sample(old, seed=7)
        update = await take_step(trainer, made, ref)
        after = await sample(old, seed=7)
        new = await sample(await open_policy(update.ref, made), seed=7)
        assert same(before, after)
        assert [s.logprobs.tolist() for s in before] == [s.logprobs.tolist() for s in after]
        assert [s.logprobs.tolist() for s in before] != [s.logprobs.tolist() for s in new]
        assert after[0].ref == ref


async def test_a_learning_rate_of_zero_changes_nothing(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server, learning_rate=0.0)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        policy = await open_policy(ref, made)
        samples = await sample(policy)
        update = await trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 0))
        np.testing.assert_array_equal(
            await scored(await open_policy(update.ref, made), samples), await scored(policy, samples)
        )


async def test_equal_scores_are_one_step_that_changes_nothing(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        policy = await open_policy(ref, made)
        samples = await sample(policy)
        update = await trainer.update(batch(samples, [1.0] * 4, 0))
        assert update.ref.step == 1
        assert update.metrics["train/advantage_zero"] == 1
        np.testing.assert_array_equal(
            await scored(await open_policy(update.ref, made), samples), await scored(policy, samples)
        )


async def test_a_resumed_run_takes_the_same_next_steps(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    losses, checkpoint = [], None
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        for step in range(4):
            ref = (update := await take_step(trainer, made, ref)).ref
            losses.append(update.metrics["loss"])
            if step == 1:
                checkpoint = await trainer.save("step-000002")
    assert checkpoint is not None
    again = []
    async with started(made, tiny_model, tmp_path, checkpoint, lineage=1) as (trainer, ref):
        assert (ref.step, ref.lineage) == (2, 1)
        for _ in range(2):
            ref = (update := await take_step(trainer, made, ref)).ref
            again.append(update.metrics["loss"])
    assert again == losses[2:]


async def test_saving_makes_both_paths_and_a_name_may_come_twice(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server, checkpoint_ttl_seconds=7200)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        first = await trainer.save("final")
        assert await trainer.save("final") == first
        update = await take_step(trainer, made, ref)
        second = await trainer.save("final")
        assert (first.name, second.name) == ("final", "final")
        assert len({first.state, first.weights, second.state, second.weights}) == 4
        catalogue = await open_catalogue(made, None)
        listed = {entry.uri: entry for entry in await catalogue.list()}
        assert listed[first.state].kind == "state"
        assert listed[second.weights].kind == "weights"
        assert listed[second.weights].expires is not None
        assert listed[second.state].lora_rank == 4
        saved = await open_policy(PolicyRef("run", 0, 1, second.weights, endpoint=server.url), made)
        live = await open_policy(update.ref, made)
        assert same(await sample(saved, seed=3), await sample(live, seed=3))


async def test_an_exported_adapter_loads_in_peft_and_says_the_same(
    server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        update = await take_step(trainer, made, ref)
        policy = await open_policy(update.ref, made)
        samples = await sample(policy)
        served = await policy.logprobs(np.concatenate([PROMPT, samples[0].tokens]))
        checkpoint = await trainer.save("step-000001")
        folders = [await trainer.export(update.ref, tmp_path / "exported")]
        with pytest.raises(UserError, match="not empty"):
            await trainer.export(update.ref, tmp_path / "exported")
        with pytest.raises(CheckpointError, match="step 0"):
            await trainer.export(ref, tmp_path / "other")
        catalogue = await open_catalogue(made, None)
        folders.append(await catalogue.download(checkpoint.state, tmp_path / "state"))
        folders.append(await catalogue.download(checkpoint.weights, tmp_path / "weights"))
        assert not [entry for entry in await catalogue.list() if entry.kind == "external"]
    tokens = torch.tensor([PROMPT.tolist() + samples[0].tokens.tolist()])
    for folder in folders:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(folder)).eval()
        with torch.no_grad():
            rows = torch.log_softmax(model(tokens).logits[0, :-1].float(), dim=-1)
        own = rows.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(served[1:], own, atol=1e-4)


async def test_the_catalogue_answers_for_what_it_does_not_have(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, _):
        checkpoint = await trainer.save("good")
        catalogue = await open_catalogue(made, None)
        with pytest.raises(CheckpointError, match="good"):
            await catalogue.info(checkpoint.state + "x")
        alone = await trainer._running().client.save_weights_for_sampler("alone")
        with pytest.raises(CheckpointError, match="no training state"):
            await catalogue.download(alone.path, tmp_path / "alone")
        assert not (tmp_path / "alone").exists()


SECOND_PROCESS = """
import asyncio, json, sys
import numpy as np
from tinker_atropos.trajectory import PolicyRef, SamplingParams
from tinker_atropos_tinker import trainer_spec

async def main():
    spec, (ref, config, prompt) = trainer_spec(), json.loads(sys.argv[1])
    policy = await spec.open_policy(PolicyRef(**ref), spec.config(**config))
    samples = await policy.sample(np.array(prompt, dtype=np.int32), SamplingParams(8, seed=5, stop=[]), 4)
    print(json.dumps([s.tokens.tolist() for s in samples]))

asyncio.run(main())
"""


async def test_a_policy_opens_in_another_process_without_the_trainer(
    server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        ref = (await take_step(trainer, made, ref)).ref
        argument = json.dumps([asdict(ref), {"base_url": server.url}, PROMPT.tolist()])
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SECOND_PROCESS, argument, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(child.communicate(), 120)
        assert child.returncode == 0, err.decode()
        here = await sample(await open_policy(ref, made), seed=5)
        assert json.loads(out) == [s.tokens.tolist() for s in here]
        assert "tml-" not in ref.uri


def sessions(server: Any) -> int:
    with urlopen(f"{server.url}/api/v1/sessions", timeout=10) as response:
        return len(json.load(response)["sessions"])


async def test_many_policies_open_one_session(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        saved = PolicyRef("run", 0, 0, (await trainer.save("zero")).weights, endpoint=server.url)
        await open_policy(saved, made)
        before = await asyncio.to_thread(sessions, server)
        await asyncio.gather(*(open_policy(replace(saved, step=i), made) for i in range(20)))
        await asyncio.gather(*(open_policy(ref, made) for _ in range(20)))
        assert await asyncio.to_thread(sessions, server) == before


async def test_a_cancelled_sample_is_cancelled_at_the_service(
    server: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (_, ref):
        policy = await open_policy(ref, made)
        cancelled = asyncio.Event()
        loop = asyncio.get_running_loop()
        holder = policy._client.holder
        monkeypatch.setattr(holder, "enqueue_cancel", lambda request: loop.call_soon_threadsafe(cancelled.set))
        accepted = asyncio.Event()
        send = policy._client._send_asample_request

        async def noted(*arguments: Any) -> Any:
            answer = await send(*arguments)
            loop.call_soon_threadsafe(accepted.set)
            return answer

        monkeypatch.setattr(policy._client, "_send_asample_request", noted)
        task = asyncio.create_task(sample(policy, n=64, length=100))
        await asyncio.wait_for(accepted.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), 30)


async def test_a_prompt_that_the_service_refuses_is_not_tried_again(
    server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (_, ref):
        policy = await open_policy(ref, made)
        with pytest.raises(RunError, match="refused"):
            await policy.sample(np.zeros(200, dtype=np.int32), SamplingParams(8), 1)


async def test_an_interrupted_update_must_be_rewound(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        checkpoint = await trainer.save("step-000000")
        samples = await sample(await open_policy(ref, made))
        update = asyncio.create_task(trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 0)))
        await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        for call in (trainer.save("later"), trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 0))):
            with pytest.raises(UpdateUncertain, match=r"Rewind.*step-000000"):
                await call
        again = await trainer.start(run_spec(made, tiny_model, tmp_path, lineage=1), checkpoint)
        assert (again.step, again.lineage) == (0, 1)
        assert (await take_step(trainer, made, again)).ref.step == 1


async def test_a_lost_reply_must_be_rewound(
    server: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinker
    from tinker.types import RequestErrorCategory

    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):

        async def lost() -> None:
            raise tinker.RequestFailedError("worker lost", request_id="r", category=RequestErrorCategory.Server)

        client = trainer._running().client
        monkeypatch.setattr(client, "optim_step", lambda params: client.holder.run_coroutine_threadsafe(lost()))
        with pytest.raises(UpdateUncertain, match="optim_step of step 0 failed"):
            await take_step(trainer, made, ref)
        with pytest.raises(UpdateUncertain):
            await trainer.save("x")


async def test_a_broken_loss_ends_the_run_with_the_way_on(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        samples = await sample(await open_policy(ref, made))
        hopeless = [replace(s, logprobs=np.full_like(s.logprobs, -200.0)) for s in samples]
        with pytest.raises(TrainerError, match=r"forward_backward of step 0.*not finite.*--resume") as caught:
            await trainer.update(batch(hopeless, [1.0, 0.0, 0.0, 0.0], 0))
        assert not isinstance(caught.value, UpdateUncertain)
        with pytest.raises(UpdateUncertain):
            await trainer.save("x")
    with pytest.raises(TrainerError, match=r"loss of step 4 is nan.*learning_rate"):
        _refuse_broken(float("nan"), 4, 1e-3)


async def test_sampler_and_trainer_that_disagree_are_reported(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    made = config(server)
    async with started(made, tiny_model, tmp_path, said=said) as (trainer, ref):
        samples = await sample(await open_policy(ref, made))
        shifted = [replace(s, logprobs=s.logprobs - np.float32(0.5)) for s in samples]
        update = await trainer.update(batch(shifted, [1.0, 0.0, 0.0, 0.0], 0))
        assert update.metrics["train/logprob_mismatch_mean"] == pytest.approx(0.5, abs=1e-3)
        assert any("disagree by 0.5 nats" in line for line in said)


async def test_a_batch_of_another_step_or_of_nothing_is_refused(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    made = config(server, max_token_trainer_length=10)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        samples = await sample(await open_policy(ref, made))
        with pytest.raises(TrainerError, match="step 3"):
            await trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 3))
        with pytest.raises(TrainerError, match="4 too long"):
            await trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 0))
        assert (await trainer.save("still-sound")).step == 0


async def test_a_model_that_is_not_offered_is_refused_by_name(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    trainer = TinkerTrainer(config(server))
    with pytest.raises(ConfigError, match="does not train a model"):
        await trainer.start(run_spec(trainer.config, tiny_model / "x", tmp_path), None)
    await trainer.close()


async def test_a_checkpoint_that_is_gone_is_a_checkpoint_error(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    trainer = TinkerTrainer(config(server))
    gone = Checkpoint("gone", 3, "tinker://nobody:train:0/weights/gone", "tinker://nobody:train:0/sampler_weights/gone")
    with pytest.raises(CheckpointError, match="could not be loaded"):
        await trainer.start(run_spec(trainer.config, tiny_model, tmp_path), gone)
    await trainer.close()


async def test_silence_at_an_address_of_this_machine_is_named_at_once(tiny_model: Path, tmp_path: Path) -> None:
    trainer = TinkerTrainer(TinkerConfig(base_url="http://127.0.0.1:1", learning_rate=1e-4))
    with pytest.raises(TrainerError, match="nothing answers at http"):
        await trainer.start(run_spec(trainer.config, tiny_model, tmp_path), None)
    await trainer.close()


async def test_local_starts_a_server_that_survives_its_death_by_a_rewind(tiny_model: Path, tmp_path: Path) -> None:
    made = TinkerConfig(local=True, local_threads=1, lora_rank=4, learning_rate=1e-2)
    said: list[str] = []
    async with started(made, tiny_model, tmp_path, said=said) as (trainer, ref):
        ref = (await take_step(trainer, made, ref)).ref
        checkpoint = await trainer.save("step-000001")
        policy = await open_policy(ref, made)
        assert policy.tokenizer().eos_token_id == 256
        samples = await sample(policy)
        assert trainer._server is not None
        dead = trainer._server.pid
        os.kill(dead, 9)
        with pytest.raises(UpdateUncertain, match=r"has ended.*local_tinker.log"):
            await trainer.update(batch(samples, [1.0, 0.0, 0.0, 0.0], 1))
        with pytest.raises(UpdateUncertain, match="has ended"):
            await sample(policy)
        with pytest.raises(UpdateUncertain, match="has ended"):
            await open_policy(replace(ref, uri=checkpoint.weights), made)
        again = await trainer.start(run_spec(made, tiny_model, tmp_path, lineage=1, said=said), checkpoint)
        assert trainer._server.pid != dead
        assert (await take_step(trainer, made, again)).ref.step == 2
        await trainer.save("final")
    assert any("starting a Tinker server" in line for line in said)
    catalogue = await open_catalogue(made, tmp_path)
    try:
        names = [entry.uri.split("/")[-1] for entry in await catalogue.list() if entry.kind == "state"]
        assert names == ["final", "step-000001"]
    finally:
        await catalogue.close()


@pytest.mark.parametrize("moment", ["sampling", "saving", "checking"])
async def test_a_local_server_that_ends_at_any_moment_is_a_rewind(
    moment: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TinkerConfig(local=True, local_threads=1, lora_rank=4, learning_rate=1e-2)
    async with started(made, tiny_model, tmp_path) as (trainer, ref):
        checkpoint = await trainer.save("step-000000")
        policy = await open_policy((await take_step(trainer, made, ref)).ref, made)
        assert trainer._server is not None
        assert trainer._session is not None
        dead, session = trainer._server.pid, trainer._session[1]

        async def unlisted(*arguments: Any) -> list[str]:
            os.kill(dead, 9)
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr("tinker_atropos_tinker.trainer.unlisted", unlisted)
        if moment != "checking":
            os.kill(dead, 9)
        with pytest.raises(UpdateUncertain, match="has ended"):
            await (sample(policy, n=64, length=100) if moment == "sampling" else trainer.save("step-000001"))
        monkeypatch.undo()
        again = await trainer.start(run_spec(made, tiny_model, tmp_path, lineage=1), checkpoint)
        assert trainer._server.pid != dead
        assert session.holder._closed
        assert (await take_step(trainer, made, again)).ref.step == 1


async def test_a_check_without_an_answer_costs_a_warning(
    server: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with started(config(server), tiny_model, tmp_path, said=said) as (trainer, _):
        monkeypatch.setattr("tinker_atropos_tinker.trainer.VERIFY_SECONDS", 0.05)
        monkeypatch.setattr("tinker_atropos_tinker.trainer.unlisted", lambda *_: asyncio.Event().wait())
        assert (await trainer.save("kept")).step == 0
    assert any("could not be asked for it" in line and "within 0.05 s" in line for line in said)


async def test_ratios_beyond_sense_on_stale_samples_are_reported_once_in_some_steps(
    server: Any, tiny_model: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    made = config(server, learning_rate=0.0)
    async with started(made, tiny_model, tmp_path, said=said) as (trainer, ref):
        samples = await sample(await open_policy(ref, made))
        moved = [replace(s, logprobs=s.logprobs - np.float32(4)) for s in samples]
        for step in range(3):  # only from the second on is the policy another one
            await trainer.update(batch(moved, [1.0, 0.0, 0.0, 0.5], step))
    warned = [line for line in said if "importance ratio" in line]
    assert len(warned) == 1
    assert "step 1" in warned[0]
    assert "reached 54.6" in warned[0]


async def test_local_checkpoints_of_a_run_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no local checkpoints"):
        await open_catalogue(TinkerConfig(local=True), tmp_path)
    with pytest.raises(ConfigError, match="--run NAME"):
        await open_catalogue(TinkerConfig(local=True), None)


def test_telemetry_is_off_unless_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_atropos_tinker.service import sdk

    monkeypatch.delenv("TINKER_TELEMETRY", raising=False)
    sdk()
    assert os.environ["TINKER_TELEMETRY"] == "0"
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    sdk()
    assert os.environ["TINKER_TELEMETRY"] == "1"
