"""The environment `humanoid`, unchanged, that also writes down every episode with its return in Humanoid-v4's reward.

    TINKER_ATROPOS_EPISODES=FOLDER tinker-atropos run -c configs/humanoid.yaml --env benchmarks/recorded_humanoid.py:env

Published results are often of v4. Its reward leaves out the contact cost that v5 subtracts, and it gives the healthy
reward also for the step that ends an episode by a fall (`gymnasium/envs/mujoco/humanoid_v4.py`), so for the same
movements: `v4 = v5 + contact cost + healthy reward of the fall`. Each vector environment that is made writes a file.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker_atropos import EnvironmentSpec
from tinker_atropos_humanoid.config import HumanoidConfig
from tinker_atropos_humanoid.locomotion.tasks import TASKS
from tinker_atropos_humanoid.locomotion.vector_env import LocomotionVectorEnv

FOLDER = "TINKER_ATROPOS_EPISODES"
COLUMNS = ("env_steps", "return_v5", "return_v4", "length")
_files = itertools.count()


class RecordedHumanoid(LocomotionVectorEnv):
    """Adds nothing to what it gives out; an episode's line has all simulations' steps so far in front."""

    def __init__(self, config: HumanoidConfig) -> None:
        super().__init__(TASKS["Humanoid-v5"], config, config)
        self._healthy_reward = config.healthy_reward
        self._sums = np.zeros((3, config.num_envs))  # v5, v4, length
        self._env_steps = 0
        folder = Path(os.environ[FOLDER])
        self._file = (folder / f"episodes-{os.getpid()}-{next(_files)}.csv").open("w", buffering=1)
        self._file.write(",".join(COLUMNS) + "\n")

    def step(self, actions: NDArray[Any]) -> Any:
        stepped = super().step(actions)
        _, rewards, terminated, truncated, infos = stepped
        ended = terminated | truncated
        costs = infos.get("reward_contact", 0.0) + infos.get("final_info", {}).get("reward_contact", 0.0)
        self._sums += rewards, rewards - costs + self._healthy_reward * terminated, np.ones(self.num_envs)
        self._env_steps += self.num_envs
        for n in np.flatnonzero(ended):
            v5, v4, length = self._sums[:, n]
            self._file.write(f"{self._env_steps},{v5:.4f},{v4:.4f},{length:.0f}\n")
        self._sums[:, ended] = 0.0
        return stepped

    def close_extras(self, **kwargs: Any) -> None:
        self._file.close()
        super().close_extras(**kwargs)


env = EnvironmentSpec(name="humanoid", kind="control", make=RecordedHumanoid, config=HumanoidConfig)
