"""The SDK's own contract test, for every kind of data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinker_atropos import Completion
from tinker_atropos.testing import check_environment
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.environment import make

FIXTURE = str(Path(__file__).parent / "gsm8k_fixture.jsonl")


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "arithmetic"},
        {"dataset": "gsm_symbolic"},
        {"dataset": FIXTURE},
        {"dataset": FIXTURE, "prompt_format": "completion", "few_shot": 2, "length_weight": 0.1, "format_weight": 0.1},
    ],
)
async def test_the_environment_keeps_the_contract(settings: dict[str, Any]) -> None:
    environment = make(Gsm8kConfig(**settings))
    check_environment(environment)
    # What only math-verify can read, so that its process is in play too.
    check_environment(environment, completions=[Completion(r"\boxed{3 \times 6}"), Completion(r"\boxed{x + 18}")])
    await environment.close()
