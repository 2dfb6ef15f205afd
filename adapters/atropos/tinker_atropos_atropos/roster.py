"""Who takes part: the trainer as it registered, the environments with their weights and shares. It holds no data."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tinker_atropos_atropos.posted import Refused
from tinker_atropos_atropos.selection import minimums, possible

MIN_ENV_WEIGHT = 0.01
"""The least share of workers that an environment is told to use; the original's."""
MAX_BATCH = 1_000_000

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Registration(msgspec.Struct, frozen=True):
    """What a trainer says at /register."""

    wandb_group: str
    wandb_project: str
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    max_token_len: Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)]
    checkpoint_dir: str
    save_checkpoint_interval: Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)]
    starting_step: Count
    num_steps: Annotated[int, msgspec.Meta(ge=-1, lt=2**53)]


class RegisterEnv(msgspec.Struct, frozen=True):
    """What an environment says at /register-env. Without a name, as several upstream scripts come, it is `env`."""

    max_token_length: Count
    group_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    desired_name: str | None = None
    weight: float | None = None
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None


class EnvIdentifier(msgspec.Struct, frozen=True):
    """How an environment names itself."""

    env_id: int


class Environment(msgspec.Struct):
    """A registered environment; `number` is its `env_id`."""

    number: int
    desired_name: str
    real_name: str
    max_context_len: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    connected: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """What waits, in sequences, as an environment's status is told from it.

    `own` are its own, `others` those of every other environment by number (None: of none that said who it is);
    `largest` is the biggest group that waits, `largest_own` the environment's.
    """

    own: int
    others: dict[int | None, int]
    largest: int = 1
    largest_own: int = 1


class Roster:
    """The registered trainer and environments."""

    def __init__(self) -> None:
        self.registration: Registration | None = None
        self.environments: list[Environment] = []
        self._names: dict[str, int] = {}

    def register(self, registration: Registration) -> int:
        """Take a trainer; a newer one takes an older one's place. Returns a number that is its own."""
        self.registration = registration
        return uuid.uuid4().int

    def reset(self) -> None:
        """Forget the trainer and every environment."""
        self.registration = None
        self.environments = []
        self._names = {}

    def restore(self, registration: Registration | None, environments: list[Environment]) -> None:
        """Continue with what an earlier process knew."""
        self.registration = registration
        self.environments = environments
        self._names = {}
        for environment in environments:
            self._names[environment.desired_name] = self._names.get(environment.desired_name, 0) + 1

    def find(self, number: int) -> Environment | None:
        """Return the environment of that number, if there is one."""
        return self.environments[number] if 0 <= number < len(self.environments) else None

    def check_fit(self, asked: RegisterEnv) -> None:
        """Raise `Refused` if groups of that size can never complete a batch."""
        if asked.weight is not None and not (math.isfinite(asked.weight) and asked.weight >= 0):
            raise Refused(("weight",), f"{asked.weight} is no weight; give a finite number of 0 or more")
        assert self.registration is not None
        batch, size = self.registration.batch_size, asked.group_size
        if size > batch:
            raise Refused(
                ("group_size",),
                f"a group of {size} never fits a batch of {batch}; use a group_size of at most {batch}, or register "
                f"the trainer with a batch_size of at least {size}",
            )
        others = [environment.group_size for environment in self.environments if environment.connected]
        if not possible([*others, size], batch, using=size):
            below, above = batch // size * size, -(-batch // size) * size
            raise Refused(
                ("group_size",),
                f"groups of {size}{_beside(others)} never sum to a batch of {batch}; use a group_size that divides "
                f"{batch}, or register the trainer with a batch_size of {below} or {above}",
            )

    def admit(self, asked: RegisterEnv) -> Environment:
        """Add an environment and return it."""
        name = asked.desired_name or "env"
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        environment = Environment(
            number=len(self.environments),
            desired_name=name,
            real_name=f"{name}_{count}",
            max_context_len=asked.max_token_length,
            weight=1.0 if asked.weight is None else float(asked.weight),
            group_size=asked.group_size,
            min_batch_allocation=asked.min_batch_allocation,
        )
        self.environments.append(environment)
        return environment

    def owed(self) -> dict[int, int]:
        """Return how many sequences of a batch each connected environment with a minimum is owed."""
        assert self.registration is not None
        shares = {e.number: e.min_batch_allocation for e in self._connected() if e.min_batch_allocation}
        return minimums(shares, self.registration.batch_size) if shares else {}

    def status(self, environment: Environment, load: Load, step: int) -> dict[str, Any]:
        """Return the answer to /status-env."""
        total = sum(e.max_context_len * e.weight for e in self._connected())
        own = environment.max_context_len * environment.weight
        size = max(environment.group_size, load.largest_own)
        owed = self.owed() if self.registration is not None else {}
        others = sum(
            max(0, count - (owed.get(number, 0) if number is not None else 0)) for number, count in load.others.items()
        )
        allocated = sum(e.min_batch_allocation or 0.0 for e in self._connected())
        return {
            "current_step": step,
            "queue_size": (load.own + others) // size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": load.own // size,
            "max_group_size": max(1, load.largest),
            "env_weight": max(MIN_ENV_WEIGHT, own / total) if total > 0 else MIN_ENV_WEIGHT,
        }

    def _connected(self) -> list[Environment]:
        return [environment for environment in self.environments if environment.connected]


def admitted(environment: Environment, registration: Registration, step: int) -> dict[str, Any]:
    """Return the answer to /register-env that lets an environment begin."""
    return {
        "status": "success",
        "env_id": environment.number,
        "wandb_name": environment.real_name,
        "checkpoint_dir": registration.checkpoint_dir,
        "starting_step": step,
        "checkpoint_interval": registration.save_checkpoint_interval,
        "num_steps": registration.num_steps,
    }


def _beside(others: list[int]) -> str:
    return f", also beside groups of {', '.join(map(str, sorted(set(others))))}," if others else ""
