"""A tiny model and a server over it, started as a process, for every test here; clients are the real SDK's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tinker_atropos_local_tinker.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tinker_atropos_local_tinker import start_local_server

    folder = tmp_path_factory.mktemp("server")
    with start_local_server(folder / "store", model=str(tiny_model), threads=1, log=folder / "log") as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with connect(server.url) as service:
        yield service


@pytest.fixture
def training(client: Any, tiny_model: Path) -> Any:
    return client.create_lora_training_client(base_model=str(tiny_model), rank=4, seed=7).result()


def connect(url: str) -> Any:
    import tinker
    from tinker_atropos_local_tinker import LOCAL_API_KEY

    return tinker.ServiceClient(base_url=url, api_key=LOCAL_API_KEY)


@pytest.fixture(scope="session")
def to_service() -> Any:
    return connect


@pytest.fixture(scope="session")
def rl_datum() -> Any:
    """Make a datum for importance_sampling of a prompt and what was sampled after it."""

    def make(prompt: list[int], sampled: list[int], logprobs: list[float], advantage: float) -> Any:
        from tinker import types

        tokens, before = [*prompt, *sampled], len(prompt) - 1
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * before + list(logprobs),
                "advantages": [0.0] * before + [advantage] * len(sampled),
            },
        )

    return make


@pytest.fixture(scope="session")
def sft_datum() -> Any:
    def make(tokens: list[int], weights: list[float] | None = None) -> Any:
        from tinker import types

        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if weights is not None:
            inputs["weights"] = weights
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    return make
