"""Models to sample from: the base model with an adapter added into its weights, kept while they are used.

Merged, a snapshot decodes as fast as the base model does. Every tensor that the adapter leaves alone is shared. An
output layer tied to the embedding gets a weight of its own: the adapter changes what is said, not what is read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tinker_atropos_local_tinker import linear, lora
from tinker_atropos_local_tinker.base_model import BaseModel

log = logging.getLogger(__name__)

KEPT = 3  # models, each with its own copy of the layers that its adapter touches


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Fixed weights to sample from; `key` names their exact bits, and None for `adapter` means the base model."""

    key: str
    adapter: lora.Adapter | None = None
    rank: int = 1

    @property
    def size_bytes(self) -> int:
        """Return what the adapter takes in memory."""
        return sum(t.numel() * t.element_size() for t in lora.parameters(self.adapter)) if self.adapter else 0


class MergedModels:
    """The few models that were sampled from last. Belongs to the sampling thread."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._packed = _packed_layers(base)
        self._plain = self._build({})
        self._models: OrderedDict[str, nn.Module] = OrderedDict()

    def get(self, snapshot: Snapshot, in_use: Container[str]) -> nn.Module:
        """Return the snapshot's model; to make room, those not `in_use` go, the longest unused first."""
        if snapshot.adapter is None:
            return self._plain
        model = self._models.pop(snapshot.key, None)
        if model is None:
            for key in [key for key in self._models if key not in in_use]:
                if len(self._models) >= KEPT:
                    del self._models[key]
            changed = {}
            for name, weight in lora.merged_weights(self._base.model, snapshot.adapter, snapshot.rank):
                changed[name] = linear.pack(weight) if self._packed else weight
            model = self._build(changed)
        self._models[snapshot.key] = model
        return model

    def _build(self, changed: dict[str, Tensor]) -> nn.Module:
        model = lora.shared_copy(self._base.model)
        if self._packed:
            return linear.with_packed_layers(model, {**self._packed, **changed})
        for name, weight in changed.items():
            model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        return model


@torch.no_grad()
def _packed_layers(base: BaseModel) -> dict[str, Tensor]:
    """Return the base model's layers packed, or nothing where this model or machine can't use them."""
    if not linear.available(base.device, next(base.model.parameters()).dtype):
        return {}
    packed = linear.pack_all(base.model)
    tokens = torch.tensor([[0, 1, 2, 3]])
    try:
        found = linear.with_packed_layers(lora.shared_copy(base.model), packed)(input_ids=tokens).logits
        if torch.allclose(found, base.model(input_ids=tokens).logits, atol=1e-3, rtol=1e-3):
            return packed
        log.warning("packed layers change this model's logits; plain ones are used, which are slower")
    except (AttributeError, RuntimeError) as error:  # a model that reads its layers' weights itself
        log.warning("packed layers don't fit this model (%s); plain ones are used, which are slower", error)
    return {}
