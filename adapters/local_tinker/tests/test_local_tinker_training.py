"""Training over a real socket, held to a plain-torch reference that imports no product code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker_atropos_local_tinker.download import download_checkpoint

ALPHA = 32.0


class Reference:
    """The same model written plainly: whole logits, weights `W + alpha / r * B A`, torch's own AdamW."""

    def __init__(self, model: Path, adapter: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
        found = load_file(adapter / "adapter_model.safetensors")
        self.lora = {key.removeprefix("base_model.model."): value.requires_grad_(True) for key, value in found.items()}
        self.rank = next(v for k, v in self.lora.items() if "lora_A" in k).shape[0]

    def logprobs(self, tokens: list[int], targets: list[int]) -> torch.Tensor:
        weights = dict(self.model.named_parameters())
        weights["lm_head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        for key, a in self.lora.items():
            if key.endswith("lora_A.weight"):
                name = key.removesuffix(".lora_A.weight")
                b = self.lora[f"{name}.lora_B.weight"]
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / self.rank * (b @ a)
        call = torch.func.functional_call
        out = call(self.model, weights, (torch.tensor([tokens]),), {"use_cache": False}, tie_weights=False)
        found: torch.Tensor = out.logits[0].log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        return found

    def loss(self, data: list[dict[str, Any]], name: str) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for d in data:
            found = self.logprobs(d["tokens"], d["targets"])
            if name == "cross_entropy":
                total = total - (torch.tensor(d["weights"]) * found).double().sum()
            else:
                ratio = (found - torch.tensor(d["logprobs"])).exp()
                total = total - (ratio * torch.tensor(d["advantages"])).double().sum()
        return total


def make_data(seed: int, lengths: tuple[int, ...] = (5, 17, 9, 2)) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    data = []
    for n in lengths:
        tokens = random.integers(0, 256, n + 1).tolist()
        data.append(
            {
                "tokens": tokens[:-1],
                "targets": tokens[1:],
                "weights": random.uniform(0, 2, n).astype(np.float32).tolist(),
                "logprobs": random.uniform(-6, -4, n).astype(np.float32).tolist(),
                "advantages": (random.normal(size=n) * (random.uniform(size=n) > 0.3)).astype(np.float32).tolist(),
            }
        )
    return data


def as_datums(data: list[dict[str, Any]], name: str) -> list[Any]:
    from tinker import types

    keys = ("weights",) if name == "cross_entropy" else ("logprobs", "advantages")
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(d["tokens"]),
            loss_fn_inputs={"target_tokens": d["targets"], **{k: d[k] for k in keys}},
        )
        for d in data
    ]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_losses_and_steps_equal_the_reference(
    loss: str, server: Any, training: Any, tiny_model: Path, tmp_path: Path
) -> None:
    from tinker import types

    at_start = training.save_weights_for_sampler("start").result()
    reference = Reference(tiny_model, download_checkpoint(server.url, at_start.path, tmp_path / "start"))
    params = list(reference.lora.values())
    # eps so large that a step is nearly the gradient itself: weights then tell gradients apart, not only their signs.
    optimizer = torch.optim.AdamW(params, lr=0.5, betas=(0.9, 0.95), eps=1.0, weight_decay=0.01)
    adam = types.AdamParams(learning_rate=0.5, beta1=0.9, beta2=0.95, eps=1.0, weight_decay=0.01, grad_clip_norm=0.3)
    for step in range(3):
        halves = make_data(step), make_data(100 + step, (30, 3))
        optimizer.zero_grad()
        norms = []
        for half in halves:  # two passes before one step: their gradients add up
            expected = reference.loss(half, loss)
            torch.autograd.backward(expected)
            result = training.forward_backward(as_datums(half, loss), loss).result()
            assert result.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5)
            for datum, output in zip(half, result.loss_fn_outputs, strict=True):
                want = reference.logprobs(datum["tokens"], datum["targets"]).detach()
                assert relative(torch.tensor(output["logprobs"].data), want) < 1e-5
        norm = torch.nn.utils.clip_grad_norm_(params, 0.3)
        optimizer.step()
        norms.append(training.optim_step(adam).result().metrics["unclipped_grad_l2:mean"])
        assert norms[-1] == pytest.approx(float(norm), rel=1e-4)
    at_end = training.save_weights_for_sampler("end").result()
    got = load_file(download_checkpoint(server.url, at_end.path, tmp_path / "end") / "adapter_model.safetensors")
    flat = torch.cat([got[f"base_model.model.{k}"].flatten() for k in reference.lora])
    want = torch.cat([v.detach().flatten() for v in params])
    began = load_file(tmp_path / "start" / "adapter_model.safetensors")
    start = torch.cat([began[f"base_model.model.{k}"].flatten() for k in reference.lora])
    assert relative(flat - start, want - start) < 1e-4  # three clipped steps: clip_grad_norm_ itself adds 1e-6


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_gradients_equal_the_reference(loss: str, tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from tinker_atropos_local_tinker import lora
    from tinker_atropos_local_tinker.base_model import load_base_model
    from tinker_atropos_local_tinker.engine import Datum, Engine

    engine = Engine(load_base_model("tiny", tiny_model, "cpu"), micro_batch_tokens=40)
    model = engine.create("m", lora.LoraSpec(rank=4, seed=3))
    torch.manual_seed(0)
    for weights in model.adapter.values():
        weights.b.data.normal_(std=0.02)
    save_file(lora.to_peft(model.adapter), tmp_path / "adapter_model.safetensors")
    reference = Reference(tiny_model, tmp_path)
    data = make_data(5, (5, 17, 9, 2, 30, 30))
    keys = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    datums = [
        Datum(
            np.array(d["tokens"], np.int32),
            {"target_tokens": np.array(d["targets"]), **{k: np.array(d[k], np.float32) for k in keys}},
        )
        for d in data
    ]
    engine.run(model, datums, loss, {}, backward=True)
    torch.autograd.backward(reference.loss(data, loss))
    names = [f"{name}.lora_{part}.weight" for name in model.adapter for part in "AB"]
    assert model.gradients is not None
    got = torch.cat([g.flatten() for g in model.gradients])
    grads = [reference.lora[name].grad for name in names]
    want = torch.cat([g.flatten() for g in grads if g is not None])
    assert relative(got, want) < 1e-5


def test_tenfold_weights_give_a_tenfold_loss(training: Any, sft_datum: Any) -> None:
    one = training.forward([sft_datum([1, 2, 3, 4], [1.0, 0.5, 0.0])], "cross_entropy").result()
    ten = training.forward([sft_datum([1, 2, 3, 4], [10.0, 5.0, 0.0])], "cross_entropy").result()
    assert ten.metrics["loss:sum"] == pytest.approx(10 * one.metrics["loss:sum"], rel=1e-6)


def test_forward_gathers_no_gradient(training: Any, sft_datum: Any) -> None:
    from tinker import RequestFailedError, types

    training.forward([sft_datum([1, 2, 3])], "cross_entropy").result()
    with pytest.raises(RequestFailedError, match="call forward_backward first"):
        training.optim_step(types.AdamParams()).result()


def test_a_custom_loss_has_the_gradient_of_the_loss_it_names(client: Any, tiny_model: Path, sft_datum: Any) -> None:
    from tinker import types

    data = [sft_datum([1, 2, 3, 4], [1.0, 0.5, 2.0]), sft_datum([9, 8, 7], [0.3, 0.4])]

    def weighted(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        parts = [
            -(torch.tensor(d.loss_fn_inputs["weights"].data) * found).sum()
            for d, found in zip(data, logprobs, strict=True)
        ]
        return torch.stack(parts).sum(), {"mine:mean": 1.5}

    norms = []
    for custom in (False, True):
        model = client.create_lora_training_client(base_model=str(tiny_model), rank=4, seed=7).result()
        if custom:
            result = model.forward_backward_custom(data, weighted).result()
            assert result.metrics["mine:mean"] == 1.5
        else:
            result = model.forward_backward(data, "cross_entropy").result()
        norms.append((result.metrics["loss:sum"], model.optim_step(types.AdamParams()).result().metrics))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)
    assert norms[0][1]["unclipped_grad_l2:mean"] == pytest.approx(norms[1][1]["unclipped_grad_l2:mean"], rel=1e-5)


def test_rows_of_targets_are_served(training: Any) -> None:
    from tinker import types

    tokens = [5, 6, 7]
    wide = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": torch.tensor([[1, 2], [3, 4], [5, 6]]),
            "weights": torch.tensor([[0.5, 0.0], [0.0, 0.25], [0.0, 0.0]]),
        },
    )
    narrow = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [1, 4, 5], "weights": [0.5, 0.25, 0.0]},
    )
    result = training.forward([wide, narrow], "cross_entropy").result()
    first, second = (np.array(o["logprobs"].tolist()) for o in result.loss_fn_outputs)
    assert first.shape == (3, 2)
    np.testing.assert_allclose([first[0, 0], first[1, 1], first[2, 0]], second, rtol=1e-5)


