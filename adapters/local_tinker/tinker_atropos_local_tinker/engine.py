"""Trains low-rank adapters on one frozen base model: forward and backward passes, optimiser steps, states.

Not safe for threads: one worker calls it. Everything is a function of what it was given, in a fixed order of
reductions, so the same requests give the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tinker_atropos.errors import UserError
from torch import Tensor

from tinker_atropos_local_tinker import lora
from tinker_atropos_local_tinker.adam import AdamParams, check_adam
from tinker_atropos_local_tinker.base_model import BaseModel, Halves
from tinker_atropos_local_tinker.losses import Config, Loss, find_loss

MICRO_BATCH_TOKENS = 1024  # padded; what one forward pass keeps for its backward pass grows with it
HEAD_POSITIONS = 512  # logits are computed for this many positions at a time: 100 MB at a vocabulary of 49k

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence to train on: `tokens int32[T]`, and inputs of the loss, each [T] or [T, K] like `target_tokens`."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass returns: per datum float32 arrays of the targets' shape, and metrics named `name:reduction`."""

    outputs: list[dict[str, Array]]
    metrics: dict[str, float]


@dataclass(slots=True)
class TrainedModel:
    """One adapter in training with its optimiser, and the gradient gathered since its last step."""

    model_id: str
    spec: lora.LoraSpec
    adapter: lora.Adapter
    optimizer: torch.optim.AdamW
    step: int = 0
    gradients: list[Tensor] | None = None


