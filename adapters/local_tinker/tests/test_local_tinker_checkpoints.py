"""Saved states: exact continuation, names, expiry, listing, download; and the journal of it all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_atropos.errors import CheckpointError
from tinker_atropos_local_tinker import LOCAL_API_KEY, download_checkpoint, start_local_server
from tinker_atropos_local_tinker.journal import Journal, datum_hash, read_journal

PROMPT = [10, 20, 30]


def step(training: Any, datum: Any, rate: float = 0.01) -> float:
    from tinker import types

    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result()
    return float(passed.result().metrics["loss:sum"])


def logprobs(client: Any, path: str, sequence: list[int]) -> np.ndarray:
    from tinker import types

    sampler = client.create_sampling_client(model_path=path).result()
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(sequence)).result()[1:])


def rest(server: Any) -> Any:
    import tinker

    return tinker.RestClient(base_url=server.url, api_key=LOCAL_API_KEY)


def test_a_restarted_server_continues_bit_for_bit(
    tiny_model: Path, tmp_path: Path, sft_datum: Any, to_service: Any
) -> None:
    data = [sft_datum([3 * i, 7, 9 + i, 2, i]) for i in range(6)]

    def start() -> Any:
        return start_local_server(tmp_path / "store", model=str(tiny_model), threads=1, log=tmp_path / "log")

    with start() as server, to_service(server.url) as client:
        training = client.create_lora_training_client(base_model=str(tiny_model), rank=4, seed=3).result()
        for datum in data[:3]:
            step(training, datum)
        path = training.save_state("middle").result().path
        uninterrupted = [step(training, datum) for datum in data[3:]]
        end = training.save_state("end").result().path
    with start() as server, to_service(server.url) as client:
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        assert [step(resumed, datum) for datum in data[3:]] == uninterrupted
        again = resumed.save_state("end").result().path
        weights = [download_checkpoint(server.url, p, tmp_path / str(i)) for i, p in enumerate((end, again))]
        first, second = ((folder / "adapter_model.safetensors").read_bytes() for folder in weights)
        assert first == second
        cold = client.create_training_client_from_state(path).result()
        assert [step(cold, datum) for datum in data[3:]] != uninterrupted
        lines = list(read_journal(tmp_path / "store" / "journal.jsonl"))
        assert [line["seq"] for line in lines] == list(range(len(lines)))
        assert [line["step"] for line in lines if line["event"] == "load_state"] == [3, 0]


def test_load_state_works_after_training(training: Any, sft_datum: Any) -> None:
    datum = sft_datum([1, 2, 3, 4])
    step(training, datum)
    path = training.save_state("here").result().path
    onwards = [step(training, datum) for _ in range(2)]
    training.load_state_with_optimizer(path).result()
    assert [step(training, datum) for _ in range(2)] == onwards


def test_a_state_of_another_rank_is_refused(training: Any, client: Any, tiny_model: Path) -> None:
    from tinker import RequestFailedError

    other = client.create_lora_training_client(base_model=str(tiny_model), rank=2, seed=1).result()
    path = other.save_state("small").result().path
    with pytest.raises(RequestFailedError, match=r"rank 2 .* rank 4"):
        training.load_state(path).result()


def test_sampler_weights_have_no_optimiser(training: Any, client: Any) -> None:
    from tinker import RequestFailedError

    path = training.save_weights_for_sampler("s").result().path
    with pytest.raises(RequestFailedError, match="no optimiser state"):
        client.create_training_client_from_state_with_optimizer(path).result()
    assert client.create_training_client_from_state(path).result().get_info().lora_rank == 4


def test_a_name_that_is_taken_is_a_user_error_unless_overwritten(training: Any, sft_datum: Any) -> None:
    from tinker import RequestFailedError

    training.save_state("same").result()
    step(training, sft_datum([1, 2, 3]))
    with pytest.raises(RequestFailedError, match="exists; choose another name") as caught:
        training.save_state("same").result()
    assert caught.value.category == "user"
    training.save_state("same", overwrite=True).result()
    first = training.save_weights_for_sampler("same").result().path
    assert training.save_weights_for_sampler("same").result().path == first  # the very same weights
    step(training, sft_datum([1, 2, 3]))
    with pytest.raises(RequestFailedError, match="exists"):
        training.save_weights_for_sampler("same").result()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 200])
def test_names_that_are_no_file_names_are_refused(training: Any, name: str) -> None:
    from tinker import RequestFailedError

    if name:
        with pytest.raises(RequestFailedError, match="is not allowed"):
            training.save_state(name).result()
    else:
        assert "/weights/step-000000-" in training.save_state(name).result().path


def test_a_downloaded_adapter_in_peft_says_what_is_served(
    server: Any, client: Any, tiny_model: Path, training: Any, sft_datum: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for i in range(3):
        step(training, sft_datum([i, 2, 3, 4, 5]), rate=0.05)
    sequence = [5, 4, 3, 2, 1, 9, 250, 17]
    for i, path in enumerate(
        (training.save_weights_for_sampler("d").result().path, training.save_state("d").result().path)
    ):
        folder = download_checkpoint(server.url, path, tmp_path / str(i))
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        tokens = torch.tensor([sequence])
        with torch.inference_mode():
            plain = base(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
            model = PeftModel.from_pretrained(base, folder)
            found = model(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        served = logprobs(client, path, sequence)
        np.testing.assert_allclose(found, served, atol=1e-4)
        assert np.abs(plain - served).max() > 0.01


def test_the_sdks_own_command_downloads_a_state(server: Any, training: Any, tmp_path: Path) -> None:
    path = training.save_state("cli").result().path
    code = "from tinker.cli.__main__ import cli; cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "download", path, "--output", str(tmp_path)],
        env={**__import__("os").environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": LOCAL_API_KEY},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert {p.name for p in tmp_path.glob("*/*")} == {"adapter_config.json", "adapter_model.safetensors"}


def test_runs_and_checkpoints_are_listed_described_and_deleted(server: Any, training: Any, client: Any) -> None:
    import tinker

    path = training.save_state("kept", ttl_seconds=3600, user_metadata={"step": "4"}).result().path
    training.save_weights_for_sampler("sampled").result()
    api = rest(server)
    assert api.get_server_capabilities().result().supported_models[0].model_name
    run = api.get_training_run(training.model_id).result()
    assert (run.lora_rank, run.last_checkpoint.tinker_path) == (4, path)
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/sampled"
    assert training.model_id in [r.training_run_id for r in api.list_training_runs(limit=100).result().training_runs]
    found = {c.checkpoint_id: c for c in api.list_checkpoints(training.model_id).result().checkpoints}
    kept = found["weights/kept"]
    assert (kept.checkpoint_type, kept.user_metadata, kept.public) == ("training", {"step": "4"}, False)
    assert kept.size_bytes > 0
    assert kept.expires_at is not None
    info = api.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank, info.train_unembed) == (True, 4, True)
    assert path in [c.tinker_path for c in api.list_user_checkpoints().result().checkpoints]
    api.set_checkpoint_ttl_from_tinker_path(path, None).result()
    api.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        api.get_weights_info_by_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        api.get_training_run("nobody").result()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        download_checkpoint(server.url, path, Path("unused"))


def test_an_expired_checkpoint_is_gone(server: Any, training: Any) -> None:
    import tinker

    path = training.save_state("brief", ttl_seconds=1).result().path
    time.sleep(1.1)
    with pytest.raises(tinker.NotFoundError):
        rest(server).get_weights_info_by_tinker_path(path).result()


def test_a_crash_in_mid_write_loses_no_checkpoint(tmp_path: Path) -> None:
    from tinker_atropos_local_tinker.records import Checkpoint
    from tinker_atropos_local_tinker.store import Store

    made = Checkpoint("m", "weights", "a", "base", {"rank": 1}, 0, "id", 1.0)
    store = Store(tmp_path)
    store.save(made, {}, {"w": torch.zeros(1)})
    store.close()
    folder = store.files(made)
    folder.rename(folder.parent / ".old-a")  # the moment before the new one takes its place
    (folder.parent / ".tmp-draft").mkdir()
    again = Store(tmp_path)
    assert again.find(made.path).weights_id == "id"
    again.save(made, {}, {"w": torch.ones(1)}, overwrite=True)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["a"]
    assert float(again.load(made)[0]["w"]) == 1.0
    again.close()


DAMAGES = ["", "{", "[]", "{}", '{"name": 1}', "\xff", "[" * 100_000]
WRONG_FIELDS = ["created", "lora", "user_metadata", "model_id", "unknown"]


@pytest.mark.parametrize("content", [*DAMAGES, *WRONG_FIELDS])
def test_a_damaged_record_is_left_out_of_listings(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tinker_atropos.errors import UserError
    from tinker_atropos_local_tinker.records import Checkpoint, Run
    from tinker_atropos_local_tinker.store import Store

    store = Store(tmp_path)
    made = [Checkpoint("m", "weights", name, "base", {"rank": 1}, 0, "id", 1.0) for name in ("bad", "good")]
    for checkpoint in made:
        store.save(checkpoint, {}, {"w": torch.zeros(1)})
    for name in ("m", "n"):
        store.add_run(Run(name, "base", {"rank": 1}, 1.0))
    for path in (store.files(made[0]) / "checkpoint.json", tmp_path / "runs" / "n" / "run.json"):
        if content in WRONG_FIELDS:
            content_now = json.dumps({**json.loads(path.read_text()), content: [float("nan")]})
        else:
            content_now = content
        path.write_text(content_now, encoding="latin-1")
    for _ in range(2):
        assert [c.path for c in store.checkpoints()] == [made[1].path]
        assert [run.model_id for run in store.runs()] == ["m"]
    assert len([r for r in caplog.records if "left out of listings" in r.message]) == 2  # each once
    with pytest.raises(UserError, match="is damaged"):
        store.find(made[0].path)
    store.close()


def test_an_adapter_names_a_base_model_that_transformers_loads(
    server: Any, training: Any, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftConfig
    from tinker_atropos_local_tinker.models import loadable_name
    from transformers import AutoModelForCausalLM

    path = training.save_weights_for_sampler("named").result().path
    config = PeftConfig.from_pretrained(download_checkpoint(server.url, path, tmp_path))
    assert AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path).config.vocab_size > 256
    assert loadable_name("smollm2-135m", tiny_model) == str(tiny_model)
    assert loadable_name("org/name", tiny_model) == "org/name"


def test_the_journal_hashes_what_was_trained_on(server: Any, training: Any, rl_datum: Any) -> None:
    from tinker import types

    datum = rl_datum([1, 2, 3], [4, 5], [-1.5, -0.25], 0.5)
    training.forward([datum], "importance_sampling").result()
    training.forward_backward([datum], "importance_sampling").result()
    training.optim_step(types.AdamParams()).result()
    path = training.save_state("j").result().path
    mine = [x for x in read_journal(server.store / "journal.jsonl") if x["model"] == training.model_id]
    assert [x["event"] for x in mine] == ["create_model", "forward_backward", "optim_step", "save_state"]
    assert [x["step"] for x in mine] == [0, 0, 1, 1]
    assert mine[3]["path"] == path
    want = datum_hash([1, 2, 3, 4], [2, 3, 4, 5], [0, 0, -1.5, -0.25], [0, 0, 0.5, 0.5])
    assert mine[1]["data"] == [want]
    assert mine[1]["loss"] == "importance_sampling"


def test_a_datum_hash_is_what_its_docstring_says() -> None:
    import hashlib

    raw = b""
    for values, kind in (([1, 2], "<i4"), ([2, 3], "<i4"), ([], "<f4"), ([0.5, -1.0], "<f4")):
        data = np.array(values, kind).tobytes()
        raw += len(data).to_bytes(8, "little") + data
    assert datum_hash([1, 2], [2, 3], None, [0.5, -1.0]) == hashlib.sha256(raw).hexdigest()


def test_a_half_written_line_is_left_behind_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.write("create_model", "m", 0)
    first.write("optim_step", "m", 1)
    first.close()
    path.write_bytes(path.read_bytes() + b'{"seq":2,"time":1.0,"ev')
    second = Journal(path)
    second.write("optim_step", "m", 2)
    second.close()
    assert [line["seq"] for line in read_journal(path)] == [0, 1, 2]
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 2
