"""What a request asks of the sampler, whatever dialect it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import ConfigError

from tinker_atropos_managed_server.answers import Refused
from tinker_atropos_managed_server.fields import Fields
from tinker_atropos_managed_server.session import Dialect
from tinker_atropos_managed_server.stops import Stops, parse_stop

MAX_TOKENS = 2**31 - 1
MAX_CHOICES = 1024
MAX_SAMPLES = 16_384  # of all prompts of a request
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 256

# Their names in the dialects; a request may use any, if they agree.
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """How to sample. `max_tokens` None: all the room there is. `stop` is in addition to the model's end of turn.

    `ignore_eos` turns the latter off. `keep_stop`: the text keeps its stop. `skip_specials`: the text has no special
    tokens.
    """

    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    keep_stop: bool = False
    skip_specials: bool = False

    def stops(self, dialect: Dialect) -> Stops:
        """Return the stop in the sampler's form; raises `Refused` for what can't be one."""
        if not self.stop:
            return parse_stop([] if self.ignore_eos else None, dialect.vocabulary, dialect.ends)
        ends = () if self.ignore_eos else dialect.ends
        try:
            return parse_stop([*self.stop, *ends], dialect.vocabulary, dialect.ends)
        except ConfigError as error:
            raise Refused(str(error), param="stop") from error


def read_sampling(fields: Fields, *, default_max_tokens: int | None, least_max_tokens: int = 1) -> SamplingRequest:
    """Take the sampling options out of `fields`.

    An absent `stop`, null and `[]` all keep the model's end of turn.
    """
    given = {name: fields.whole(name, least_max_tokens, MAX_TOKENS) for name in _MAX_TOKENS}
    limits = {value for value in given.values() if value is not None}
    if len(limits) > 1:
        raise Refused(f"max_tokens is given twice, as {given}; send it once", param="max_tokens")
    n = fields.whole("n", 1, MAX_CHOICES)
    best_of = fields.whole("best_of", 1, MAX_CHOICES)
    if best_of not in (None, 1, n):
        raise Refused(
            f"best_of={best_of} would choose among samples, which changes what is sampled; send n={best_of} instead",
            param="best_of",
            code="unsupported_parameter",
        )
    temperature = fields.number("temperature", 0, 100)
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise fields.wrong("top_p", top_p, "a number above 0 and up to 1, or temperature=0 for the likeliest token")
    top_k = fields.whole("top_k", -1, MAX_TOKENS)
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    return SamplingRequest(
        max_tokens=limits.pop() if limits else default_max_tokens,
        n=n or 1,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=-1 if top_k in (None, 0) else int(top_k or -1),
        seed=None if seed is None else seed & (2**63 - 1),
        stop=(*_stop(fields), *_stop_token_ids(fields)),
        ignore_eos=fields.flag("ignore_eos"),
        keep_stop=fields.flag("include_stop_str_in_output") | fields.flag("no_stop_trim"),
        skip_specials=fields.flag("skip_special_tokens"),
    )


def refuse_too_many(requests: Sequence[SamplingRequest]) -> None:
    """Raise `Refused` where the prompts of one request ask for more samples than it may."""
    samples = sum(request.n for request in requests)
    if samples > MAX_SAMPLES:
        raise Refused(
            f"{len(requests)} prompts with n up to {max(request.n for request in requests)} ask for {samples} samples; "
            f"send {MAX_SAMPLES} at most in one request",
            param="n",
        )


def _stop(fields: Fields) -> tuple[str | int, ...]:
    value = fields.take("stop")
    items: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for item in items:
        if not (type(item) is int or (isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARACTERS)):
            raise fields.wrong(
                "stop", value, f"text of up to {MAX_STOP_CHARACTERS} characters, a token id, or a list of either"
            )
    if len(items) > MAX_STOPS:
        raise Refused(f"stop has {len(items)} entries; send {MAX_STOPS} at most", param="stop")
    return tuple(items)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.sequence("stop_token_ids")
    if len(value) > MAX_STOPS or not all(type(item) is int for item in value):
        raise fields.wrong("stop_token_ids", value, f"a list of up to {MAX_STOPS} token ids")
    return tuple(value)
