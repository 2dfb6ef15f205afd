"""Inside a run: posted groups become the run's groups, proven token by token, and are acknowledged once it has them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tinker_atropos.external import Proven, RunInfo
from tinker_atropos.trajectory import FloatArray, Group, IntArray, PolicyRef, TaskRef
from tinker_atropos_atropos.api import ApiSettings
from tinker_atropos_atropos.convert import distillation, to_group, trained_mask
from tinker_atropos_atropos.posted import Posted
from tinker_atropos_atropos.sink_backend import AT_ONCE, SinkBackend

Make = Callable[..., dict[str, Any]]
REF = PolicyRef("run", 0, 3, "file:///x")


@dataclass
class FakeSink:
    """Takes groups up to a cap."""

    info: RunInfo
    cap: int = 100
    step: int = 5
    groups: list[Group] = field(default_factory=list)
    discarded: list[tuple[Group, str]] = field(default_factory=list)
    shown: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    async def put(self, group: Group, *, wait: float | None = None) -> Literal["accepted", "duplicate", "blocked"]:
        if any(group.id == other.id for other in self.groups):
            return "duplicate"
        if len(self.groups) >= self.cap:
            await asyncio.sleep(wait or 0)
            return "blocked"
        self.groups.append(group)
        return "accepted"

    async def discard(self, group: Group, reason: str) -> None:
        self.discarded.append((group, reason))

    def metrics(self, values: Mapping[str, float]) -> None:
        self.shown |= values

    def say(self, line: str) -> None:
        pass


@dataclass
class FakeEndpoint:
    """Has sampled the last two tokens of whatever begins below 100, in two turns."""

    url: str = "http://127.0.0.1:1/v1"
    token: str | None = None
    model: str = "fake"
    tokenizer: str = "fake"
    context_length: int | None = 100
    sent: list[Any] = field(default_factory=list)

    def seen(self) -> dict[str, int]:
        return {}

    async def ready(self) -> None:
        pass

    def prove(self, tokens: IntArray, logprobs: FloatArray | None = None) -> Proven:
        assert logprobs is None or (logprobs.shape == tokens.shape and logprobs.dtype == np.float32)
        self.sent.append(None if logprobs is None else logprobs.tolist())
        mask = np.zeros(len(tokens), dtype=np.bool_)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        if tokens[0] >= 100:
            return Proven(mask, logprobs, (), ())
        mask[-2:] = True
        logprobs[-2:] = (-0.5, -0.25)
        return Proven(mask, logprobs, (REF, REF), ("length", "stop"))


@pytest.fixture
def sink(tmp_path: Path) -> FakeSink:
    return FakeSink(
        RunInfo(
            name="run",
            folder=tmp_path,
            seed=0,
            starting_step=5,
            total_steps=9,
            batch_size=4,
            group_size=2,
            max_token_length=64,
            checkpoint_interval=2,
            steps_per_eval=0,
            filter_equal=True,
        )
    )


async def test_environments_see_the_run(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    async with open_backend(SinkBackend(sink, FakeEndpoint())) as api:
        assert await api.get("/wandb_info") == {"group": "run", "project": "tinker-atropos"}
        assert await api.get("/info") == {"batch_size": 4, "max_token_len": 64}
        registered = await api.register_env()
        assert (registered["status"], registered["starting_step"], registered["num_steps"]) == ("success", 5, 9)
        await api.post("/scored_data", make_group(1, env_id=0))
        sink.step = 6
        status = await api.get("/status-env", {"env_id": 0})
        assert (status["current_step"], status["queue_size"]) == (6, 1)
        for method, path, body in (
            ("GET", "/batch", None),
            ("GET", "/reset_data", None),
            ("POST", "/tinker-atropos/fence", {}),
        ):
            assert (await api.call(method, path, body))[0] == 409
        with pytest.raises(AssertionError, match="trains here itself"):
            await api.register()
        assert (await api.get("/latest_example"))["tokens"] == make_group(1)["tokens"]


async def test_environments_are_told_a_folder_that_is_the_same_from_theirs(
    sink: FakeSink, open_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink.info = dataclasses.replace(sink.info, folder=Path("runs/run"))
    async with open_backend(SinkBackend(sink, FakeEndpoint())) as api:
        assert (await api.register_env())["checkpoint_dir"] == str(tmp_path / "runs" / "run")


async def test_a_group_arrives_once_and_proven(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    endpoint = FakeEndpoint()
    async with open_backend(SinkBackend(sink, endpoint)) as api:
        await api.register_env()
        sent = make_group(1, env_id=0, advantages=[[0.0, 0.0, 1.0, 2.0]] * 2)
        sent["inference_logprobs"] = [[1.0, -2.0, -0.5, -0.25], [1.0, -3.0, -0.5, -0.25]]
        assert await api.post("/scored_data", sent) == {"status": "received"}
        assert await api.post("/scored_data", sent) == {"status": "received", "duplicate": True}
    (group,) = sink.groups
    assert endpoint.sent[:2] == sent["inference_logprobs"]
    first = group.trajectories[0]
    assert group.scores == (0.0, 1.0)
    assert group.task.split == "env_0"
    assert first.policies == (REF, REF)
    assert first.finish_reasons == ("length", "stop")
    assert first.rewards == (0.0, 0.0)
    segment = first.segments[0]
    assert segment.tokens.tolist() == [1, 7, 8, 0]
    assert segment.mask.tolist() == [False, False, True, True]
    assert segment.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert segment.advantages is not None
    assert segment.advantages.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert sink.shown == {"tokens_trained": 4.0, "tokens_unproven": 0.0, "groups_duplicate": 1.0}


async def test_the_unproven_is_discarded_with_a_reason(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    async with open_backend(SinkBackend(sink, FakeEndpoint())) as api:
        answer = await api.post("/scored_data", make_group(100))
        assert answer == {"status": "received", "discarded": "unproven"}
        untrained = make_group(1, masks=[[-100] * 4] * 2)
        assert (await api.post("/scored_data", untrained))["discarded"] == "nothing to train on"
        mixed = make_group(1, advantages=[[1.0]] * 2, messages=[[{"role": "user", "content": ""}]] * 2)
        assert (await api.post("/scored_data", mixed))["discarded"] == "advantages are not one a token"
    assert [reason for _, reason in sink.discarded] == [
        *("unproven", "nothing to train on"),
        "advantages are not one a token",
    ]
    assert not sink.groups


async def test_a_full_sink_holds_the_post_and_then_says_so(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    sink.cap = 1
    async with open_backend(SinkBackend(sink, FakeEndpoint()), ApiSettings(hold=0.1)) as api:
        await api.post("/scored_data", make_group(1))
        assert (await api.call("POST", "/scored_data", make_group(2)))[0] == 503
        await api.post("/scored_data", make_group(1))
        sink.cap = 2
        await api.post("/scored_data", make_group(2))


async def test_a_place_is_held_until_the_put_ends(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    backend = SinkBackend(sink, FakeEndpoint())
    async with open_backend(backend, ApiSettings(hold=0.3)) as api, AsyncExitStack() as places:
        for _ in range(AT_ONCE):
            await places.enter_async_context(backend.room(1.0))
        status, answer = await api.call("POST", "/scored_data", make_group(1))
        assert (status, sink.groups) == (503, [])
        assert f"{AT_ONCE} groups wait" in answer["detail"]
        await places.aclose()
        assert (await api.call("POST", "/scored_data", {}))[0] == 422  # gives its place back as well
        for _ in range(AT_ONCE + 1):
            await api.post("/scored_data", make_group(1))


async def test_what_the_trainer_can_not_take_is_refused(sink: FakeSink, open_backend: Any, make_group: Make) -> None:
    async with open_backend(SinkBackend(sink, FakeEndpoint())) as api:
        for changes, field_ in (
            ({"images": ["abc", None]}, "images"),
            ({"env_id": 3}, "env_id"),
            ({"tokens": [[1] * 101, [1]], "masks": [[1] * 101, [1]], "inference_logprobs": None}, "tokens"),
        ):
            status, answer = await api.call("POST", "/scored_data", make_group(1) | changes)
            assert (status, answer["detail"][0]["loc"][1]) == (422, field_)
        await api.post("/scored_data", make_group(1, images=[None, None]))


def posted(**changes: Any) -> Posted:
    group: dict[str, Any] = {
        **{"tokens": [[1, 7, 8, 9]], "masks": [[-100, 7, 8, 9]], "scores": [1.0]},
        "inference_logprobs": [[1.0, -2.0, -0.5, 1.0]],
    }
    return Posted(**group | changes)


def convert(group: Posted, **settings: Any) -> Any:
    return to_group(group, id="g", task=TaskRef("s", 0, 0), prove=FakeEndpoint().prove, **settings)


def test_unproven_tokens_are_masked_and_counted() -> None:
    converted = convert(posted())
    (trajectory,) = converted.group.trajectories
    assert trajectory.segments[0].mask.tolist() == [False, False, True, True]
    assert trajectory.masked == {"unproven": 1}
    # 1.0 on a sampled token is atroposlib's padding, not what the sampler said.
    assert trajectory.metrics == {"logprobs_disagree": 1}
    assert converted.counts == {"unproven": 1, "trained": 2, "logprobs_disagree": 1}


def test_posted_logprobs_help_to_prove_and_their_absence_is_told() -> None:
    endpoint = FakeEndpoint()
    for group in (posted(), posted(inference_logprobs=None)):
        to_group(group, id="g", task=TaskRef("s", 0, 0), prove=endpoint.prove)
    assert endpoint.sent == [[1.0, -2.0, -0.5, 1.0], None]


def test_posted_logprobs_stand_only_where_they_are_trusted() -> None:
    converted = convert(posted(tokens=[[100, 7, 8, 9]]), trust_inference_logprobs=True, newest=REF)
    (trajectory,) = converted.group.trajectories
    assert trajectory.segments[0].mask.tolist() == [False, True, True, False]
    assert trajectory.segments[0].logprobs.tolist() == [0.0, -2.0, -0.5, 0.0]
    assert trajectory.policies == (REF,)
    assert trajectory.masked == {"unproven": 1}
    assert converted.discard is None
    assert convert(posted(tokens=[[100, 7, 8, 9]])).discard == "unproven"


def test_overrides_travel_with_the_group() -> None:
    group = posted(
        overrides=[{"set_advantage_to_zero": True}],
        group_overrides={"sft": True, "refused": "a word of the run's own"},
        generation_params={"temperature": 0.5},
    )
    converted = convert(group).group
    assert converted.trajectories[0].segments[0].advantages.tolist() == [0.0] * 4
    assert converted.overrides["sft"] is True
    assert "refused" not in converted.overrides
    assert converted.overrides["generation_params"] == {"temperature": 0.5}


def test_distillation_trains_on_the_teachers_log_probability_less_the_samplers() -> None:
    plain = convert(posted()).group.trajectories[0].segments[0]
    trained = [place for place in range(4) if plain.mask[place]]
    tokens = plain.tokens.tolist()
    ids, teacher = [[token] for token in tokens], [[-0.25]] * 4
    segment = convert(posted(distill_token_ids=[ids], distill_logprobs=[teacher])).group.trajectories[0].segments[0]
    expected = [-0.25 - float(plain.logprobs[place]) if place in trained else 0.0 for place in range(4)]
    assert segment.advantages.tolist() == pytest.approx(expected)
    assert segment.mask.tolist() == plain.mask.tolist()

    first, others = trained[0], trained[1:]
    ids[first] = [tokens[first] + 1]  # the teacher ranks another token first and says nothing of the sampled one
    for place in others:
        ids[place], teacher[place] = [0, tokens[place]], [-5.0, -0.5]
    converted = convert(posted(distill_token_ids=[ids], distill_logprobs=[teacher]))
    trajectory = converted.group.trajectories[0]
    assert trajectory.masked == {"unproven": 1, "no_teacher_logprob": 1}
    assert [place for place in range(4) if trajectory.segments[0].mask[place]] == others
    for place in others:
        assert trajectory.segments[0].advantages[place] == pytest.approx(-0.5 - float(plain.logprobs[place]))


@pytest.mark.parametrize("most", [1, 3, None])
def test_distillation_looks_up_each_token_in_its_own_row(most: int | None) -> None:
    rng = np.random.default_rng(0)
    length = 300
    tokens = rng.integers(0, 5, length).astype(np.int32)
    logprobs = -rng.random(length).astype(np.float32)
    sizes = [most or int(rng.integers(0, 5)) for _ in range(length)]
    ids = [rng.integers(0, 5, size).tolist() for size in sizes]  # with repetitions: the first of them counts
    teacher = [(-rng.random(size)).tolist() for size in sizes]
    advantages, known = distillation(tokens, logprobs, ids, teacher)
    assert advantages.shape == known.shape == (length,)
    for place, token in enumerate(tokens.tolist()):
        assert known[place] == (token in ids[place])
        expected = teacher[place][ids[place].index(token)] - logprobs[place] if known[place] else 0.0
        assert advantages[place] == np.float32(expected)
    assert 0 < known.sum() < length


def test_distillation_of_nothing_is_nothing() -> None:
    none = np.zeros(0, np.int32)
    assert [len(found) for found in distillation(none, none.astype(np.float32), [], [])] == [0, 0]
    advantages, known = distillation(np.ones(2, np.int32), np.zeros(2, np.float32), [[], []], [[], []])
    assert (advantages.tolist(), known.tolist()) == ([0, 0], [False, False])


@pytest.mark.parametrize(
    ("masks", "tokens", "expected"),
    [
        ([-100, 5, 6], [4, 5, 6], [False, True, True]),
        ([0, 1, 1], [4, 5, 6], [False, True, True]),
        ([1, 1, 1], [4, 5, 6], [True, True, True]),
        ([0, 1], [0, 1], [True, True]),
        ([-100, 0], [3, 0], [False, True]),
    ],
)
def test_labels_say_what_is_trained(masks: list[int], tokens: list[int], expected: list[bool]) -> None:
    assert trained_mask(masks, np.asarray(tokens, dtype=np.int32)).tolist() == expected
