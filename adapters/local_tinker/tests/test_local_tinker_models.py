"""Model names become folders: local ones, packaged ones (a fake wheel, and the real one), and hub ids."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import queue
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tinker_atropos.errors import ConfigError, DataError
from tinker_atropos_local_tinker import packaged_models
from tinker_atropos_local_tinker.models import ModelFolder, catalogue, check_model_name, resolve_model
from tinker_atropos_local_tinker.packaged_models import MARKER, PackagedModel, damage_of, packaged_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=261, **sizes, **heads))


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a model as llama.cpp stores a Llama: q and k rows interleaved for its rotary embedding."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("fake")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list([*control, *byte_alphabet(), "he", "12"])
    writer.add_token_types([3] * 3 + [1] * 258)
    writer.add_token_merges(["h e", "1 2"])
    for add, token in (("bos", 1), ("eos", 2), ("pad", 2), ("unk", 0)):
        getattr(writer, f"add_{add}_token_id")(token)
    writer.add_chat_template(CHATML)
    names = {"self_attn": "attn", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}
    names |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "mlp": "ffn"}
    for name, tensor in model.state_dict().items():
        match name.split("."):
            case ["model", "embed_tokens", _]:
                writer.add_tensor("token_embd.weight", tensor.numpy())
            case ["model", "norm", _]:
                writer.add_tensor("output_norm.weight", tensor.numpy())
            case ["model", "layers", layer, norm, _]:
                short = "attn_norm" if norm == "input_layernorm" else "ffn_norm"
                writer.add_tensor(f"blk.{layer}.{short}.weight", tensor.numpy())
            case ["model", "layers", layer, block, part, _]:
                if part in ("q_proj", "k_proj"):
                    heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
                    tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
                writer.add_tensor(f"blk.{layer}.{names[block]}_{names[part]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def fake_model(index: Path) -> PackagedModel:
    """A fake packaged model: a wheel of our own around a tiny random GGUF, in the folder `index`."""
    gguf, wheel = index / "tiny.gguf", index / "fake_model-1.0-py3-none-any.whl"
    write_gguf(tiny_llama(), gguf)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "fake_model/tiny.gguf")
        info = "fake_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        name="fake",
        description="a fake: random weights",
        licence="MIT",
        package="fake-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="fake_model/tiny.gguf",
        gguf_bytes=gguf.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        disk_bytes=1_000_000,
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKER_ATROPOS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def only_fake_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point pip at the folder with the fake wheel and at nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter: the hub client reads its settings once, at import."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def silent(line: str) -> None:
    del line


# --- names and local folders


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelFolder(str(tmp_path), tmp_path.resolve())


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds a LoRA adapter"),
        (["config.json", "tokenizer.json"], "has no weights"),
        (["config.json", "model.safetensors"], "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused_by_that_part(tmp_path: Path, files: list[str], complaint: str) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=complaint):
        check_model_name(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / file).write_text("{}")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002"):
        check_model_name(str(tmp_path))


@pytest.mark.parametrize("name", ["", "gpt2", "/no/such/folder", "./no/such", "org/", "~nobody-here/x", "x" * 5000])
def test_a_name_that_cannot_be_a_model_is_refused_with_the_ways_on(name: str) -> None:
    with pytest.raises(ConfigError, match=r"packaged model \(smollm2-135m\)"):
        check_model_name(name)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'smollm2-135m'"):
        resolve_model("SmolLM2-135M")


def test_names_are_checked_without_heavy_imports() -> None:
    done = in_new_process(
        """
        import sys
        from tinker_atropos_local_tinker.models import check_model_name
        check_model_name("smollm2-135m"); check_model_name("org/name")
        print(sorted({"torch", "transformers", "huggingface_hub", "gguf"} & set(sys.modules)))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_catalogue_says_that_the_weights_are_quantised() -> None:
    assert [model.name for model in catalogue()] == ["smollm2-135m"]
    assert "Q4_1" in catalogue()[0].description


# --- the hub

RESOLVE = """
from tinker_atropos.errors import DataError
from tinker_atropos_local_tinker.models import resolve_model
try:
    print(resolve_model("org/name").path)
except DataError as error:
    print("DataError:", error)
"""


