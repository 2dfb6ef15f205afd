"""An endpoint is scored, asked nothing twice, and its troubles are borne or said. The endpoint here is a fake one."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

COUNT = ("-n", 6, "-r", 2)


def answer_some(path: str, body: dict[str, Any]) -> str:
    """Right for tasks 0 to 3; for 4 and 5 it depends on the seed."""
    asked = body["messages"][-1]["content"].split()[-1]
    return asked if int(asked) < 4 or body["seed"] % 2 else "no idea"


def test_an_endpoint_is_scored(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.say = answer_some
    code, out, _ = run_eval(environment_file, "-m", fake_endpoint.url, *COUNT, "--format", "json", "--max-tokens", 9)
    report = json.loads(out)
    assert code == 0
    assert (report["tasks"], report["episodes"], report["missing"]) == (6, 12, 0)
    assert report["model"]["name"] == "fake-1"
    assert report["reward"]["mean"] == report["pass"]["1"]["mean"] == report["metrics"]["reward/right"]["mean"]
    assert report["pass"]["1"]["mean"] <= report["pass"]["2"]["mean"] <= 1
    assert report["finish_reasons"] == {"stop": 12}
    assert report["tokens"]["sampled"] == {"total": 24, "per_episode": 2.0}
    path, body = fake_endpoint.requests[0]
    assert path == "/v1/chat/completions"
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "seed"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("fake-1", 1.0, 9)
    assert len({body["seed"] for _, body in fake_endpoint.requests}) == 12


def test_one_answer_per_task_is_greedy_unless_said_otherwise(run_eval, fake_endpoint, environment_file) -> None:
    run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1)
    run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1, "--temperature", 0.5)
    assert [body["temperature"] for _, body in fake_endpoint.requests] == [0.0, 0.5]


def test_raw_text_goes_to_completions_and_wants_a_bound(run_eval, fake_endpoint, environment_file) -> None:
    setting = ("--set", "env.prompt_format=completion")
    code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1, *setting)
    assert (code, fake_endpoint.requests) == (2, [])
    assert "--max-tokens" in err
    assert run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1, *setting, "--max-tokens", 4)[0] == 0
    assert fake_endpoint.requests[0][0] == "/v1/completions"
    assert fake_endpoint.requests[0][1]["prompt"] == "How many? 0"


def test_rollouts_are_kept_in_the_shape_of_a_run(run_eval, fake_endpoint, environment_file, tmp_path) -> None:
    from tinker_atropos.rollout.records import read_trajectory

    run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1, "--name", "one")
    (line,) = (tmp_path / "evals" / "one" / "episodes.jsonl").read_text().splitlines()
    trajectory = read_trajectory(json.loads(line))
    assert [message["content"] for message in trajectory.messages] == ["How many? 0", "7"]
    assert not (tmp_path / "evals" / "one" / "answers.jsonl").exists()


def test_the_same_command_again_asks_nothing(run_eval, fake_endpoint, environment_file) -> None:
    first = run_eval(environment_file, "-m", fake_endpoint.url, *COUNT)
    asked = len(fake_endpoint.requests)
    again = run_eval(environment_file, "-m", f"{fake_endpoint.url}#fake-1", *COUNT)
    assert (again[0], again[1], len(fake_endpoint.requests)) == (0, first[1], asked)


def test_killed_in_the_middle_it_goes_on_and_asks_nothing_twice(
    start_eval, fake_endpoint, environment_file, tmp_path, wait_until
) -> None:
    fake_endpoint.say, fake_endpoint.hold_after = answer_some, 7
    episodes = tmp_path / "evals" / "killed" / "episodes.jsonl"
    command = (environment_file, "-m", fake_endpoint.url, *COUNT, "--name", "killed", "--concurrency", 5)
    process = start_eval(*command)
    wait_until(lambda: episodes.exists() and episodes.read_bytes().count(b"\n") == 7)
    process.kill()
    process.communicate()
    assert sum(fake_endpoint.answered.values()) == 7
    with episodes.open("ab") as file:
        file.write(b'{"task": 5, "sam')  # what a kill in the middle of a write leaves
    fake_endpoint.hold_after = None
    process = start_eval(*command, "--format", "json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "7 of 12 episodes are there already" in err
    assert json.loads(out)["episodes"] == 12
    assert len(fake_endpoint.answered) == 12
    assert set(fake_endpoint.answered.values()) == {1}


def test_killed_while_an_answer_is_scored_it_does_not_ask_again(
    start_eval, fake_endpoint, environment_file, tmp_path, wait_until
) -> None:
    """The answer is on the disk before anything is made of it."""
    text = environment_file.read_text()
    slow = "import pathlib, time\n" + text.replace(
        "completion.text.strip() ==", "pathlib.Path('go').exists() and completion.text.strip() =="
    ).replace('"right": lambda completion, task:', '"right": lambda completion, task: hang() or')
    slow += "\ndef hang():\n    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n"
    environment_file.write_text(slow)
    command = (environment_file, "-m", fake_endpoint.url, "-n", 1, "--name", "slow")
    answers = tmp_path / "evals" / "slow" / "answers.jsonl"
    process = start_eval(*command)
    wait_until(lambda: answers.exists() and answers.read_bytes().endswith(b"\n"))
    process.kill()
    process.communicate()
    (tmp_path / "go").touch()
    process = start_eval(*command)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert list(fake_endpoint.answered.values()) == [1]


def test_ctrl_c_keeps_what_is_there_and_says_how_to_go_on(
    start_eval, fake_endpoint, environment_file, tmp_path, wait_until
) -> None:
    fake_endpoint.hold_after = 3
    command = (environment_file, "-m", fake_endpoint.url, *COUNT, "--name", "stopped", "--concurrency", 2)
    process = start_eval(*command)
    wait_until(lambda: len(fake_endpoint.requests) == 5)
    process.send_signal(signal.SIGINT)
    fake_endpoint.released.set()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped with 5 of 12 episodes" in err
    assert f"eval {environment_file} -m {fake_endpoint.url} -n 6 -r 2 --name stopped" in err
    fake_endpoint.hold_after = None
    process = start_eval(*command)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert sum(fake_endpoint.answered.values()) == 12


def test_one_process_at_a_time(run_eval, start_eval, fake_endpoint, environment_file, wait_until) -> None:
    fake_endpoint.hold_after = 0
    command = (environment_file, "-m", fake_endpoint.url, *COUNT, "--name", "held")
    process = start_eval(*command)
    wait_until(lambda: len(fake_endpoint.requests) > 0)
    code, _, err = run_eval(*command)
    assert (code, "in use by another process" in err) == (2, True), err
    process.kill()
    process.communicate()


def test_passing_troubles_are_borne(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.script = [503, "drop", 429, "garbage"]
    code, out, err = run_eval(
        environment_file, "-m", fake_endpoint.url, "-n", 2, "--concurrency", 1, "--format", "json"
    )
    assert (code, json.loads(out)["episodes"], len(fake_endpoint.requests)) == (0, 2, 6)
    assert "again in" in err


def test_lasting_trouble_ends_it_and_is_tried_again_later(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.always = 500
    command = (environment_file, "-m", fake_endpoint.url, "-n", 12, "--retries", 1, "--concurrency", 1)
    code, out, err = run_eval(*command)
    assert (code, out) == (1, "")
    assert "8 episodes in a row failed" in err
    assert "planned trouble" in err
    assert len(fake_endpoint.requests) == 16
    fake_endpoint.always = None
    assert run_eval(*command)[0] == 0
    assert sum(fake_endpoint.answered.values()) == 12


def test_a_few_failures_are_reported_and_the_exit_code_says_so(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.script = [400]
    command = (environment_file, "-m", fake_endpoint.url, *COUNT, "--concurrency", 1, "--format", "json")
    code, out, err = run_eval(*command)
    report = json.loads(out)
    assert (code, report["episodes"], report["missing"], report["failed"]) == (1, 11, 1, {"Refused": 1})
    assert "The same command tries those again" in err
    assert (Path(report["folder"]) / "answers.jsonl").exists()
    code, out, _ = run_eval(*command)
    assert (code, json.loads(out)["failed"], json.loads(out)["missing"]) == (0, {}, 0)


def test_other_settings_into_the_same_place_are_refused(run_eval, fake_endpoint, environment_file) -> None:
    run_eval(environment_file, "-m", fake_endpoint.url, *COUNT, "--name", "kept")
    asked = len(fake_endpoint.requests)
    for other, said in (
        (("-n", 7, "-r", 2), "tasks was 6, now 7"),
        ((*COUNT, "--seed", 1), "seed was 0, now 1"),
        ((*COUNT, "--temperature", 0.7), "sampling.temperature was 1.0, now 0.7"),
        ((*COUNT, "--body", "min_p=0.1"), "model.extra"),
    ):
        code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, *other, "--name", "kept")
        assert (code, said in err) == (2, True), err
    environment_file.write_text(environment_file.read_text() + "# other now\n")
    code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, *COUNT, "--name", "kept")
    assert (code, "environment.file_sha256" in err) == (2, True), err
    assert len(fake_endpoint.requests) == asked


def test_a_dry_run_asks_nothing_and_says_what_would_be(run_eval, fake_endpoint, environment_file, tmp_path) -> None:
    arguments = (environment_file, "-m", f"{fake_endpoint.url}#fake-1", *COUNT, "--max-tokens", 8, "--dry-run")
    code, out, _ = run_eval(*arguments)
    assert code == 0
    assert "How many? 1" in out
    assert "12 requests at least" in out
    assert "sampled tokens at most: 96" in out
    planned = json.loads(run_eval(*arguments, "--format", "json")[1])
    assert (planned["requests_at_least"], planned["sampled_tokens_at_most_for_one_turn_each"]) == (12, 96)
    assert not fake_endpoint.requests
    assert not fake_endpoint.headers
    assert not (tmp_path / "evals").exists()


def test_the_key_travels_and_is_stored_nowhere(
    run_eval, fake_endpoint, environment_file, tmp_path, monkeypatch
) -> None:
    fake_endpoint.key = "sk-very-secret"
    code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 2)
    assert (code, "export OPENAI_API_KEY" in err) == (2, True)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 2)
    assert (code, "does not take the key in OPENAI_API_KEY" in err, "sk-wrong" in err) == (2, True, False)
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    code, out, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 2, "--key-env", "MY_KEY")
    assert code == 0
    assert "secret" not in out + err
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes()


def test_a_named_variable_must_be_set_and_no_key_goes_in_clear(run_eval, environment_file, monkeypatch) -> None:
    code, _, err = run_eval(environment_file, "-m", "http://127.0.0.1:9/v1#m", "--key-env", "NOT_THERE")
    assert (code, "NOT_THERE is not set" in err) == (2, True)
    monkeypatch.setenv("MY_KEY", "sk-x")
    code, _, err = run_eval(environment_file, "-m", "http://example.org/v1#m", "--key-env", "MY_KEY")
    assert (code, "in clear" in err) == (2, True)


def test_an_endpoint_that_is_not_there_is_said_at_once(run_eval, environment_file) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for model in (f"http://127.0.0.1:{port}/v1#m", f"http://127.0.0.1:{port}", "http://no-such-host.invalid/v1#m"):
        code, _, err = run_eval(environment_file, "-m", model)
        assert (code, "can't be reached" in err) == (2, True), err


def test_which_model_is_asked_for_where_there_are_several(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.models = ["big", "small"]
    code, _, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 1)
    assert (code, "big, small" in err, "#MODEL" in err) == (2, True, True)
    code, _, err = run_eval(environment_file, "-m", f"{fake_endpoint.url}#smal", "-n", 1)
    assert (code, "Did you mean 'small'?" in err) == (0, True)
    assert run_eval(environment_file, "-m", fake_endpoint.url, "--model-name", "big", "-n", 1)[0] == 0
    assert [body["model"] for _, body in fake_endpoint.requests] == ["smal", "big"]
    fake_endpoint.models, fake_endpoint.always = None, 404
    code, _, err = run_eval(environment_file, "-m", f"{fake_endpoint.url}#gone", "-n", 1)
    assert (code, "'gone'" in err) == (2, True)


def test_more_tasks_than_there_are_is_said(run_eval, fake_endpoint, environment_file) -> None:
    code, out, err = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 50, "--format", "json")
    assert (code, json.loads(out)["tasks"], "12 are asked, not 50" in err) == (0, 12, True)
    assert "are asked" not in run_eval(environment_file, "-m", fake_endpoint.url, "--dry-run")[2]


@pytest.mark.parametrize("truncated", [True, False])
def test_truncations_and_uncounted_tokens_are_reported(
    run_eval, fake_endpoint, environment_file, truncated: bool
) -> None:
    fake_endpoint.usage, fake_endpoint.finish = False, "length" if truncated else "content_filter"
    _, out, _ = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 3, "--format", "json")
    report = json.loads(out)
    assert report["truncated"] == (3 if truncated else 0)
    assert report["finish_reasons"] == {fake_endpoint.finish: 3}
    assert report["tokens"] == {"prompt": None, "sampled": None}
    _, out, _ = run_eval(environment_file, "-m", fake_endpoint.url, "-n", 3)
    assert "not counted by the endpoint" in out


ANIMALS = """
from tinker_atropos import Task, single_turn

