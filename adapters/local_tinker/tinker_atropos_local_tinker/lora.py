"""Low-rank adapters on the linear layers of a transformers model: where they sit, how they start, what they add.

`y = W x + (alpha / rank) B A x`, with `alpha = 32` for every rank, `A` uniform in ±1/sqrt(d_in) and `B` zero: the
parametrisation that Tinker's makers publish ("LoRA Without Regret", thinkingmachines.ai/blog/lora, 2025), under which
the best learning rate hardly depends on the rank. It is also what PEFT exports as `lora_alpha=32`.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tinker_atropos.errors import UserError
from torch import Tensor, nn
from torch.nn import functional

from tinker_atropos_local_tinker.linear import frozen_linear

ALPHA = 32.0
MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What the SDK's LoraConfig says: the rank, the seed of the start values, and which layers are trained."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a metadata file."""
        return asdict(self)


@dataclass(slots=True)
class Weights:
    """One layer's adapter: `a` float32[rank, d_in], `b` float32[d_out, rank]."""

    a: Tensor
    b: Tensor


Adapter = dict[str, Weights]
"""Adapters by the full name of their module, in the order of the model's modules."""


def targets(model: nn.Module, spec: LoraSpec) -> list[str]:
    """Return the full names of the linear layers that `spec` trains; raises `UserError` where the model has none."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        parents = name.lower().rsplit(".", 1)[0]
        if module is head:
            found["train_unembed"].append(name)
        elif "attn" in parents or "attention" in parents:
            found["train_attn"].append(name)
        elif "mlp" in parents or "feed_forward" in parents or "ffn" in parents:
            found["train_mlp"].append(name)
    wanted = [key for key in found if getattr(spec, key)]
    for key in wanted:
        if not found[key]:
            raise UserError(f"{type(model).__name__} has no linear layers for {key}; create the model with {key}=False")
    chosen = {name for key in wanted for name in found[key]}
    return [name for name, _ in model.named_modules() if name in chosen]


def init_adapter(model: nn.Module, spec: LoraSpec, device: torch.device) -> Adapter:
    """Return a fresh adapter: a function of the seed and each layer's name alone, whatever else is trained."""
    if not 1 <= spec.rank <= MAX_RANK:
        raise UserError(f"lora rank {spec.rank} is out of range; choose 1 to {MAX_RANK}")
    adapter: Adapter = {}
    for name in targets(model, spec):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        digest = hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(spec.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        adapter[name] = Weights(a.to(device), torch.zeros(layer.out_features, spec.rank, device=device))
    return adapter


def parameters(adapter: Adapter) -> Iterator[Tensor]:
    """Yield every tensor of the adapter, always in the same order."""
    for weights in adapter.values():
        yield weights.a
        yield weights.b


def frozen_copy(adapter: Adapter) -> Adapter:
    """Return a copy that later training cannot change."""
    return {name: Weights(w.a.detach().clone(), w.b.detach().clone()) for name, w in adapter.items()}


class LoraLinear(nn.Module):
    """A frozen linear layer that adds whichever adapter is active, or none."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.active: Weights | None = None
        self.scale = 1.0

    @property
    def weight(self) -> Tensor:
        """Return the frozen weight; some models read their layers' `weight` attribute."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return `W x + scale * B A x`."""
        y = frozen_linear(x, self.base)
        if self.active is None:
            return y
        low = functional.linear(functional.linear(x.to(self.active.a.dtype), self.active.a), self.active.b)
        return y + (low * self.scale).to(y.dtype)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a second module tree over the very same tensors, so that its layers can be exchanged at no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def with_lora_layers(model: nn.Module) -> tuple[nn.Module, dict[str, LoraLinear]]:
    """Return a copy of `model` (same tensors) whose linear layers can carry adapters, and these layers by name."""
    copied = shared_copy(model)
    layers: dict[str, LoraLinear] = {}
    for name, module in list(copied.named_modules()):
        if isinstance(module, nn.Linear):
            layers[name] = LoraLinear(module)
            _exchange(copied, name, layers[name])
    return copied, layers


def activate(layers: Mapping[str, LoraLinear], adapter: Adapter, rank: int) -> None:
    """Make `adapter` the one that the layers add."""
    for name, layer in layers.items():
        layer.active = adapter.get(name)
        layer.scale = ALPHA / rank


@torch.no_grad()
def merged_weights(model: nn.Module, adapter: Adapter, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapted layer's name and its weight with the adapter added."""
    for name, weights in adapter.items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        b, a = (part.to(weight.dtype) for part in (weights.b, weights.a))
        yield name, torch.addmm(weight, b, a, alpha=ALPHA / rank)


def peft_config(model: nn.Module, names: list[str], rank: int, base_model: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for adapters on the layers called `names`."""
    leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
    same_leaf = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rsplit(".", 1)[-1] in leaves}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # Leaf names are what other engines expect; full names only where a leaf would catch too many layers.
        "target_modules": leaves if same_leaf == set(names) else sorted(names),
    }


def to_peft(adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter as PEFT names its tensors."""
    tensors: dict[str, Tensor] = {}
    for name, weights in adapter.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = weights.a.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = weights.b.detach().cpu().contiguous()
    return tensors


def from_peft(tensors: Mapping[str, Tensor], device: torch.device) -> Adapter:
    """Return the adapter that `to_peft` wrote; layers keep the order of the names."""
    adapter: Adapter = {}
    ends = (".lora_A.weight", ".lora_B.weight")
    for name in sorted({key[len("base_model.model.") : -len(ends[0])] for key in tensors}):
        a, b = (tensors[f"base_model.model.{name}{end}"].to(device) for end in ends)
        adapter[name] = Weights(a, b)
    return adapter
