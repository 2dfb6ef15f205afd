"""Environment steps a second of Humanoid-v5 with 16 simulations on all cores: ours beside the limit and the peers.

The limit is MuJoCo itself: the states and actions of such a run, five `mj_step` each, in one native call on all threads
that returns when all are done. It reads nothing, resets nothing and waits for no slowest simulation. It uses one MjData
per thread, which is quicker than one per simulation as long as nothing is read.

One process, bursts in turn, medians; ratios are medians of the ratios within a round. A round counts if the limit got
all cores to itself (95 % of their time) at its beginning and at its end: on a busy machine, whoever has the most
processes or spins while it waits would look best. Steps that only reset (EnvPool) don't count.

Actions are uniform: bodies fall after about 24 steps, and two thirds of the steps are without a contact. `--fallen`
goes on after the fall, with contacts in nearly all of them.

Then where our own time goes, and what a training with `configs/humanoid.yaml` reaches in the schedules `sync` and
`async`: environment steps over wall time, learning included (medians over its updates).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SIMULATIONS, FRAME_SKIP, CYCLE = 16, 5, 256
CONFIGURATION = Path(__file__).resolve().parent.parent / "configs" / "humanoid.yaml"
WARM_UP = 3  # updates of a training
UNDISTURBED = 0.95
WITHOUT: dict[str, Any] = {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0}
LIMIT, OURS, LEAN = "mj_step, all cores (limit)", "ours", "ours without cfrc_ext"
SYNC, ASYNC, ENVPOOL = "Gymnasium SyncVectorEnv", "Gymnasium AsyncVectorEnv", "EnvPool"
TARGETS = (
    (OURS, LIMIT, 0.82),
    (OURS, ASYNC, 2.0),
    (OURS, ENVPOOL, 1.08),
    (LEAN, LIMIT, 0.88),
    (LEAN, ASYNC, 2.2),
    (LEAN, ENVPOOL, 1.2),
)
Steps = Callable[[], int]
"""Steps all simulations once; returns how many environment steps that was."""


def actions() -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.4, 0.4, (CYCLE, SIMULATIONS, 17)).astype(np.float32)


def stepper(env: Any, given: np.ndarray) -> Steps:
    env.reset(seed=0)
    place = iter(range(10**9))

    def steps() -> int:
        env.step(given[next(place) % CYCLE])
        return SIMULATIONS

    return steps


def envpool_stepper(given: np.ndarray, threads: int, fallen: bool) -> Steps:
    import envpool

    env = envpool.make(
        "Humanoid-v5",
        env_type="gymnasium",
        num_envs=SIMULATIONS,
        num_threads=threads,
        seed=0,
        terminate_when_unhealthy=not fallen,
    )
    env.reset()
    place, resetting = iter(range(10**9)), 0

    def steps() -> int:
        nonlocal resetting
        useful = SIMULATIONS - resetting
        _, _, terminated, truncated, _ = env.step(given[next(place) % CYCLE].astype(np.float64))
        resetting = int((terminated | truncated).sum())
        return useful

    return steps


def limit(env: Any, given: np.ndarray, threads: int, rows: int) -> Steps:
    """Return what steps `rows` recorded states of 16 simulations in one native call."""
    from mujoco.batch import Batch

    env.reset(seed=1)
    recorded = []
    for place in range(50 + rows):
        env.simulations.ctrl[...] = given[place % CYCLE]
        if place >= 50:
            recorded.append(env.simulations.state())
        env.step(given[place % CYCLE])
    states = np.concatenate(recorded)
    batch = Batch(env.simulations.model, len(states), threads)
    batch.reset(stage=0)

    def steps() -> int:
        batch.state[...] = states
        batch.step(nstep=FRAME_SKIP)
        return len(states)

    return steps


def contenders(threads: int, fallen: bool, rows: int) -> dict[str, Steps]:
    import gymnasium
    from tinker_atropos_humanoid.locomotion import make_locomotion

    given = actions()
    common: dict[str, Any] = {"terminate_when_unhealthy": not fallen}
    ours = {"num_envs": SIMULATIONS, "threads": threads, **common}
    peers = {"num_envs": SIMULATIONS, "vector_kwargs": {"autoreset_mode": "SameStep"}, **common}
    made = {
        LIMIT: limit(make_locomotion("Humanoid-v5", **ours), given, threads, rows),
        OURS: stepper(make_locomotion("Humanoid-v5", **ours), given),
        LEAN: stepper(make_locomotion("Humanoid-v5", **ours, **WITHOUT), given),
        SYNC: stepper(gymnasium.make_vec("Humanoid-v5", vectorization_mode="sync", **peers), given),
        ASYNC: stepper(gymnasium.make_vec("Humanoid-v5", vectorization_mode="async", **peers), given),
    }
    if importlib.util.find_spec("envpool") is None:
        print("EnvPool is not installed (`pip install envpool`): its row is left out")
    else:
        made[ENVPOOL] = envpool_stepper(given, threads, fallen)
    return made


def rate(steps: Steps, calls: int) -> float:
    start = time.perf_counter()
    done = sum(steps() for _ in range(calls))
    return done / (time.perf_counter() - start)


def limit_and_share(steps: Steps, threads: int) -> tuple[float, float]:
    """Return the limit's rate, and the share of the cores' time that it got."""
    wall, used = time.perf_counter(), time.process_time()
    done = steps()
    wall, used = time.perf_counter() - wall, time.process_time() - used
    return done / wall, used / wall / threads


def where_time_goes(threads: int, fallen: bool, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """Return the share of each part of a step, measured in the methods that do it."""
    from tinker_atropos_humanoid.locomotion import make_locomotion

    env = make_locomotion(
        "Humanoid-v5", num_envs=SIMULATIONS, threads=threads, terminate_when_unhealthy=not fallen, **settings
    )
    took: dict[str, float] = {}
    within: list[float] = []  # of each part that is being measured: what parts inside it took

    def measure(owner: Any, method: str, part: str) -> None:
        work = getattr(owner, method)

        def measured(*values: Any) -> Any:
            within.append(0.0)
            began = time.perf_counter()
            result = work(*values)
            whole = time.perf_counter() - began
            took[part] = took.get(part, 0.0) + whole - within.pop()
            if within:
                within[-1] += whole
            return result

        setattr(owner, method, measured)

    given = actions()
    step = stepper(env, given)
    for _ in range(100):
        step()
    parts: dict[str, tuple[tuple[Any, str], ...]] = {
        "mj_step in C": ((env.simulations, "step"),),
        "cfrc_ext": ((env.simulations, "_compute_forces"),),
        "resets with mj_forward": ((env, "_restart"),),
        "observation": ((env._observer, "write"), (env._observer, "refresh"), (env, "_given_out")),
        "reward and terms": (
            *((env._rewarder, name) for name in ("healthy", "step_terms", "state_terms")),
            (env._tracker, "positions"),
        ),
        "infos": ((env, "_infos"),),
        "search for NaN": ((env, "_faulty"),),
        "all else": ((env, "step"),),
    }
    for part, methods in parts.items():
        for owner, method in methods:
            measure(owner, method, part)
    for _ in range(steps):
        step()
    return {part: took.get(part, 0.0) / sum(took.values()) for part in parts}


def while_training(schedule: str, updates: int) -> tuple[float, float]:
    """Return environment steps a second of a training, and the share of its time that the trainer was busy."""
    from tinker_atropos.config import load
    from tinker_atropos.progress import PlainProgress
    from tinker_atropos.run import run

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run.output": folder,
            "run.name": schedule,
            "env.steps_per_eval": 0,
            "env.total_steps": updates,
            "torch_ppo.total_env_steps": None,
            "torch_ppo.schedule": schedule,
            "torch_ppo.save_checkpoint_interval": 0,
        }
        config = load(CONFIGURATION, [(path, value, path) for path, value in settings.items()])
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            asyncio.run(run(config, PlainProgress()))
        rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return median(row["env_steps/per_second"] for row in rows), median(row["trainer/busy"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tries", type=int, default=20, help="rounds tried for each that is wanted")
    parser.add_argument("--burst", type=int, default=40, help="steps of all simulations in a burst")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fallen", action="store_true", help="go on after a fall: bodies on the ground, many contacts")
    parser.add_argument("--updates", type=int, default=20, help="of the trainings; 0: none")
    options = parser.parse_args()

    made = contenders(options.threads, options.fallen, options.burst)
    rates: dict[str, list[float]] = {name: [] for name in made}
    peers = [name for name in made if name != LIMIT]
    for name in peers:  # warm up, until the episodes are out of step
        rate(made[name], 100)
    limit_and_share(made[LIMIT], options.threads)
    undisturbed, tried = 0, 0
    while undisturbed < options.rounds and tried < options.tries * options.rounds:
        tried += 1
        first, share = limit_and_share(made[LIMIT], options.threads)
        if share < UNDISTURBED:
            time.sleep(0.5)
            continue
        burst = {name: rate(made[name], options.burst) for name in (peers if tried % 2 else peers[::-1])}
        last, share = limit_and_share(made[LIMIT], options.threads)
        if share < UNDISTURBED:
            continue
        undisturbed += 1
        for name, value in {**burst, LIMIT: (first + last) / 2}.items():
            rates[name].append(value)
    if not undisturbed:
        raise SystemExit(f"no undisturbed round in {tried}: something else uses the cores; stop it, or try again later")

    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    print(f"{SIMULATIONS} simulations, {options.threads} threads, {undisturbed} undisturbed rounds of {tried}")
    for name, values in rates.items():
        print(f"{name:28} {median(values):8.0f} steps/s  {ratio(name, LIMIT):5.2f} of the limit")
    missed = 0
    for one, other, target in TARGETS:
        if other in rates:
            met = ratio(one, other)
            missed += met < target
            print(f"{one} / {other}: {met:.2f} (target {target}: {'met' if met >= target else 'MISSED'})")
    for name, settings in ((OURS, {}), (LEAN, WITHOUT)):
        shares = where_time_goes(options.threads, options.fallen, 10 * options.burst, settings)
        print(f"where the time goes, {name}: " + ", ".join(f"{part} {share:.1%}" for part, share in shares.items()))
    if options.updates <= WARM_UP or importlib.util.find_spec("torch") is None:
        print("no training was asked for, or torch is not installed: its rows are left out")
        return 1 if missed else 0
    for schedule in ("sync", "async"):
        steps, busy = while_training(schedule, options.updates)
        print(f"ours while PPO trains, {schedule:5}  {steps:8.0f} steps/s  trainer busy {busy:.0%}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
