"""Acts with an exported policy. Needs NumPy and nothing else; an export holds a copy of this file as `policy.py`.

from policy import load
act = load("policy.npz")
actions = act(observations)       # raw float[N, …] → float32[N, A] within the bounds, or int64[N]
"""

import json
from typing import Any

import numpy as np


def load(path: Any) -> Any:
    """Return `act(observations)`, the most likely action of each observation, as the environment takes it."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    if about["version"] != 1:
        raise ValueError(f"{path} has version {about['version']}, this file reads 1; export the policy again")
    shape, layers = about["shape"], range(about["layers"])

    def act(observations: Any) -> Any:
        observed = np.asarray(observations, np.float32)
        if list(observed.shape[1:]) != list(shape["observation"]):
            raise ValueError(f"observations of shape {observed.shape}; expected N of {shape['observation']}")
        x = np.clip(
            (observed.reshape(len(observed), -1) - arrays["mean"]) * arrays["scale"], -about["clip"], about["clip"]
        )
        for i in layers:
            if i > 0:
                x = np.tanh(x) if about["activation"] == "tanh" else np.maximum(x, 0)
            x = x @ arrays[f"weight{i}"] + arrays[f"bias{i}"]
        if shape["discrete"]:
            return x.argmax(axis=1) + shape["start"]
        return np.clip(x, np.float32(shape["low"]), np.float32(shape["high"]))

    return act
