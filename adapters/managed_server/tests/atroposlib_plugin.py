"""A pytest plugin that turns atroposlib's own tests to our endpoints; loaded by `test_managed_atroposlib_suite.py`.

`test_managed_server_proxy_integration` starts `atroposlib_backend.py` in place of vLLM. `test_managed_server` gets, in
place of its mock, a server whose answers travel over HTTP from our endpoints through atroposlib's SGLang client.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer


class ServerOverHttp(ServerHarness):
    """What a test sets is what the policy behind the endpoint says next."""

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list, list, list, list]:
        _, tokens, logprobs, reasons = self.tokens_and_logprobs_map[kwargs["prompt"]]
        said = {"tokens": tokens, "logprobs": logprobs, "reasons": reasons}
        Path(os.environ["ATROPOSLIB_REPLIES"]).write_text(json.dumps(said))
        client = SGLangServer.__new__(SGLangServer)
        client.config = APIServerConfig(base_url=os.environ["ATROPOSLIB_URL"], api_key="x", timeout=30)
        client.tokenizer = self.tokenizer
        options = {**kwargs, "model": "policy", "n": len(tokens)}
        prompt, output, found, ends = await client._tokens_and_logprobs_completion_wrapper(**options)
        # Log-probabilities are float32 here; the tests compare with what they wrote.
        return prompt, output, [[round(value, 5) for value in one] for one in found], ends


def config_with_key(**given: Any) -> APIServerConfig:
    """Newer openai clients refuse the empty key that these tests pass."""
    return APIServerConfig(**{**given, "api_key": given["api_key"] or "x"})


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        module = item.module
        if hasattr(module, "VLLM_SCRIPT"):
            module.VLLM_SCRIPT = str(Path(__file__).with_name("atroposlib_backend.py"))
            module.VENV_PYTHON = os.environ["ATROPOSLIB_BACKEND_PYTHON"]
            module.VLLM_PORT = int(os.environ["ATROPOSLIB_PORT"])
            module.VLLM_BASE_URL = f"http://localhost:{module.VLLM_PORT}/v1"
            module.VLLM_MODEL = module.PROXY_MODEL = os.environ["ATROPOSLIB_TOKENIZER"]
            module.REPO_ROOT = str(Path.cwd())
            module.APIServerConfig = config_with_key
        elif "ATROPOSLIB_URL" in os.environ and hasattr(module, "ServerHarness"):
            module.ServerHarness = ServerOverHttp
