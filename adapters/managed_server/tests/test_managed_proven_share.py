"""How much of a real model's samples is proven when a script hands in text that was tokenised anew."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import PolicyRef, Sample
from tinker_atropos.external import EndpointSettings
from tinker_atropos_managed_server import ManagedServerConfig, serve_policy

PYTHON = os.environ.get("TINKER_ATROPOS_ATROPOSLIB_PYTHON") or (
    sys.executable if importlib.util.find_spec("atroposlib") else ""
)
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not PYTHON, reason="atroposlib is not installed; TINKER_ATROPOS_ATROPOSLIB_PYTHON may name a Python that has it"
    ),
]


class SmolLM2:
    """The packaged model, sampled in this process."""

    context_length = 2048

    def __init__(self) -> None:
        import torch
        from tinker_atropos_local_tinker.models import resolve_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = str(resolve_model("smollm2-135m").path)
        self.ref = PolicyRef("run", 0, 0, folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._end = self._tokenizer.eos_token_id
        torch.manual_seed(0)

    def tokenizer(self):
        return self._tokenizer

    async def sample(self, prompt, params, n):
        return await asyncio.to_thread(self._sample, prompt, params, n)

    def _sample(self, prompt, params, n):
        import torch

        ids = torch.tensor(prompt.astype(np.int64)).repeat(n, 1)
        with torch.no_grad():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=params.temperature,
                top_k=0,
                max_new_tokens=params.max_tokens,
                eos_token_id=self._end,
                pad_token_id=self._end,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logprobs = torch.stack(made.logits, 1).float().log_softmax(-1)
        found = []
        for row, scores in zip(made.sequences[:, ids.shape[1] :].tolist(), logprobs, strict=True):
            length = row.index(self._end) + 1 if self._end in row else len(row)
            taken = scores[range(length), row[:length]].numpy().astype(np.float32)
            reason: Any = "stop" if row[length - 1] == self._end else "length"
            found.append(Sample(np.array(row[:length], dtype=np.int32), taken, reason, self.ref))
        return found


async def test_share_of_proven_tokens(fake_source, capsys):
    source = fake_source(SmolLM2())
    served: Any = serve_policy(ManagedServerConfig(), source, EndpointSettings(model="policy"))
    async with served as endpoint:
        hidden = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        script = str(Path(__file__).with_name("atroposlib_client.py"))
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            script,
            "share",
            endpoint.url,
            endpoint.tokenizer,
            env={**hidden, "HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        found = json.loads(out.decode().rpartition("RESULT ")[2])
        sampled = endpoint.journal.turns
        assert sampled == 3 * 8 + 3 * 3
        lines = []
        for kind, turns in (("single", 1), ("multi", 3)):
            proofs = [endpoint.prove(np.array(tokens, dtype=np.int32)) for tokens in found[kind]]
            proven = sum(len(proof.policies) for proof in proofs)
            tokens = sum(int(proof.mask.sum()) for proof in proofs)
            whole = sum(len(proof.policies) == turns for proof in proofs)
            lines.append(
                f"{kind}: {proven} of {turns * len(proofs)} turns proven ({tokens} tokens), "
                f"{whole} of {len(proofs)} sequences whole"
            )
            # Sampled text is not always the tokeniser's own way to write it; most of it is.
            assert proven >= 0.5 * turns * len(proofs)
        with capsys.disabled():
            print("\n" + "\n".join(lines))
