"""`make conformance`: tinker-cookbook's own simple loops, unchanged, against the local Tinker server.

Installs tinker-cookbook 0.6.1 from the package index into a folder of its own and runs its `rl_loop` and `sl_loop`
for a few steps on a tiny random model. Replaced is only what can't be had without a hub: the two data sets (by a few
rows made here), the choice of a renderer (by the cookbook's plain one), and the reward (a random model never solves a
problem).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COOKBOOK = "tinker-cookbook==0.6.1"
NEEDS = (
    "chz==0.4.0",
    "blobfile==3.3.0",
    "pylatexenc==2.11",
    "pycryptodomex==3.24.2",
    "lxml==6.1.3",
)  # what it imports beyond this project's own
STEPS = 4


def install(target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), COOKBOOK, *NEEDS], check=True)


def stand_in(name: str, *arguments: Any, **settings: Any) -> Any:
    """What the loops' data sets look like, a few rows of each."""
    import datasets

    sums = [(f"What is {a} plus {b}?", str(a + b)) for a in range(8) for b in range(8)]
    if "gsm8k" in name:
        rows = datasets.Dataset.from_list([{"question": q, "answer": f"#### {a}"} for q, a in sums])
    else:
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
        rows = datasets.Dataset.from_list([{"messages": chat} for chat in chats])
    return datasets.DatasetDict({"train": rows, "test": rows})


def run_loop(which: str, folder: Path) -> None:
    """Run one loop in this process; raises what it raises."""
    import datasets
    from tinker_atropos_local_tinker import start_local_server
    from tinker_atropos_local_tinker.tiny_model import write_tiny_model

    datasets.load_dataset = stand_in
    from tinker_cookbook import model_info
    from tinker_cookbook.recipes import rl_loop, sl_loop

    model_info.get_recommended_renderer_name = lambda name: "role_colon"
    rl_loop.get_reward = lambda response, answer: float(len(response) % 2)
    model = str(write_tiny_model(folder / "tiny", context=1024))
    log = folder / "log"
    with start_local_server(folder / "store", model=model, threads=1, log=folder / "server.log") as server:
        shared: dict[str, Any] = {
            **{"base_url": server.url, "log_path": str(log), "model_name": model, "batch_size": 8},
            **{"max_steps": STEPS, "save_every": 2, "lora_rank": 8},
        }
        if which == "rl_loop":
            loop = {"group_size": 4, "max_tokens": 24, "loss_fn": "importance_sampling"}
            rl_loop.main(rl_loop.Config(**shared, **loop))
        else:
            sl_loop.main(sl_loop.Config(**shared, max_length=512, learning_rate=1e-3))
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert len(lines) >= STEPS, f"{len(lines)} lines of metrics"
    assert saved[-1]["name"] == "final", saved
    print(f"ok   {which}: {len(lines)} steps, checkpoints {', '.join(entry['name'] for entry in saved)}")


def main() -> int:
    if len(sys.argv) == 3:
        run_loop(sys.argv[1], Path(sys.argv[2]))
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary) / "site"
        install(site)
        environment = os.environ | {
            **{"PYTHONPATH": str(site), "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
            **{"OMP_NUM_THREADS": "1"},
        }
        for which in ("rl_loop", "sl_loop"):
            folder = Path(temporary) / which
            folder.mkdir()
            command = [sys.executable, str(Path(__file__).resolve()), which, str(folder)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            print(
                done.stdout.splitlines()[-1] if done.returncode == 0 else f"FAIL {which}\n{done.stderr[-3000:]}",
                flush=True,
            )
            failed |= done.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
