"""Requests as no SDK sends them: wrong types, bombs, clients that leave. Each is the client's error; none does harm."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
import zstandard
from tinker_atropos.errors import UserError
from tinker_atropos_local_tinker.wire import MAX_BODY_BYTES, decode_pass


def ask(url: str, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), kind, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def zeros(size: int, stated: bool) -> bytes:
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, size=size if stated else -1, closefd=False) as writer:
        for _ in range(size >> 20):
            writer.write(bytes(1 << 20))
    return out.getvalue()


@pytest.mark.parametrize("stated", [True, False])
def test_a_body_that_unpacks_to_too_much_is_refused(stated: bool) -> None:
    with pytest.raises(UserError, match=f"{MAX_BODY_BYTES} is the limit" if stated else "can't be read"):
        decode_pass(zeros(2 * MAX_BODY_BYTES, stated))


@pytest.mark.parametrize("stated", [True, False])
def test_a_body_that_is_cut_off_is_refused(stated: bool) -> None:
    with pytest.raises(UserError, match="can't be read"):
        decode_pass(zeros(1 << 20, stated)[:-4])


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("create_session", {"user_metadata": {"a": 1}}, "user_metadata"),
        ("create_session", {"user_metadata": ["a"]}, "user_metadata"),
        ("create_model", {"model_seq_id": "one"}, "model_seq_id"),
        ("create_model", {"lora_config": [8]}, "lora_config"),
        ("create_model", {"lora_config": {}}, "rank"),
        ("create_model", {"lora_config": {"rank": "8"}}, "rank"),
        ("create_model", {"lora_config": {"rank": True}}, "rank"),
        ("create_model", {"lora_config": {"rank": 8, "seed": 1.5}}, "seed"),
        ("create_model", {"lora_config": {"rank": 8, "train_mlp": "no"}}, "train_mlp"),
        ("create_model", {"user_metadata": {"a": None}}, "user_metadata"),
        ("create_model", {"optimizer_config": "sgd"}, "optimizer_config"),
        ("create_sampling_session", {"sampling_session_seq_id": None}, "sampling_session_seq_id"),
        ("create_sampling_session", {"sampling_session_seq_id": 0, "model_path": 5}, "model_path"),
        ("load_weights", {"path": ["x"]}, "path"),
        ("weights_info", ["x"], "JSON object"),
    ],
)
def test_a_field_of_the_wrong_type_is_a_bad_request(
    server: Any, client: Any, tiny_model: Any, path: str, fields: Any, named: str
) -> None:
    session = {"session_id": client.holder.get_session_id(), "base_model": str(tiny_model), "model_seq_id": 900}
    status, reply = ask(server.url, path, {**session, **fields} if isinstance(fields, dict) else fields)
    assert (status, reply["category"]) == (400, "user")
    assert named in reply["detail"]


@pytest.mark.parametrize("seq_id", ["1", 1.5, True, -1, 2**70, [1]])
def test_a_sequence_number_is_a_whole_number(server: Any, training: Any, seq_id: Any) -> None:
    for path in ("optim_step", "save_weights"):
        status, reply = ask(server.url, path, {"model_id": training.model_id, "seq_id": seq_id})
        assert (status, reply["category"]) == (400, "user")
        assert "seq_id" in reply["detail"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("save_weights", {"ttl_seconds": True}, "ttl_seconds"),
        ("save_weights", {"ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights", {"ttl_seconds": 10**12}, "ttl_seconds"),
        ("save_weights", {"ttl_seconds": 1e300}, "ttl_seconds"),
        ("save_weights", {"user_metadata": {"a": 1}}, "user_metadata"),
        ("save_weights", {"path": 7}, "path"),
        ("save_weights", {"overwrite": "false"}, "overwrite"),
        ("optim_step", {"adam_params": {"learning_rate": float("nan")}}, "learning_rate"),
        ("optim_step", {"adam_params": {"learning_rate": "0.1"}}, "learning_rate"),
        ("optim_step", {"adam_params": [0.1]}, "adam_params"),
    ],
)
def test_a_wrong_setting_is_the_users_error(server: Any, training: Any, path: str, fields: Any, named: str) -> None:
    _, accepted = ask(server.url, path, {"model_id": training.model_id, "seq_id": 1, **fields})
    _, reply = ask(server.url, "retrieve_future", accepted)
    assert reply["category"] == "user"
    assert named in reply["error"]


@pytest.mark.parametrize("ttl", [True, 0, 10**12, "60"])
def test_a_wrong_expiry_is_refused(server: Any, training: Any, ttl: Any) -> None:
    path = training.save_weights_for_sampler("expiry").result().path
    run = f"training_runs/{training.model_id}/checkpoints/{path.split('/', 3)[3]}/ttl"
    assert ask(server.url, run, {"ttl_seconds": ttl}, "PUT")[0] == 400


@pytest.mark.parametrize("host", ["[", "[::1", "x]"])
def test_a_host_that_is_none_is_answered(server: Any, host: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=30)
    connection.request("GET", "/api/v1/healthz", headers={"Host": host})
    reply = connection.getresponse()
    assert reply.status in (400, 403)
    assert json.load(reply)["detail"]
    connection.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_client_that_leaves_is_no_error_of_the_server(server: Any, client: Any, tiny_model: Any, whole: bool) -> None:
    fields = {"session_id": client.holder.get_session_id(), "base_model": str(tiny_model)}
    _, made = ask(server.url, "create_sampling_session", {**fields, "sampling_session_seq_id": 700 + whole})
    body = json.dumps({"target": {"sampling_session_id": made["sampling_session_id"]}, "timeout": 0.2}).encode()
    head = f"POST /api/v1/retrieve_futures HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    before = len(server.log.read_text())
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as leaving:
        leaving.sendall(head.encode() + (body if whole else body[:9]))
        time.sleep(0.1)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
    time.sleep(0.4)
    assert ask(server.url, "session_heartbeat", fields)[0] == 200
    fresh = server.log.read_text()[before:]
    assert "Traceback" not in fresh
    assert " ERROR " not in fresh