def right(completion, task):
    return completion.text.startswith(task.answer)

def short(completion, task):
    return -len(completion.text.split()) / 20

env = single_turn("animals", lambda split: [Task(f"An animal in {letter}", letter) for letter in "abc"], [right, short])
"""


def test_a_threshold_that_no_reward_reaches_is_said(run_eval, fake_endpoint, tmp_path) -> None:
    (tmp_path / "animals.py").write_text(ANIMALS)
    fake_endpoint.say = lambda path, body: body["messages"][-1]["content"][-1]
    asked = ("animals.py", "-m", fake_endpoint.url)
    code, out, _ = run_eval(*asked)
    assert (code, "no reward reached it, the largest is 0.95" in out, "--pass-threshold" in out) == (0, True, True)
    code, out, _ = run_eval(*asked, "--pass-threshold", 0.9, "--format", "json")
    assert (code, json.loads(out)["pass"]["1"]["mean"]) == (0, 1.0)
    assert "warning" not in run_eval(*asked, "--pass-threshold", 0.9)[1]


def right_sum(path: str, body: dict[str, Any]) -> str:
    """Answer a sum of `env.dataset=arithmetic`."""
    return str(sum(map(int, re.findall(r"[0-9]+", body["prompt"].splitlines()[-1]))))


def test_an_environment_that_says_what_is_correct_passes_by_it(run_eval, fake_endpoint) -> None:
    pytest.importorskip("tinker_atropos_gsm8k")
    fake_endpoint.say = lambda path, body: "-1234567"
    settings = ("--set", "env.dataset=arithmetic", "--set", "env.format_weight=1")
    asked = ("gsm8k", "-m", fake_endpoint.url, "-n", 3, *settings, "--format", "json")
    report = json.loads(run_eval(*asked)[1])
    assert (report["reward"]["mean"], report["metrics"]["correct"]["mean"], report["pass"]["1"]["mean"]) == (1, 0, 0)
    assert report["pass_by"] == "correct"
    report = json.loads(run_eval(*asked, "--pass-threshold", 1)[1])
    assert (report["pass"]["1"]["mean"], report["pass_by"]) == (1, "reward")


def test_a_reward_of_length_wants_an_endpoint_that_counts(run_eval, fake_endpoint) -> None:
    pytest.importorskip("tinker_atropos_gsm8k")
    fake_endpoint.say = right_sum
    fake_endpoint.usage = False
    settings = ("--set", "env.dataset=arithmetic", "--set", "env.length_weight=0.5")
    asked = ("gsm8k", "-m", fake_endpoint.url, "-n", 20, *settings)
    code, _, err = run_eval(*asked)
    assert (code, "sends no usage.completion_tokens" in err, "length" in err) == (2, True, True), err
    fake_endpoint.usage = True
    assert run_eval(*asked, "--name", "counted")[0] == 0


GUESS = """
from tinker_atropos import EnvironmentConfig, EnvironmentSpec, Step

