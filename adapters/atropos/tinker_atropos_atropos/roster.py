"""Who takes part: the trainer as it registered, the environments with their weights and shares. It holds no data."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tinker_atropos_atropos.posted import Refused
from tinker_atropos_atropos.selection import minimums, possible

MIN_ENV_WEIGHT = 0.01
"""The least share of workers that an environment is told to use; the original's."""
MAX_BATCH = 1_000_000
SILENCE = 60.0
"""Seconds without a poll or a group after which an environment counts no more; atroposlib's never say farewell."""
MAX_ENVIRONMENTS = 1000

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
    """The registered trainer and environments. One that has been silent for `silence` seconds counts no more until it
    is `heard` again; of those the oldest are forgotten beyond `MAX_ENVIRONMENTS`.
    """

    def __init__(self, silence: float = SILENCE, clock: Callable[[], float] = time.monotonic) -> None:
        self.registration: Registration | None = None
        self._silence = silence
        self._clock = clock
        self._by_number: dict[int, Environment] = {}
        self._heard: dict[int, float] = {}
        self._names: dict[str, int] = {}
        self._next = 0

    @property
    def environments(self) -> list[Environment]:
        """All that are known, live or not, oldest first."""
        return list(self._by_number.values())

    def heard(self, number: int) -> None:
        """Note that an environment has polled or posted."""
        if number in self._by_number:
            self._heard[number] = self._clock()

    def live(self) -> list[Environment]:
        """Return the environments that count: connected, and not silent for long."""
        since = self._clock() - self._silence
        return [e for e in self._by_number.values() if e.connected and self._heard[e.number] >= since]

    def register(self, registration: Registration) -> int:
        """Take a trainer; a newer one takes an older one's place. Returns a number that is its own."""
        self.registration = registration
        return uuid.uuid4().int

    def reset(self) -> None:
        """Forget the trainer and every environment."""
        self.registration = None
        self._by_number, self._heard, self._names, self._next = {}, {}, {}, 0

    def restore(self, registration: Registration | None, environments: list[Environment]) -> None:
        """Continue with what an earlier process knew."""
        self.registration = registration
        self._by_number = {environment.number: environment for environment in environments}
        self._next = max(self._by_number, default=-1) + 1
        self._heard = dict.fromkeys(self._by_number, self._clock())
        # The newest of a name has its highest number, also where older ones were forgotten.
        self._names = {e.desired_name: int(e.real_name.rpartition("_")[2]) + 1 for e in environments}

    def find(self, number: int) -> Environment | None:
        """Return the environment of that number, if there is one."""
        return self._by_number.get(number)

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
        others = [environment.group_size for environment in self.live()]
        if not possible([*others, size], batch, using=size):
            below, above = batch // size * size, -(-batch // size) * size
            raise Refused(
                ("group_size",),
                f"groups of {size}{_beside(others)} never sum to a batch of {batch}; use a group_size that divides "
                f"{batch}, or register the trainer with a batch_size of {below} or {above}",
            )

    def admit(self, asked: RegisterEnv) -> Environment:
        """Add an environment and return it; raises `Refused` where as many as there may be are live."""
        if len(self._by_number) >= MAX_ENVIRONMENTS:
            self._forget_one()
        name = asked.desired_name or "env"
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        environment = Environment(
            number=self._next,
            desired_name=name,
            real_name=f"{name}_{count}",
            max_context_len=asked.max_token_length,
            weight=1.0 if asked.weight is None else float(asked.weight),
            group_size=asked.group_size,
            min_batch_allocation=asked.min_batch_allocation,
        )
        self._next += 1
        self._by_number[environment.number] = environment
        self._heard[environment.number] = self._clock()
        return environment

    def _forget_one(self) -> None:
        live = {environment.number for environment in self.live()}
        silent = next((number for number in self._by_number if number not in live), None)
        if silent is None:
            raise Refused(("desired_name",), f"{MAX_ENVIRONMENTS} environments take part, and no more may; end some")
        gone = self._by_number.pop(silent)
        del self._heard[silent]
        if all(other.desired_name != gone.desired_name for other in self._by_number.values()):
            self._names.pop(gone.desired_name)

    def owed(self) -> dict[int, int]:
        """Return how many sequences of a batch each live environment with a minimum is owed."""
        assert self.registration is not None
        shares = {e.number: e.min_batch_allocation for e in self.live() if e.min_batch_allocation}
        return minimums(shares, self.registration.batch_size) if shares else {}

    def status(self, environment: Environment, load: Load, step: int) -> dict[str, Any]:
        """Return the answer to /status-env."""
        total = sum(e.max_context_len * e.weight for e in self.live())
        own = environment.max_context_len * environment.weight
        size = max(environment.group_size, load.largest_own)
        owed = self.owed() if self.registration is not None else {}
        others = sum(
            max(0, count - (owed.get(number, 0) if number is not None else 0)) for number, count in load.others.items()
        )
        allocated = sum(e.min_batch_allocation or 0.0 for e in self.live())
        return {
            "current_step": step,
            "queue_size": (load.own + others) // size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": load.own // size,
            "max_group_size": max(1, load.largest),
            "env_weight": max(MIN_ENV_WEIGHT, own / total) if total > 0 else MIN_ENV_WEIGHT,
        }


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