class Engine:
    """The training side of the server."""

    def __init__(self, base: BaseModel, micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> None:
        self.base = base
        self.micro_batch_tokens = micro_batch_tokens
        self._model, self._layers = lora.with_lora_layers(base.model)
        self._halves = Halves(self._model)

    def create(self, model_id: str, spec: lora.LoraSpec) -> TrainedModel:
        """Return a new model whose adapter adds nothing yet."""
        adapter = lora.init_adapter(self.base.model, spec, self.base.device)
        return self._adopt(model_id, spec, adapter)

    def _adopt(self, model_id: str, spec: lora.LoraSpec, adapter: lora.Adapter) -> TrainedModel:
        values = list(lora.parameters(adapter))
        for value in values:
            value.requires_grad_(True)
        return TrainedModel(model_id, spec, adapter, torch.optim.AdamW(values))

    def run(
        self, model: TrainedModel, data: Sequence[Datum], loss_name: str, config: Config, *, backward: bool
    ) -> PassResult:
        """Compute the loss, summed over all tokens; with `backward`, add its gradient to what the model has gathered.

        All or nothing: where a datum is refused, no gradient is kept. Raises `UserError` naming the datum.
        """
        loss, config = find_loss(loss_name, config)
        prepared = [self._prepare(i, datum, loss_name, loss) for i, datum in enumerate(data)]
        if not prepared:
            raise UserError("no data; a forward or backward pass needs at least one datum")
        values = list(lora.parameters(model.adapter))
        for value in values:
            value.grad = None
        lora.activate(self._layers, model.adapter, model.spec.rank)
        outputs: list[dict[str, Array]] = [{} for _ in prepared]
        losses = [0.0] * len(prepared)
        try:
            for rows in self._micro_batches(prepared):
                self._micro_batch(rows, prepared, loss, loss_name, config, outputs, losses, backward)
            if backward:
                self._gather(model, values)
        finally:
            for value in values:
                value.grad = None
        metrics = {"loss:sum": float(np.sum(losses)), "tokens:sum": float(sum(len(p.tokens) for p in prepared))}
        return PassResult(outputs, metrics)

    def optim_step(self, model: TrainedModel, params: AdamParams) -> dict[str, float]:
        """Apply the gathered gradient with AdamW and forget it; return the gradient norm before clipping."""
        check_adam(params)
        if model.gradients is None:
            raise UserError("optim_step: no gradient was gathered since the last step; call forward_backward first")
        values = list(lora.parameters(model.adapter))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in model.gradients))
        if not math.isfinite(norm):
            model.gradients = None
            raise UserError("optim_step: the gradient is not finite; it was dropped and the weights are unchanged")
        clip = params.grad_clip_norm
        scale = clip / norm if 0 < clip < norm else 1.0
        for group in model.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        for value, gradient in zip(values, model.gradients, strict=True):
            value.grad = gradient if scale == 1.0 else gradient * scale
        model.optimizer.step()
        for value in values:
            value.grad = None
        model.gradients = None
        model.step += 1
        return {"unclipped_grad_l2:mean": norm}

    def optimizer_tensors(self, model: TrainedModel) -> dict[str, Tensor]:
        """Return the optimiser's state: `m.<i>`, `v.<i>` and `t.<i>` for the i-th parameter that has been stepped."""
        tensors: dict[str, Tensor] = {}
        for i, value in enumerate(lora.parameters(model.adapter)):
            state = model.optimizer.state.get(value)
            if state:
                tensors[f"m.{i}"] = state["exp_avg"].cpu().contiguous()
                tensors[f"v.{i}"] = state["exp_avg_sq"].cpu().contiguous()
                tensors[f"t.{i}"] = state["step"].cpu().reshape(1)
        return tensors

    def restore(
        self,
        model_id: str,
        spec: lora.LoraSpec,
        adapter: lora.Adapter,
        optimizer: Mapping[str, Tensor] | None,
        step: int,
    ) -> TrainedModel:
        """Return a model with saved weights; with `optimizer`, it continues as if it had never stopped."""
        names = lora.targets(self.base.model, spec)
        if set(names) != set(adapter):
            raise UserError(
                f"the checkpoint's layers are not those of {self.base.name!r}; it was made on another model"
            )
        ordered = {name: adapter[name] for name in names}
        model = self._adopt(model_id, spec, ordered)
        if optimizer is not None:
            for i, value in enumerate(lora.parameters(ordered)):
                if f"m.{i}" in optimizer:
                    moved = {k: optimizer[f"{k}.{i}"].to(self.base.device).clone() for k in "mv"}
                    model.optimizer.state[value] = {
                        "step": optimizer[f"t.{i}"].reshape(()).clone(),
                        "exp_avg": moved["m"],
                        "exp_avg_sq": moved["v"],
                    }
            model.step = step
        return model

    def _prepare(self, index: int, datum: Datum, loss_name: str, loss: Loss) -> _Prepared:
        where = f"datum {index}"
        length = len(datum.tokens)
        if length == 0:
            raise UserError(f"{where}: model_input is empty; give at least one token")
        if length > self.base.context:
            raise UserError(f"{where}: {length} tokens exceed the model's context of {self.base.context}; shorten it")
        self._check_tokens(where, "model_input", datum.tokens)
        if "target_tokens" not in datum.inputs:
            raise UserError(f"{where}: loss_fn_inputs has no 'target_tokens'")
        targets = datum.inputs["target_tokens"]
        if targets.ndim not in (1, 2) or targets.shape[0] != length:
            raise UserError(
                f"{where}: target_tokens has shape {list(targets.shape)}, but model_input has {length} tokens; "
                f"give one target (or one row of targets) per input token"
            )
        self._check_tokens(where, "target_tokens", targets)
        known = {"target_tokens", *loss.required, *loss.optional}
        for name, values in datum.inputs.items():
            if name not in known:
                raise UserError(f"{where}: loss {loss_name!r} takes no {name!r}; it takes {', '.join(sorted(known))}")
            if values.shape != targets.shape:
                raise UserError(
                    f"{where}: {name} has shape {list(values.shape)}, but target_tokens has {list(targets.shape)}; "
                    f"they must be equal"
                )
            if not np.isfinite(values).all():
                raise UserError(f"{where}: {name} has a value that is not finite (NaN or infinite)")
        missing = [name for name in loss.required if name not in datum.inputs]
        if missing:
            raise UserError(f"{where}: loss {loss_name!r} needs {missing[0]!r}, which loss_fn_inputs lacks")
        device = self.base.device
        inputs = {
            name: torch.tensor(np.array(datum.inputs[name], dtype=np.float32), device=device)
            if name in datum.inputs
            else torch.ones(targets.shape, device=device)
            for name in (*loss.required, *loss.optional)
        }
        return _Prepared(
            torch.as_tensor(datum.tokens.astype(np.int64), device=device),
            torch.as_tensor(targets.astype(np.int64), device=device),
            inputs,
        )

    def _check_tokens(self, where: str, name: str, tokens: Array) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.base.vocab):
            bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
            raise UserError(f"{where}: {name} has token {bad}, outside this model's vocabulary of {self.base.vocab}")

    def _micro_batches(self, prepared: Sequence[_Prepared]) -> Iterator[list[int]]:
        """Yield indices of data, longest first, so that little is padded and memory peaks at once."""
        order = sorted(range(len(prepared)), key=lambda i: (-len(prepared[i].tokens), i))
        batch: list[int] = []
        for i in order:
            longest = len(prepared[batch[0]].tokens) if batch else 0
            if batch and longest * (len(batch) + 1) > self.micro_batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        yield batch

    def _micro_batch(
        self,
        rows: list[int],
        prepared: Sequence[_Prepared],
        loss: Loss,
        loss_name: str,
        config: Config,
        outputs: list[dict[str, Array]],
        losses: list[float],
        backward: bool,
    ) -> None:
        data = [prepared[i] for i in rows]
        tokens = torch.nn.utils.rnn.pad_sequence([d.tokens for d in data], batch_first=True)
        with torch.set_grad_enabled(backward):
            hidden = self._halves.hidden(tokens)
            flat = torch.cat([hidden[row, : len(d.tokens)] for row, d in enumerate(data)])
        # The head is run twice where a gradient flows: first for every target's log-probability, then, with the
        # loss's own derivative in hand, only at positions where it isn't zero. Prompts cost no backward pass, and
        # logits of more than HEAD_POSITIONS positions never exist at once.
        targets = _pad_columns([d.targets.reshape(len(d.tokens), -1) for d in data])
        with torch.no_grad():
            logprobs = self._target_logprobs(flat.detach(), targets)
        gradients = torch.zeros_like(logprobs)
        start = 0
        for i, d in zip(rows, data, strict=True):
            mine = slice(start, start + len(d.tokens)), slice(0, d.targets.numel() // len(d.tokens))
            start += len(d.tokens)
            found = logprobs[mine].reshape(d.targets.shape).requires_grad_(backward)
            with torch.set_grad_enabled(backward):
                per_token = loss.per_token(found, d.inputs, config)
                total = per_token.double().sum()
            if not torch.isfinite(total):
                raise UserError(
                    f"datum {i}: loss {loss_name!r} is not finite; no gradient was kept. The policy may be far "
                    f"from the one that sampled: check the sampler's logprobs, or lower the learning rate"
                )
            losses[i] = float(total.detach())
            outputs[i] = {
                "logprobs": found.detach().cpu().numpy(),
                "elementwise_loss": per_token.detach().float().cpu().numpy(),
            }
            if backward:
                (gradient,) = torch.autograd.grad(total, found, allow_unused=True)
                if gradient is not None:
                    gradients[mine] = gradient.reshape(len(d.tokens), -1)
        if backward:
            self._backward(flat, targets, gradients)

    def _target_logprobs(self, flat: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probabilities [P, K] of `targets` [P, K] after hidden states [P, D]."""
        parts = []
        for at in range(0, len(flat), HEAD_POSITIONS):
            logits = self._halves.logits(flat[at : at + HEAD_POSITIONS])
            parts.append(logits.gather(1, targets[at : at + HEAD_POSITIONS]) - logits.logsumexp(dim=1, keepdim=True))
        return torch.cat(parts)

    def _backward(self, flat: Tensor, targets: Tensor, gradients: Tensor) -> None:
        """Add d(loss)/d(adapter) to the adapter's `.grad`, given d(loss)/d(logprobs) [P, K]."""
        needed = (gradients != 0).any(dim=1).nonzero()[:, 0]
        if not len(needed):
            return
        into = torch.zeros_like(flat)
        for at in range(0, len(needed), HEAD_POSITIONS):
            positions = needed[at : at + HEAD_POSITIONS]
            leaf = flat[positions].detach().requires_grad_(True)
            logits = self._halves.logits(leaf)
            logprobs = logits.gather(1, targets[positions]) - logits.logsumexp(dim=1, keepdim=True)
            torch.autograd.backward(logprobs, gradients[positions])
            assert leaf.grad is not None
            into[positions] = leaf.grad
        if flat.requires_grad:
            torch.autograd.backward(flat, into)

    @staticmethod
    def _gather(model: TrainedModel, values: list[Tensor]) -> None:
        fresh = [torch.zeros_like(v) if v.grad is None else v.grad for v in values]
        if model.gradients is None:
            model.gradients = fresh
        else:
            model.gradients = [old + new for old, new in zip(model.gradients, fresh, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    tokens: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]


def _pad_columns(tables: Sequence[Tensor]) -> Tensor:
    """Return the tables [T, K] below each other, narrower ones padded with token 0, whose gradient stays zero."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])


def fingerprint(adapter: lora.Adapter) -> str:
    """Return a name for these very weights: equal bits, equal name."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weights in adapter.items():
        digest.update(name.encode())
        for value in (weights.a, weights.b):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
