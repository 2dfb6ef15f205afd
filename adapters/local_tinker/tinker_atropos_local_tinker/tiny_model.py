"""A tiny random Llama with a byte-level tokenizer for protocol tests: no hub, no download, a second to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END, START = "<|im_end|>", "<|im_start|>"


def write_tiny_model(folder: Path, *, seed: int = 0, context: int = 256, tied: bool = True) -> Path:
    """Write config, weights and tokenizer; tokens 0..255 are bytes, 256 is the end of turn, 257 starts one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=257,
        eos_token_id=256,
        pad_token_id=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # sharper than usual, so that a wrong position or token shows
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer with merges, so that a token can hold several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "Ċ"), ("Ċ", "Ċ"), ("c", "d")]
    vocab.update({END: 256, START: 257})
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, START])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, bos_token=START, clean_up_tokenization_spaces=False
    )
