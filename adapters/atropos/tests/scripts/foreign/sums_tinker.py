"""Small sums as an Atropos environment in the style of the original's `gsm8k_tinker.py`: configured by CONFIG_PATH."""

from __future__ import annotations

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from tinker_atropos.config import TinkerAtroposConfig

CONFIG_PATH = "configs/default.yaml"


class SumsEnv(BaseEnv):
    """Scores a reply by whether its last digit is that of the sum."""

    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = TinkerAtroposConfig.from_yaml(CONFIG_PATH) if CONFIG_PATH else TinkerAtroposConfig()
        env_config = BaseEnvConfig(
            tokenizer_name=config.base_model,
            group_size=config.group_size,
            use_wandb=config.use_wandb,
            rollout_server_url=config.atropos_api_url,
            total_steps=config.num_steps,
            batch_size=config.batch_size,
            steps_per_eval=config.steps_per_eval,
            max_token_length=config.max_token_env_length,
            max_num_workers=config.max_num_workers,
            max_batches_offpolicy=config.max_batches_offpolicy,
            wandb_name=f"{config.wandb_run_name}-env",
            ensure_scores_are_not_same=config.ensure_scores_are_not_same,
        )
        server = APIServerConfig(
            model_name=config.base_model,
            base_url=config.inference_api_url + "/v1",
            api_key="x",
            server_type="sglang",
            num_requests_for_eval=config.num_requests_for_eval,
        )
        return env_config, [server]

    async def setup(self) -> None:
        self.draw = random.Random(0)

    async def get_next_item(self) -> Any:
        return self.draw.randint(0, 9), self.draw.randint(0, 9)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        first, second = item
        messages = [{"role": "user", "content": f"{first} + {second} ="}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=16,
                temperature=1.0,
                stop=[self.tokenizer.eos_token_id],
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completion.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            right = choice.message.content.strip().endswith(str((first + second) % 10))
            group["scores"].append(1.0 if right else 0.0)
        return group, []


if __name__ == "__main__":
    SumsEnv.cli()