class Episode:
    async def reset(self):
        return Step([{"role": "user", "content": "Guess."}])
    async def step(self, completion):
        return Step([{"role": "user", "content": "Again."}], reward=0.25, metrics={"length": len(completion.text)})
    async def close(self):
        pass

class Guess:
    def tasks(self, split):
        return 3
    async def episode(self, task):
        return Episode()

env = EnvironmentSpec("guess", make=lambda config: Guess())
"""


def test_a_conversation_goes_on_until_the_endpoint_has_no_room(run_eval, fake_endpoint, tmp_path) -> None:
    """As on exact tokens: what was said until then is kept and counts as truncated."""
    (tmp_path / "guess_env.py").write_text(GUESS)
    fake_endpoint.refuse = lambda body: (
        "This model's maximum context length is 9 tokens" if len(body["messages"]) > 5 else ""
    )
    code, out, err = run_eval("guess_env.py", "-m", fake_endpoint.url, "-n", 3, "--format", "json", "--name", "talk")
    report = json.loads(out)
    assert (code, report["truncated"], report["turns"], report["reward"]["mean"]) == (0, 3, 9, 0.75), err
    record = json.loads((tmp_path / "evals" / "talk" / "episodes.jsonl").read_text().splitlines()[0])
    roles = [message["role"] for message in record["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert (record["truncated"], record["rewards"]) == (True, [0.25] * 3)
    fake_endpoint.refuse = lambda body: "maximum context length"
    code, _, err = run_eval("guess_env.py", "-m", fake_endpoint.url, "-n", 3, "--seed", 1)
    assert (code, "all 3 episodes failed" in err, "no room" in err) == (1, True, True), err


def test_two_evaluations_are_compared_by_task(run_eval, fake_endpoint, environment_file) -> None:
    fake_endpoint.models = ["bad", "good"]
    fake_endpoint.say = lambda path, body: (
        body["messages"][-1]["content"].split()[-1] if body["model"] == "good" else "0"
    )
    for name, count in (("bad", 12), ("good", 11)):
        run_eval(environment_file, "-m", f"{fake_endpoint.url}#{name}", "-n", count, "--name", name)
    code, out, _ = run_eval("compare", "bad", "good")
    assert (code, "good is better than bad" in out, "1 task that only one of them has is left out" in out) == (
        0,
        True,
        True,
    )
    found = json.loads(run_eval("compare", "good", "good", "--format", "json")[1])
    assert (found["different"], found["tasks"], found["p"]) == (False, 11, 1.0)
    assert found["verdict"].startswith("no difference shown")


def test_unlike_evaluations_are_not_compared(run_eval, fake_endpoint, environment_file, tmp_path) -> None:
    base = ("-m", fake_endpoint.url, "-n", 3)
    run_eval(environment_file, *base, "--name", "a")
    run_eval(environment_file, *base, "--name", "b", "--temperature", 0.5)
    other = tmp_path / "other_env.py"
    other.write_text(environment_file.read_text() + "# another\n")
    run_eval(other, *base, "--name", "c")
    code, _, err = run_eval("compare", "a", "b")
    assert (code, "--allow sampling.temperature" in err) == (2, True)
    assert run_eval("compare", "a", "b", "--allow", "sampling.temperature")[0] == 0
    code, _, err = run_eval("compare", "a", "c")
    assert (code, "environment.file_sha256" in err) == (2, True)
    code, _, err = run_eval("compare", "a", "nothing")
    assert (code, "there are a, b, c" in err) == (2, True)
    Path(tmp_path / "moved").mkdir()
    moved = environment_file.rename(tmp_path / "moved" / environment_file.name)
    run_eval(moved, *base, "--name", "d")
    assert run_eval("compare", "a", "d")[0] == 0
