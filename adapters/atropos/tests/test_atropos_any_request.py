"""Whatever is sent to whichever endpoint: an answer in time, and never a 500."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_atropos.state import MemoryState
from tinker_atropos_atropos.api import ApiSettings, make_app
from tinker_atropos_atropos.serving import serving
from tinker_atropos_atropos.state_backend import StateBackend

ENDPOINTS = sorted(
    {
        (route.method, route.resource.canonical)
        for route in make_app(StateBackend(MemoryState(1))).router.routes()
        if route.resource is not None
    }
)
SECONDS = 10.0

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.lists(values, max_size=3), max_size=3) | anything


numbers = st.integers(-200, 2**33) | st.floats() | st.none()
group = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=2) | rows(numbers),
        "masks": st.just([[1, 1]]) | st.just([[1, 1], [1, 1]]) | rows(numbers),
        "scores": st.lists(st.floats() | st.integers(), max_size=2) | anything,
    },
    optional={
        **{name: rows(numbers) for name in ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs")},
        **dict.fromkeys(("messages", "overrides", "group_overrides", "generation_params", "images"), anything),
        "env_id": st.integers(-1, 2) | anything,
    },
)
fields = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.integers(-2, 9) | anything for name in ("batch_size", "max_token_len", "num_steps", "group_size")},
        **{name: st.integers(-2, 9) | anything for name in ("starting_step", "save_checkpoint_interval", "env_id")},
        **{name: st.text(max_size=5) | anything for name in ("wandb_group", "wandb_project", "checkpoint_dir")},
        **{name: st.floats() | anything for name in ("weight", "min_batch_allocation", "max_token_length")},
        **{name: st.text(max_size=5) | anything for name in ("desired_name", "key", "reason")},
        **{name: st.integers(-1, 3) | anything for name in ("fence", "n", "step", "wait")},
        **{name: st.lists(st.text(max_size=5), max_size=2) | anything for name in ("ids", "consumed")},
    },
)
trainer = st.builds(
    lambda batch: {
        **{"wandb_group": "g", "wandb_project": "p", "batch_size": batch, "max_token_len": 9, "checkpoint_dir": ""},
        **{"save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 9},
    },
    st.integers(1, 4),
)
environment = st.builds(
    lambda size, share: {
        **{"max_token_length": 9, "desired_name": "e", "weight": 1.0, "group_size": size},
        "min_batch_allocation": share,
    },
    st.integers(1, 3),
    st.none() | st.floats(0, 1),
)
documents = (group | st.lists(group, max_size=3) | fields | trainer | environment | anything).map(
    lambda value: json.dumps(value).encode()
)
bodies = st.tuples(documents | st.binary(max_size=40), st.sampled_from(["", "gzip", "broken", "named"]))
calls = st.lists(st.tuples(st.sampled_from(ENDPOINTS), bodies), min_size=1, max_size=12)


async def play(script: list[Any]) -> None:
    import aiohttp

    backend = StateBackend(MemoryState(6), patience=0.01)
    limits = ApiSettings(hold=0.02, max_body=100_000, max_plain=100_000)
    async with serving(backend, limits) as url, aiohttp.ClientSession() as session:
        for (method, path), (body, form) in script:
            headers = {"Content-Encoding": "gzip"} if form in {"gzip", "broken"} else {}
            packed = gzip.compress(body) if form == "gzip" else body
            if form == "named":
                headers["Idempotency-Key"] = "k"
            if path == "/tinker-atropos/lease":  # it may wait as long as it is told to
                packed = packed.replace(b'"wait"', b'"w"').replace(b"}", b', "wait": 0.01}', 1)
            async with (
                asyncio.timeout(SECONDS),
                session.request(method, url + path, data=packed, headers=headers) as answer,
            ):
                text = await answer.read()
                assert answer.status in {200, 400, 409, 413, 422, 503}, (method, path, body, answer.status, text)
                if answer.status == 422:
                    assert json.loads(text)["detail"][0]["msg"]
        # Whatever has come before, a sound trainer is served.
        async with session.get(f"{url}/status") as answer:
            assert answer.status == 200


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=calls)
def test_no_request_fails_or_hangs(script: list[Any]) -> None:
    asyncio.run(play(script))
