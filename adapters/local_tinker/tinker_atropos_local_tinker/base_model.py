"""Loads the base model and its tokenizer from a local folder, and says what both can do."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tinker_atropos.errors import ConfigError
from torch import Tensor, nn

DEFAULT_CONTEXT = 2048


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the sampler needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A frozen causal language model in evaluation mode, shared by training and sampling.

    `end_ids` are its own end-of-turn tokens, `vocab` the number of its logits, `context` its longest sequence,
    `kv_bytes` what one token takes in the cache, `cache_argument` how its `forward` calls that cache.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    vocab: int
    context: int
    layers: int
    kv_bytes: int
    cache_argument: str
    device: torch.device
    tokenizer_path: str


def load_base_model(name: str, path: Path, device: str = "auto", dtype: str = "float32") -> BaseModel:
    """Load the folder `path`; raises `ConfigError` where it holds no usable causal language model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {name!r}: no config.json in {path}; give a folder that save_pretrained wrote")
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"dtype {dtype!r} is no floating-point type of torch; choose float32 or bfloat16")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {name!r} in {path} could not be loaded: {error}") from error
    model = model.to(chosen).eval().requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(f"model {name!r} has {sorted(kinds)[0]!r} layers; only attention layers are served")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = torch.tensor([], dtype=kind).element_size()
    vocab = model.get_output_embeddings().weight.shape[0]
    return BaseModel(
        name=name,
        path=path,
        model=model,
        tokenizer=tokenizer,
        end_ids=_end_ids(path, model, tokenizer),
        vocab=vocab,
        context=int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT),
        layers=config.num_hidden_layers,
        kv_bytes=2 * config.num_hidden_layers * heads * width * size,
        cache_argument="cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values",
        device=chosen,
        tokenizer_path=readable_path(path),
    )


def _end_ids(path: Path, model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that the folder calls an end: of its generation settings, its model and its tokenizer."""
    sources: list[Any] = [model.config.eos_token_id, tokenizer.eos_token_id]
    generation = path / "generation_config.json"
    if generation.is_file():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return frozenset(ids)


def readable_path(path: Path) -> str:
    """Return a spelling of `path` that the SDK's `get_tokenizer` reads as this very folder.

    The SDK cuts a tokenizer id at its first colon, and a name with exactly two slashes down to the first two parts.
    """
    spelled = str(path.resolve())
    if ":" in spelled:
        raise ConfigError(f"model folder {spelled!r} has a colon in its path, which the tinker SDK cuts off; move it")
    return spelled + "/." if spelled.count("/") == 2 else spelled


class _Given(nn.Module):
    """Stands in for a model's body and hands out hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class Halves:
    """A causal language model cut in two, so that logits are computed for a few positions at a time.

    Runs the model's own `forward` around a stand-in for its body, so that whatever an architecture does to its logits
    (soft caps, scales) is done here too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prefix: str = model.base_model_prefix  # type: ignore[assignment]
        self._body = getattr(model, self._prefix)
        self._given = _Given()
        self._verify()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, T, D] of right-padded `tokens` int64[B, T]; causal, so that pads harm nobody."""
        states: Tensor = self._body(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [P, V] of hidden states [P, D]."""
        self._given.hidden = hidden.unsqueeze(0)
        setattr(self._model, self._prefix, self._given)
        try:
            dummy = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
            out: Tensor = self._model(input_ids=dummy, use_cache=False).logits[0]
        finally:
            setattr(self._model, self._prefix, self._body)
            self._given.hidden = None
        return out.float()

    @torch.no_grad()
    def _verify(self) -> None:
        tokens = torch.tensor([[0, 1, 2, 3]], device=next(self._model.parameters()).device)
        whole = self._model(input_ids=tokens, use_cache=False).logits[0].float()
        if not torch.allclose(self.logits(self.hidden(tokens)[0]), whole, atol=1e-4, rtol=1e-4):
            raise ConfigError(f"{type(self._model).__name__} computes its logits in a way that can't be cut in two")
