"""Saves and loads models: checkpoints in the store, lines in the journal. Runs on the training worker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker import lora
from tinker_atropos_local_tinker.answers import NotFound
from tinker_atropos_local_tinker.base_model import BaseModel
from tinker_atropos_local_tinker.engine import Engine, TrainedModel, fingerprint
from tinker_atropos_local_tinker.fields import flag, metadata, optional_text, ttl_seconds
from tinker_atropos_local_tinker.journal import Event, Journal
from tinker_atropos_local_tinker.merged import Snapshot
from tinker_atropos_local_tinker.models import loadable_name
from tinker_atropos_local_tinker.records import Checkpoint, Kind
from tinker_atropos_local_tinker.store import Store, check_name


class States:
    """The saved states of one server's models."""

    def __init__(self, base: BaseModel, engine: Engine, store: Store, journal: Journal) -> None:
        self.base = base
        self.store = store
        self._base_reference = loadable_name(base.name, base.path)
        self._engine = engine
        self._journal = journal

    def save(self, model: TrainedModel, kind: Kind, body: Mapping[str, Any]) -> Checkpoint:
        """Save a model as the request `body` says: `path` (the name), `ttl_seconds`, `overwrite`, `user_metadata`."""
        if body.get("age_encryption_recipients"):
            raise UserError("age_encryption_recipients is not served here; encrypt the files yourself")
        name = optional_text(body, "path") or f"step-{model.step:06d}-{uuid.uuid4().hex[:8]}"
        check_name(name)
        kept = ttl_seconds(body)
        checkpoint = Checkpoint(
            model_id=model.model_id,
            kind=kind,
            name=name,
            base_model=self.base.name,
            lora=model.spec.as_json(),
            step=model.step,
            weights_id=fingerprint(model.adapter),
            created=time.time(),
            expires=None if kept is None else time.time() + kept,
            user_metadata=metadata(body),
        )
        if kind == "sampler_weights":
            try:
                same = self.store.find(checkpoint.path)
            except NotFound:
                same = None
            if same is not None and same.weights_id == checkpoint.weights_id:
                return same  # the very same weights: saving them again changes nothing
        event: Event = "save_state" if kind == "weights" else "save_sampler"
        return self.store.save(
            checkpoint,
            lora.peft_config(self.base.model, list(model.adapter), model.spec.rank, self._base_reference),
            lora.to_peft(model.adapter),
            self._engine.optimizer_tensors(model) if kind == "weights" else None,
            overwrite=flag(body, "overwrite", False),
            # The line goes first: a checkpoint that could be loaded but isn't in the journal would break the lineage.
            before=lambda: self._journal.write(event, model.model_id, model.step, path=checkpoint.path),
        )

    def load(self, model_id: str, path: str, optimizer: bool, present: TrainedModel | None) -> TrainedModel:
        """Return `model_id` as it was saved at `path`; it must fit the model `present` under that id, if any."""
        checkpoint = self.store.find(path)
        self.check_base_model(checkpoint.base_model)
        spec = lora.LoraSpec(**checkpoint.lora)
        if present is not None and (spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed) != (
            present.spec.rank,
            present.spec.train_attn,
            present.spec.train_mlp,
            present.spec.train_unembed,
        ):
            raise UserError(
                f"{path} was made with {_describe(spec)}, but this model has {_describe(present.spec)}; use "
                f"create_training_client_from_state, which makes a fitting model"
            )
        adapter, state = self.store.load(checkpoint)
        if optimizer and state is None:
            raise UserError(f"{path} has no optimiser state (it was saved for sampling); load it without the optimiser")
        model = self._engine.restore(
            model_id,
            spec,
            lora.from_peft(adapter, self.base.device),
            state if optimizer else None,
            checkpoint.step,
        )
        self._journal.write("load_state", model_id, model.step, path=path, optimizer=optimizer)
        return model

    def snapshot(self, path: str) -> Snapshot:
        """Return the weights at `path`, to sample from."""
        checkpoint = self.store.find(path)
        self.check_base_model(checkpoint.base_model)
        tensors, _ = self.store.load(checkpoint)
        return Snapshot(checkpoint.weights_id, lora.from_peft(tensors, self.base.device), checkpoint.lora["rank"])

    def check_base_model(self, name: Any) -> None:
        """Raise `UserError` unless `name` is the model that is served here, by its name or its folder."""
        if name in (self.base.name, self.base.tokenizer_path):
            return
        if isinstance(name, str) and Path(name).is_dir() and Path(name).resolve() == self.base.path.resolve():
            return
        raise UserError(
            f"base model {name!r} is not served here, only {self.base.name!r}; start a server with that model"
        )


def _describe(spec: lora.LoraSpec) -> str:
    trained = [
        name.removeprefix("train_") for name in ("train_attn", "train_mlp", "train_unembed") if getattr(spec, name)
    ]
    return f"rank {spec.rank} on {', '.join(trained)}"
