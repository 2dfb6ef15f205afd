"""Real Atropos scripts, in the interpreter that TINKER_ATROPOS_SCRIPTS names, against the real trajectory API."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tinker_atropos.external import Proven
from tinker_atropos.trajectory import PolicyRef
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_run import ScriptEnvironment

PYTHON = os.environ.get("TINKER_ATROPOS_SCRIPTS")
FOREIGN = Path(__file__).parent / "foreign"
REF = PolicyRef("run", 0, 0, "fake://0")

pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="TINKER_ATROPOS_SCRIPTS names no interpreter with atroposlib (see docs/atropos.md)"
)


class FakeInference:
    """Answers `/generate` with digits. It proves every token, as if it had sampled it."""

    token, model, context_length = None, "tiny", 4096

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer, self.tokenizer, self.url = tokenizer, str(folder), ""
        self.requests: Counter[str] = Counter()

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.requests[request.path] += 1
        answers = []
        for place in range(asked["sampling_params"].get("n", 1)):
            tokens = [*self._tokenizer.encode(f"it is {place % 10}", add_special_tokens=False), 256]
            told = [[-0.5, token, None] for token in tokens]
            answers.append(
                {"text": "", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": told}}
            )
        return web.json_response(answers if len(answers) > 1 else answers[0])

    async def other(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        return web.json_response({}, status=404)

    def seen(self) -> dict[str, int]:
        return {}

    async def ready(self) -> None:
        pass

    def prove(self, tokens: Any, logprobs: Any = None) -> Proven:
        return Proven(np.ones(len(tokens), bool), np.full(len(tokens), -0.5, np.float32), (REF,), ("stop",))


@pytest.fixture
async def inference(tmp_path: Path) -> AsyncIterator[FakeInference]:
    from tinker_atropos_local_tinker.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fake = FakeInference(tokenizer, tmp_path / "tokenizer")
    app = web.Application()
    app.router.add_post("/generate", fake.generate)
    app.router.add_route("*", "/{path:.*}", fake.other)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield fake
    await runner.cleanup()


def make(path: Path, **settings: Any) -> ScriptEnvironment:
    content = {"scripts": [{"path": str(path)}], "python": PYTHON, **settings}
    return ScriptEnvironment(AtroposConfig.model_validate_json(json.dumps(content)))


async def test_a_script_with_a_config_path_of_the_originals_runs_unmodified(
    inference: FakeInference, sink: Any, tmp_path: Path, until: Any
) -> None:
    task = asyncio.create_task(make(FOREIGN / "sums_tinker.py", cwd=str(tmp_path)).run(inference, sink))
    await until(lambda: len(sink.groups) >= 2, task)
    group = sink.groups[0]
    assert len(group.trajectories) == 4
    assert set(group.scores) <= {0.0, 1.0}
    assert all(trajectory.sampled_tokens > 0 for trajectory in group.trajectories)
    assert set(inference.requests) == {"/generate"}, "a health check would sample once a second"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_its_own_config_path_does_not_undo_what_the_run_wrote(
    inference: FakeInference, sink: Any, tmp_path: Path, until: Any
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "default.yaml").write_text(
        "env: {group_size: 2, tokenizer_name: a/b, rollout_server_url: 'http://127.0.0.1:9', use_wandb: true}\n"
        "openai: [{model_name: nobody/nothing, base_url: 'http://127.0.0.1:9/v1'}]\n"
    )
    task = asyncio.create_task(make(FOREIGN / "sums_tinker.py", cwd=str(tmp_path)).run(inference, sink))
    await until(lambda: sink.groups, task)
    assert len(sink.groups[0].trajectories) == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_the_api_refuses_is_shown_while_the_script_goes_on(
    inference: FakeInference, sink: Any, tmp_path: Path, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_watch.QUIET_SECONDS", 4.0)
    path = tmp_path / "broken_tinker.py"
    source = (FOREIGN / "sums_tinker.py").read_text()
    path.write_text(source.replace("append(node.masked_tokens)", "append(node.masked_tokens[:-1])"))
    sink.info = replace(sink.info, max_token_length=512)
    task = asyncio.create_task(make(path, cwd=str(tmp_path)).run(inference, sink))
    line = await until(lambda: [line for line in sink.lines if "the API refused" in line], task)
    assert "masks" in line[0]
    assert not sink.groups
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