def test_an_unreachable_hub_is_an_error_that_names_the_ways_on(tmp_path: Path) -> None:
    done = in_new_process(RESOLVE, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    assert done.stdout.startswith("DataError: org/name: not in the local cache"), done.stderr
    assert "a local folder or a packaged model (smollm2-135m)" in done.stdout


def test_a_hub_model_in_the_local_cache_needs_no_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / file).write_text("{}")
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    assert in_new_process(RESOLVE, **environment).stdout.strip() == str(snapshot)

    (snapshot / "model.safetensors").unlink()
    assert "not in the local cache" in in_new_process(RESOLVE, **environment).stdout


# --- packaged models, with the fake


@needs_pip
@pytest.mark.usefixtures("only_fake_index")
def test_a_packaged_model_is_fetched_once_and_equals_its_source(fake_model: PackagedModel, own_cache: Path) -> None:
    said: list[str] = []
    folder = packaged_folder(fake_model, said.append)
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [folder.name]  # no temporary folder is left
    assert len(said) == 2
    assert damage_of(folder) is None

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    expected = tiny_llama().state_dict()
    assert model.dtype == torch.float32
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    check_tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))

    assert packaged_folder(fake_model, said.append) == folder
    assert len(said) == 2

    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x7f")
    (own_cache / f".{folder.name}-left-by-a-killed-process").mkdir()
    assert packaged_folder(fake_model, said.append) == folder
    assert "damaged (model.safetensors is not what was written)" in said[2]
    assert damage_of(folder) is None
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [folder.name]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a GGUF tokenizer loses in transformers' own conversion."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert tokenizer.pad_token_id == 2
    assert [tokenizer.decode([token]) for token in tokenizer.encode("x1234")] == ["x", "1", "2", "3", "4"]
    for text in ("naïve café — “quotes” 😀👍🏽", "中文 हिन्दी ٣٤ ½", "  two  spaces\n\n\tand a tab ", "a<|im_end|>b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == tokenizer.encode(rendered)


Change = Callable[[PackagedModel], PackagedModel]


@needs_pip
@pytest.mark.usefixtures("only_fake_index")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda model: replace(model, wheel_sha256="0" * 64), "the wheel fake_model-1.0.* expected 0000"),
        (lambda model: replace(model, gguf_sha256="0" * 64), "tiny.gguf has sha256 .* expected 0000"),
        (lambda model: replace(model, version="2.0"), "pip could not fetch fake-model==2.0: ERROR: No matching"),
        (lambda model: replace(model, disk_bytes=10**18), "free space in .* TINKER_ATROPOS_CACHE"),
    ],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(
    fake_model: PackagedModel, own_cache: Path, change: Change, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        packaged_folder(change(fake_model), silent)
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


@needs_pip
def test_an_unreachable_package_index_is_told_from_an_empty_one(
    fake_model: PackagedModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for unset in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(unset, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DataError, match="index can't be reached"):
        packaged_folder(fake_model, silent)


def test_without_pip_the_error_says_how_to_get_it(
    fake_model: PackagedModel, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="uv pip install pip"):
        packaged_folder(fake_model, silent)


def test_a_cache_that_cannot_be_written_is_named(
    fake_model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TINKER_ATROPOS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set TINKER_ATROPOS_CACHE to another folder"):
        packaged_folder(fake_model, silent)


def test_a_second_process_waits_and_takes_what_the_first_one_built(fake_model: PackagedModel, own_cache: Path) -> None:
    folder = own_cache / f"fake-1.0-r{packaged_models._RECIPE}"
    said: queue.Queue[str] = queue.Queue()
    own_cache.mkdir(parents=True)
    with ThreadPoolExecutor(1) as second:
        with FileLock(own_cache / f".{folder.name}.lock"):
            answer = second.submit(packaged_folder, fake_model, said.put)
            assert "waiting for another process" in said.get(timeout=60)
            folder.mkdir()
            for file in ("config.json", "model.safetensors"):
                (folder / file).write_text("{}")
            packaged_models._seal(fake_model, folder)
        assert answer.result(timeout=60) == folder
    assert said.empty()


@pytest.mark.parametrize("marker", [None, "", "[]", "{}", '{"sha256": {}}', '{"sha256": {"config.json": "0"}}'])
def test_a_folder_without_a_true_marker_counts_as_damaged(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    if marker is not None:
        (tmp_path / MARKER).write_text(marker)
    assert damage_of(tmp_path) is not None


# --- the real one


@needs_pip
@pytest.mark.model
def test_smollm2_from_its_wheel_completes_sums() -> None:
    """Fetches 93 MB on first use, into the user's own cache."""
    folder = resolve_model("smollm2-135m").path
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32
    prompt = tokenizer("3 + 4 = 7\n12 + 5 = 17\n2 + 6 =", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == " 8"