def test_start_values_depend_on_the_seed_alone(client: Any, tiny_model: Path, server: Any, tmp_path: Path) -> None:
    found = []
    for i, (seed, attn) in enumerate([(1, True), (1, False), (2, True)]):
        model = client.create_lora_training_client(
            base_model=str(tiny_model), rank=4, seed=seed, train_attn=attn, train_unembed=False
        ).result()
        path = model.save_weights_for_sampler("w").result().path
        found.append(load_file(download_checkpoint(server.url, path, tmp_path / str(i)) / "adapter_model.safetensors"))
    shared = set(found[0]) & set(found[1])
    assert shared
    assert len(found[1]) < len(found[0])
    assert all(torch.equal(found[0][key], found[1][key]) for key in shared)
    assert not all(torch.equal(found[0][key], found[2][key]) for key in shared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_tokens": [2, 3]}, "3 tokens"),
        ({"logprobs": [-1.0, -1.0]}, r"logprobs has shape \[2\]"),
        ({"advantages": [1.0, float("nan"), 0.0]}, "advantages has a value that is not finite"),
        ({"target_tokens": [2, 3, 99999]}, "outside this model's vocabulary"),
        ({"mask": torch.ones(3)}, "takes no 'mask'"),
        ({"logprobs": [-900.0, -900.0, -900.0]}, "is not finite"),
    ],
)
def test_bad_data_are_a_user_error_and_leave_the_model_usable(training: Any, change: Any, message: str) -> None:
    from tinker import RequestFailedError, types

    inputs = {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    good = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    bad = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={**inputs, **change})
    with pytest.raises(RequestFailedError, match=message) as caught:
        training.forward_backward([good, bad], "importance_sampling").result()
    assert caught.value.category == "user"
    assert "datum 1" in str(caught.value)
    with pytest.raises(RequestFailedError, match="no gradient"):  # the good datum left none behind
        training.optim_step(types.AdamParams()).result()
    training.forward_backward([good], "importance_sampling").result()
    training.optim_step(types.AdamParams()).result()


def test_an_unknown_loss_names_the_known_ones(training: Any, sft_datum: Any) -> None:
    from tinker import RequestFailedError

    with pytest.raises(RequestFailedError, match="Known here: cross_entropy") as caught:
        training.forward_backward([sft_datum([1, 2])], "gspo").result()
    assert caught.value.category == "user"


def test_sequences_beyond_the_context_are_refused(training: Any, sft_datum: Any) -> None:
    from tinker import RequestFailedError

    with pytest.raises(RequestFailedError, match="exceed the model's context of 256"):
        training.forward([sft_datum([1] * 300)], "cross_entropy").result()


def test_a_foreign_base_model_is_refused(client: Any) -> None:
    from tinker import BadRequestError

    with pytest.raises(BadRequestError, match="is not served here"):
        client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
