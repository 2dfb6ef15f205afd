"""Tokens a second of the local Tinker server, 16 concurrent requests of the real SDK, beside plain `generate`.

The peer is transformers' `generate` in this process on the same model, prompts and number of new tokens, once as one
batch and once prompt after prompt. End of turn is off on both sides, so that both make the same number of tokens.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

REQUESTS, NEW_TOKENS, ROUNDS = 16, 64, 5


def prompts(tokenizer: Any) -> list[list[int]]:
    texts = [
        f"Question: {n} pencils cost {2 * n + 3} cents in the shop at the corner. What do {n * 7} cost?\nAnswer:"
        for n in range(2, 2 + REQUESTS)
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


async def ours(sampler: Any, inputs: list[list[int]]) -> int:
    import tinker

    params = tinker.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
    asked = [sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params) for tokens in inputs]
    answers = [await answer for answer in asked]
    return sum(len(answer.sequences[0].tokens) for answer in answers)


def peer(model: Any, tokenizer: Any, inputs: list[list[int]]) -> int:
    import torch

    width = max(map(len, inputs))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(tokens)) + tokens for tokens in inputs])
    mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in inputs])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=True,
            top_k=0,
            pad_token_id=pad,
        )
    return int(made.shape[0] * (made.shape[1] - width))


def main() -> None:
    import tinker
    import torch
    from tinker_atropos_local_tinker import LOCAL_API_KEY, start_local_server
    from tinker_atropos_local_tinker.models import resolve_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "smollm2-135m"
    folder = resolve_model(name).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = prompts(tokenizer)
    rates: dict[str, list[float]] = {"ours": [], "batch": [], "single": []}
    with (
        tempfile.TemporaryDirectory() as temporary,
        start_local_server(Path(temporary) / "store", model=name, log=Path(temporary) / "log") as server,
    ):
        service = tinker.ServiceClient(base_url=server.url, api_key=LOCAL_API_KEY)
        training = service.create_lora_training_client(base_model=name, rank=16)
        if hasattr(training, "result"):
            training = training.result()
        sampler = training.save_weights_and_get_sampling_client()
        if hasattr(sampler, "result"):
            sampler = sampler.result()

        def timed(kind: str, work: Any) -> None:
            start = time.perf_counter()
            tokens = work()
            rates[kind].append(tokens / (time.perf_counter() - start))

        for place in range(ROUNDS + 1):
            timed("ours", lambda: asyncio.run(ours(sampler, inputs)))
            timed("batch", lambda: peer(model, tokenizer, inputs))
            if place % 2:  # slow: sixteen calls each
                timed("single", lambda: sum(peer(model, tokenizer, [tokens]) for tokens in inputs))
            if not place:  # the first round warms up
                rates = {kind: [] for kind in rates}
    mine, batch, single = (median(rates[kind]) for kind in ("ours", "batch", "single"))
    print(
        f"local_tinker {mine:.0f} tokens/s for {REQUESTS} concurrent requests of {NEW_TOKENS} tokens; generate "
        f"{batch:.0f} as one batch, {single:.0f} one at a time; torch threads {torch.get_num_threads()}"
    )
    print(
        f"ratio to one batch {mine / batch:.2f} (target: 1.0 or more), to one at a time {mine / single:.2f} (target: 4)"
    )


if __name__ == "__main__":
    main()
