"""The `managed_server` adapter: one session per episode that keeps a conversation in its exact tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator
from tinker_atropos import AdapterConfig, AdapterSpec, SessionFactory, hookimpl

# What the session itself hands to the template; a variable of that name would be lost or collide.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "enable_thinking",
        "messages",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
    }
)


class ManagedServerConfig(AdapterConfig):
    """How conversations are rendered, and what else ends a turn."""

    chat_template: Path | None = Field(None, description="a Jinja chat template in place of the tokenizer's own")
    enable_thinking: bool | None = Field(
        None, description="passed to the chat template where it is set; null: the template's own default"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="further variables for the chat template"
    )
    end_of_turn: tuple[str | int, ...] = Field(
        (), description="special tokens or ids that end a turn, beside the tokenizer's own and the template's"
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_RESERVED & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} can't be set here: the session sets it, or it has a key of its own")
        return value


def make(config: ManagedServerConfig) -> SessionFactory:
    """Return the factory of sessions; raises `ConfigError` if the template file can't be read."""
    from tinker_atropos_managed_server.session import ManagedSessions

    return ManagedSessions(config)


@hookimpl
def adapter_spec() -> AdapterSpec:
    """Describe this adapter."""
    return AdapterSpec(
        name="managed_server",
        make=make,
        config=ManagedServerConfig,
        sessions=True,
        description="Keeps each conversation in the exact tokens that were sampled",
    )
