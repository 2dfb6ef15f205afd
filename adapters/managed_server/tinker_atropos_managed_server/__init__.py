"""The `managed_server` adapter: conversations in their exact tokens, in sessions of our own and behind HTTP."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from tinker_atropos import AdapterConfig, AdapterSpec, SessionFactory, hookimpl
from tinker_atropos.external import EndpointSettings, PolicyEndpoint, PolicySource

from tinker_atropos_managed_server.template_variables import RESERVED, is_literal, is_variable


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
    tool_parser: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template shows"
    )
    journal_tokens: int = Field(
        16_000_000,
        ge=0,
        description="about how many tokens (4 bytes each) the endpoints remember of what was sampled; oldest out first",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted((RESERVED | {"enable_thinking"}) & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} can't be set here: the session sets it, or it has a key of its own")
        for name, given in value.items():
            if not is_variable(name):
                raise ValueError(
                    f"{name!r} is no name of a Jinja variable; use letters, digits and _, and none of Jinja's words"
                )
            if not is_literal(given):
                raise ValueError(
                    f"{name} is {given!r:.80}, which a template can't be given; use text, a finite number, true, "
                    "false, null, or lists and mappings of them"
                )
        return value


def make(config: ManagedServerConfig) -> SessionFactory:
    """Return the factory of sessions; raises `ConfigError` if the template file can't be read."""
    from tinker_atropos_managed_server.session import ManagedSessions

    return ManagedSessions(config)


def serve_policy(
    config: ManagedServerConfig, source: PolicySource, settings: EndpointSettings
) -> AbstractAsyncContextManager[PolicyEndpoint]:
    """Serve the newest policy over HTTP until the block ends; raises `ConfigError` for an address it can't have."""
    from tinker_atropos_managed_server.endpoint import serve_policy

    return serve_policy(config, source, settings)


@hookimpl
def adapter_spec() -> AdapterSpec:
    """Describe this adapter."""
    return AdapterSpec(
        name="managed_server",
        make=make,
        config=ManagedServerConfig,
        sessions=True,
        endpoint=serve_policy,
        description="Keeps each conversation in the exact tokens that were sampled; serves policies over HTTP",
    )
