"""The configuration that is written for a script avoids the traps of Atropos' own defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tinker_atropos.errors import ConfigError
from tinker_atropos_atropos.script_yaml import Joined, Written, script_configuration

API = "http://127.0.0.1:8000"


def joined(**changes: Any) -> Joined:
    return replace(Joined("math", "/models/tiny", 1.0, 1.0, "sglang", True), **changes)


def fires(every: int, steps: int) -> bool:
    """Atropos' own rule of when to evaluate, as a trainer goes step by step."""
    return any((step % every) > ((step + 1) % every) for step in range(steps))


@pytest.fixture
def written(endpoint: Any, info: Any) -> Any:
    def write(own: Any = None, script: Joined | None = None, **changes: Any) -> Written:
        return script_configuration(script or joined(), endpoint, replace(info, **changes), API, own)

    return write


def test_two_equal_servers_override_whatever_a_script_has(written: Any) -> None:
    servers = written().content["openai"]
    assert len(servers) == 2
    assert servers[0] == servers[1]
    assert servers[0]["base_url"] == "http://127.0.0.1:9/v1"
    assert servers[0]["model_name"] == "tiny"
    assert servers[0]["tokenizer_name"] == "/models/tiny"
    assert servers[0]["server_type"] == "sglang"
    assert servers[0]["api_key"] == "secret"


def test_no_health_check_samples_once_a_second(written: Any) -> None:
    assert all(server["health_check"] is False for server in written().content["openai"])


def test_there_is_always_a_name_to_register_with(written: Any) -> None:
    assert written().content["env"]["wandb_name"] == "math"
    assert written({"env": {"wandb_name": None}}).content["env"]["wandb_name"] == "math"


@pytest.mark.parametrize("every", [1, 2, 3, 25])
def test_evaluation_fires(written: Any, every: int) -> None:
    assert fires(written(steps_per_eval=every).content["env"]["steps_per_eval"], 60)


def test_steps_per_eval_1_would_not_fire_and_the_change_is_said(written: Any) -> None:
    assert not fires(1, 60)
    assert "never evaluates" in written(steps_per_eval=1).notes[0]


def test_no_evaluation_stays_no_evaluation(written: Any) -> None:
    assert written(steps_per_eval=0).content["env"]["steps_per_eval"] == 0


def test_the_script_never_ends_by_counting_waiting_groups_as_trained(written: Any) -> None:
    env = written().content["env"]
    assert 2 + 100 * env["group_size"] // env["batch_size"] <= env["total_steps"]


def test_groups_of_equal_scores_are_sent_on_to_be_counted(written: Any) -> None:
    assert written().content["env"]["ensure_scores_are_not_same"] is False


def test_groups_in_flight_are_bounded_and_never_cancelled_by_a_full_queue(written: Any) -> None:
    env = written(batch_size=8, group_size=4, max_staleness=1).content["env"]
    assert env["max_num_workers"] == 4
    # Atropos cancels what is in flight once the queue holds this many groups: no more than that are ever begun.
    assert env["max_num_workers"] <= env["max_batches_offpolicy"] * env["batch_size"] // env["group_size"]


def test_weights_part_the_groups_in_flight(written: Any) -> None:
    workers = [
        written(script=joined(share=share), batch_size=48).content["env"]["max_num_workers"] for share in (2 / 3, 1 / 3)
    ]
    assert workers == [16, 8]
    assert written(script=joined(share=0.001)).content["env"]["max_num_workers"] == 1


def test_a_weight_reaches_the_api(written: Any) -> None:
    env = written(script=joined(weight=2.0, min_allocation=0.25)).content["env"]
    assert (env["inference_weight"], env["min_batch_allocation"]) == (2.0, 0.25)


def test_a_scripts_default_allocation_does_not_hold_up_others(written: Any) -> None:
    assert written({"env": {"min_batch_allocation": 0.9}}).content["env"]["min_batch_allocation"] == 0.0


def test_nothing_goes_to_weights_and_biases(written: Any) -> None:
    assert written({"env": {"use_wandb": True}}).content["env"]["use_wandb"] is False


def test_a_file_of_its_own_goes_before_what_is_only_suggested(written: Any) -> None:
    own = {"env": {"group_size": 2, "difficulty": "hard"}, "openai": {"timeout": 9, "server_type": "openai"}}
    content = written(own).content
    assert (content["env"]["group_size"], content["env"]["difficulty"]) == (2, "hard")
    assert [(server["timeout"], server["server_type"]) for server in content["openai"]] == [(9, "openai")] * 2


def test_a_file_of_its_own_can_not_cut_it_off_and_that_is_said(written: Any) -> None:
    own = {"env": {"rollout_server_url": "http://elsewhere:1"}, "openai": [{"base_url": "http://elsewhere:2/v1"}]}
    result = written(own)
    assert result.content["env"]["rollout_server_url"] == API
    assert result.content["openai"][0]["base_url"] == "http://127.0.0.1:9/v1"
    assert "rollout_server_url" in result.notes[0]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"env": [1]}, "env of its file"),
        ({"openai": "x"}, "openai of its file"),
        ({"openai": [{"server_type": "trl"}]}, "trl"),
        ({"env": {"group_size": 0}}, "group_size"),
        ({"env": {"group_size": 64}}, "more than this run's batch of 8"),
    ],
)
def test_a_file_of_a_wrong_shape_is_an_error(written: Any, own: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        written(own)
