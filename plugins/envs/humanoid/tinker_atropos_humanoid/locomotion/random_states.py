"""One random generator for each simulation, seeded as Gymnasium seeds them; its state as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray
from tinker_atropos.errors import RunError

_WORD = (1 << 64) - 1
WORDS = 6


class RandomStates:
    """The generators of N simulations: `generators[i]` draws the initial states of simulation i."""

    def __init__(self, count: int) -> None:
        drawn = [seeding.np_random() for _ in range(count)]
        self.generators: list[np.random.Generator] = [generator for generator, _ in drawn]
        self.seeds: list[int] = [seed for _, seed in drawn]

    def seed(self, seed: int | Sequence[int | None] | None, mask: NDArray[np.bool_] | None = None) -> None:
        """Seed simulation i with `seed + i`, or with `seed[i]`; None goes on with its generator. `mask`: only those."""
        if seed is None:
            return
        count = len(self.generators)
        seeds = [seed + i for i in range(count)] if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != count:
            raise RunError(f"seed has {len(seeds)} numbers for {count} simulations; give one each, or a single number")
        for i, number in enumerate(seeds):
            if number is not None and (mask is None or mask[i]):
                self.generators[i], self.seeds[i] = seeding.np_random(int(number))

    def draw(
        self, rows: NDArray[np.intp], sizes: tuple[int, int], scale: float, velocities: Literal["uniform", "normal"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draw the noise on positions, then on velocities, as Gymnasium's resets do: [K, nq] and [K, nv]."""
        positions, speeds = (np.empty((len(rows), size)) for size in sizes)
        for place, row in enumerate(rows.tolist()):
            generator = self.generators[row]
            positions[place] = generator.uniform(-scale, scale, sizes[0])
            if velocities == "uniform":
                speeds[place] = generator.uniform(-scale, scale, sizes[1])
            else:
                speeds[place] = scale * generator.standard_normal(sizes[1])
        return positions, speeds

    def snapshot(self) -> NDArray[np.uint64]:
        """Return the states of the generators, uint64[N, 6]."""
        words = np.zeros((len(self.generators), WORDS), np.uint64)
        for row, generator in zip(words, self.generators, strict=True):
            bits: dict[str, Any] = dict(generator.bit_generator.state)
            state, increment = bits["state"]["state"], bits["state"]["inc"]
            row[:] = (
                state & _WORD,
                state >> 64,
                increment & _WORD,
                increment >> 64,
                bits["has_uint32"],
                bits["uinteger"],
            )
        return words

    def restore(self, words: NDArray[np.uint64]) -> None:
        """Continue from what `snapshot` returned; the seeds are unknown (-1) from then on."""
        for i, row in enumerate(words.tolist()):
            bits = np.random.PCG64()
            bits.state = {
                "bit_generator": "PCG64",
                "state": {"state": row[0] | row[1] << 64, "inc": row[2] | row[3] << 64},
                "has_uint32": row[4],
                "uinteger": row[5],
            }
            self.generators[i] = np.random.Generator(bits)
            self.seeds[i] = -1
