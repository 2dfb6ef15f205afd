"""The server as a process: its life and death, doubled requests, wrong settings, deterministic mode."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.errors import ConfigError
from tinker_atropos_local_tinker import LOCAL_API_KEY, start_local_server
from tinker_atropos_local_tinker.journal import read_journal

PROMPT = [10, 20, 30, 40]


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/api/v1/{path}", raw, {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            content = reply.read()
            return reply.status, json.loads(content) if reply.headers.get_content_type().endswith("json") else content
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def test_a_request_sent_twice_runs_once(server: Any, training: Any, sft_datum: Any) -> None:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    sent = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[sft_datum([1, 2, 3])], loss_fn="cross_entropy"),
        model_id=training.model_id,
        seq_id=1,
    )
    raw = forward_backward_request_to_proto(sent).SerializeToString()
    kind = {"Content-Type": "application/x-protobuf"}
    step = {"model_id": training.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    # The later one comes first: it waits for its turn.
    replies = [post(server.url, "optim_step", step)]
    replies += [post(server.url, "forward_backward", raw, kind) for _ in range(2)]
    replies += [post(server.url, "optim_step", step) for _ in range(2)]
    assert {status for status, _ in replies} == {200}
    assert len({reply["request_id"] for _, reply in replies}) == 2
    for _, reply in replies:
        assert post(server.url, "retrieve_future", {"request_id": reply["request_id"]})[0] == 200
    events = [x["event"] for x in read_journal(server.store / "journal.jsonl") if x["model"] == training.model_id]
    assert events == ["create_model", "forward_backward", "optim_step"]
    other = {**step, "adam_params": {"learning_rate": 0.5}}
    assert post(server.url, "optim_step", other)[0] == 400


def test_a_compressed_body_is_read(server: Any, training: Any, sft_datum: Any) -> None:
    import zstandard
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    sent = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[sft_datum([1, 2, 3])], loss_fn="cross_entropy"),
        model_id=training.model_id,
        seq_id=1,
    )
    raw = zstandard.ZstdCompressor().compress(forward_backward_request_to_proto(sent).SerializeToString())
    kind = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    status, reply = post(server.url, "forward_backward", raw, kind)
    assert status == 200
    assert post(server.url, "retrieve_future", {"request_id": reply["request_id"]})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("session_heartbeat", {"session_id": "unknown"}, 410),
        ("create_model", {"session_id": "unknown", "model_seq_id": 0, "base_model": "x"}, 410),
        ("optim_step", {"model_id": "unknown", "seq_id": 1}, 404),
        ("asample", {"sampling_session_id": "unknown"}, 404),
        ("retrieve_future", {"request_id": "unknown"}, 410),
        ("retrieve_futures", {"target": {"sampling_session_id": "unknown"}}, 404),
        ("create_session", b"no json", 400),
        ("create_session", [], 400),
        ("forward_backward", b"\xff\xff\xff", 400),
        ("nothing_of_this_name", {}, 404),
    ],
)
def test_what_is_unknown_or_broken_is_answered(server: Any, path: str, body: Any, status: int) -> None:
    found, reply = post(server.url, path, body)
    assert found == status
    assert reply["detail"]


def test_a_page_with_another_host_name_is_kept_out(server: Any) -> None:
    assert post(server.url, "create_session", {}, {"Host": "evil.example"})[0] == 403


def test_a_finished_session_is_over_but_its_checkpoints_stay(server: Any, to_service: Any, tiny_model: Path) -> None:
    client = to_service(server.url)
    training = client.create_lora_training_client(base_model=str(tiny_model), rank=2, seed=1).result()
    path = training.save_state("kept").result().path
    session = client.holder.get_session_id()
    client.close("success").result()
    assert post(server.url, "session_heartbeat", {"session_id": session})[0] == 410
    assert post(server.url, "optim_step", {"model_id": training.model_id, "seq_id": 5})[0] == 404
    with to_service(server.url) as other:
        assert other.create_training_client_from_state(path).result().get_info().lora_rank == 2


def test_sampling_goes_on_while_a_model_trains(training: Any, sft_datum: Any) -> None:
    from tinker import types

    sampler = training.save_weights_and_get_sampling_client().result()
    passes = [training.forward_backward([sft_datum([i % 256] * 200)] * 64, "cross_entropy") for i in range(6)]
    params = types.SamplingParams(max_tokens=2, stop=[])
    sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result()
    assert not passes[-1].future().done()
    passes[-1].result()


def test_deterministic_mode_gives_the_same_whatever_runs_beside(
    tiny_model: Path, tmp_path: Path, to_service: Any, sft_datum: Any
) -> None:
    from tinker import types

    with (
        start_local_server(
            tmp_path / "store", model=str(tiny_model), deterministic=True, threads=1, log=tmp_path / "log"
        ) as server,
        to_service(server.url) as client,
    ):
        sampler = client.create_sampling_client(base_model=str(tiny_model)).result()

        def ask(i: int, n: int, length: int) -> Any:
            params = types.SamplingParams(max_tokens=length, seed=i, stop=[])
            return sampler.sample(types.ModelInput.from_ints([*PROMPT, i]), n, params)

        def read(future: Any) -> Any:
            return [(list(s.tokens), list(s.logprobs)) for s in future.result().sequences]

        alone = [read(ask(i, 4, 24)) for i in range(3)]
        training = client.create_lora_training_client(base_model=str(tiny_model), rank=4, seed=1).result()
        passes = [training.forward_backward([sft_datum([i] * 200)] * 16, "cross_entropy") for i in range(4)]
        noise = [ask(50 + i, 3 + i, 40) for i in range(6)]
        beside = [read(f) for f in [ask(i, 4, 24) for i in range(3)]]
        assert beside == alone
        assert all(p.result().metrics["loss:sum"] > 0 for p in passes)
        assert all(len(f.result().sequences) for f in noise)
        assert read(ask(1, 80, 4)) == read(ask(1, 80, 4))


def test_the_server_ends_with_its_parent(tiny_model: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys, threading, time
        from pathlib import Path
        from tinker_atropos_local_tinker import start_local_server
        out = []
        starter = threading.Thread(target=lambda: out.append(start_local_server(
            Path({str(tmp_path / "store")!r}), model={str(tiny_model)!r},
            log=Path({str(tmp_path / "log")!r}), threads=1)))
        starter.start(); starter.join()
        time.sleep(0.5)  # the thread that started it has ended; the server must not
        print(out[0].pid, out[0].alive, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, alive = parent.stdout.readline().split()
    assert alive == "True"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert _ends(int(pid))


def _ends(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "\nState:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_closing_stops_the_process_and_frees_the_store(tiny_model: Path, tmp_path: Path) -> None:
    server = start_local_server(tmp_path / "store", model=str(tiny_model), log=tmp_path / "log", threads=1)
    server.close()
    server.close()
    assert not server.alive
    with start_local_server(tmp_path / "store", model=str(tiny_model), log=tmp_path / "log", threads=1) as again:
        assert again.alive


def test_two_servers_on_one_store_are_refused(server: Any, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"in use by another server .process {server.pid}"):
        start_local_server(server.store, model=str(tiny_model), log=tmp_path / "log")


def test_a_server_says_how_to_connect(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinker_atropos_local_tinker", "--store", str(tmp_path), "--port", "0"]
    with subprocess.Popen([*command, "--model", str(tiny_model)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening on ").strip()
        line = process.stdout.readline()
        process.terminate()
    assert f'tinker.ServiceClient(base_url="{url}", api_key="tml-local")' in line
    assert "any key that begins with tml- is accepted" in line


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinker_atropos_local_tinker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_busy_port_is_one_line_and_code_2(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--store", str(tmp_path), "--model", str(tiny_model), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "can't be had: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "is not loopback"),
        (("--model", "smolm2-135m"), "Did you mean 'smollm2-135m'"),
        (("--threads", "0"), "threads=0 is out of range"),
    ],
)
def test_wrong_settings_are_one_line_and_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("--store", str(tmp_path / "store"), "--port", "0", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_under_a_regular_file_is_one_line_and_code_2(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--store", str(tmp_path / "file" / "store"), "--model", str(tiny_model), "--port", "0")
    assert done.returncode == 2
    assert "give a folder that can be written" in done.stderr


def test_the_adapter_describes_itself_without_heavy_imports() -> None:
    code = (
        "import sys, tinker_atropos_local_tinker as a; s = a.adapter_spec(); "
        "assert (s.name, s.serves) == ('local_tinker', 'tinker'); s.command(); a.start_local_server; "
        "print([m for m in ('torch', 'tinker', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_folder_two_levels_deep_is_spelled_so_that_the_sdk_reads_it() -> None:
    from tinker_atropos_local_tinker.base_model import readable_path

    assert readable_path(Path("/models/tiny")) == "/models/tiny/."
    with pytest.raises(ConfigError, match="colon"):
        readable_path(Path("/models/a:b"))


def test_a_key_for_the_sdk() -> None:
    assert LOCAL_API_KEY.startswith("tml-")
