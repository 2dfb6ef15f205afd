"""What stands between rollout and trainer: items waiting, leased and consumed, fenced by the trainer's epoch."""

from __future__ import annotations

from tinker_atropos.state.memory import MemoryState
from tinker_atropos.state.open import open_state
from tinker_atropos.state.protocol import FencedOut, Item, Leased, Put, State, StateError, StoredItem

__all__ = ["FencedOut", "Item", "Leased", "MemoryState", "Put", "State", "StateError", "StoredItem", "open_state"]
