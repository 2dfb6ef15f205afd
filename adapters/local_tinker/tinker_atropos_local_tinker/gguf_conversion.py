"""Turns a GGUF file of a Llama-shaped model into a folder that transformers loads; knows no package and no cache.

Run as a process of its own, so that its memory and progress bars end with it:

    python -m tinker_atropos_local_tinker.gguf_conversion FILE FOLDER

transformers reads the weights. Its own tokenizer from a GGUF file is wrong for SmolLM2 (end of sequence becomes
`<|im_start|>`, no padding token, digits not split), so the tokenizer is built here from the file's metadata.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_atropos.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Token types of the GGUF format, key `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, float32 weights and tokenizer of `gguf_file` into `folder`.

    Quantised weights are dequantised: the numbers stay those of the quantised model, only the storage is float32.
    """
    _write_tokenizer(gguf_file, folder)
    _write_weights(gguf_file, folder)


def _write_weights(gguf_file: Path, folder: Path) -> None:
    """Save the dequantised model; needs about twice its float32 size in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32, local_files_only=True
    )
    # The loaded model refuses to be saved, being marked as quantised, so its tensors move into an unmarked one.
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(str(folder))


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    tokenizer = tokenizer_from_metadata(read_metadata(gguf_file))
    tokenizer.save_pretrained(str(folder))


def read_metadata(gguf_file: Path) -> dict[str, Any]:
    """Return the key-value part of a GGUF file, as plain Python values."""
    from gguf import GGUFReader

    return {key: field.contents() for key, field in GGUFReader(str(gguf_file)).fields.items()}


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer that llama.cpp calls `smollm`: every digit stands alone.

    Bytes without a token of their own (in SmolLM2 some control characters and unassigned planes) are left out, as
    llama.cpp leaves them out. Raises DataError for a file with another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DataError(
            f"the GGUF file has a tokenizer of kind {kind}, only ('gpt2', 'smollm') can be converted; "
            "give a folder in the transformers format instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind_of_token in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind_of_token == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind_of_token == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])

    def named(key: str) -> str:
        index: int = metadata[f"tokenizer.ggml.{key}_token_id"]
        return tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        unk_token=named("unknown"),
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
