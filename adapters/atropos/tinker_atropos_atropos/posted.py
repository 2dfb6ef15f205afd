"""Groups as environments post them: decoded, checked, named where they are wrong. It knows neither queue nor run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Label: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]

LARGEST = 3.4028234663852886e38
"""Of a float32, which trainers compute with."""
WHOLE = 4 * 1024 * 1024
"""Bytes up to which a group is decoded in one go; beyond, row by row, so that other threads get their turn."""

_LENIENT = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(rb"-?Infinity|NaN")
_KEY = re.compile(rb'"([^"\\]{1,80})"\s*:')


class Posted(msgspec.Struct, gc=False):
    """One group, with the fields of atroposlib's `ScoredData`; lists are `[sequence][position]`."""

    tokens: list[list[TokenId]]
    masks: list[list[Label]]
    scores: list[float | bool]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[Label]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


FIELDS = Posted.__struct_fields__
_WHOLE = msgspec.json.Decoder(Posted)
_RAWS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Posted)}
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in _TYPES.items()}
_ROWS: dict[str, msgspec.json.Decoder[Any]] = {
    "tokens": msgspec.json.Decoder(list[TokenId]),
    "masks": msgspec.json.Decoder(list[Label]),
    "advantages": msgspec.json.Decoder(list[float]),
    "ref_logprobs": msgspec.json.Decoder(list[float]),
    "inference_logprobs": msgspec.json.Decoder(list[float]),
    "messages": msgspec.json.Decoder(list[dict[str, Any]]),
    "distill_token_ids": msgspec.json.Decoder(list[list[Label]]),
    "distill_logprobs": msgspec.json.Decoder(list[list[float]]),
}
_NULLS = {name: f'"{name}":null'.encode() for name in FIELDS}
_KEYS = {name: f'"{name}":'.encode() for name in FIELDS}


class Refused(ValueError):
    """A group that can't be taken. `place` leads to the value, from the body's top down."""

    def __init__(self, place: Sequence[str | int], message: str, kind: str = "value_error") -> None:
        self.place = tuple(place)
        self.message = message
        self.kind = kind
        super().__init__(f"{path_text(self.place)}: {message}")


def path_text(place: Sequence[str | int]) -> str:
    """Return a place as text, such as `masks[3][17]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "body"


@dataclass(frozen=True, slots=True)
class Arrived:
    """A checked group and the JSON it came as, `body`; `digest` names its content."""

    posted: Posted
    body: bytes
    digest: str

    @property
    def sequences(self) -> int:
        """How many sequences it holds."""
        return len(self.posted.tokens)


def read_group(body: bytes, place: tuple[str | int, ...] = ()) -> Arrived:
    """Return the group that JSON `body` holds; raises `Refused` with the place of the first thing wrong."""
    posted = _decode(body, place)
    _check(posted, place)
    return Arrived(posted, body, hashlib.sha256(body).hexdigest()[:32])


def read_groups(body: bytes) -> list[Arrived]:
    """Return the groups of a JSON list; all are sound, or `Refused` is raised."""
    try:
        raws = _RAW_LIST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _name_group(body)
        raise refusal(error, body, ()) from error
    return [read_group(bytes(raw), (index,)) for index, raw in enumerate(raws)]


def _name_group(body: bytes) -> None:
    """Raise `Refused` for the first group of a broken list, which the list's own decoder can't tell by number."""
    text = body.decode("latin-1")  # a character a byte
    at, index = _after(text, text.find("[") + 1), 0
    while at < len(text) and text[at] == "{":
        try:
            _, end = _LENIENT.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = len(text)
        read_group(body[at:end], (index,))
        at = _after(text, end)
        if text[at : at + 1] != ",":
            return
        at, index = _after(text, at + 1), index + 1


def _after(text: str, at: int) -> int:
    """Return the place of the next character that is no blank."""
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def normal_form(body: bytes) -> bytes:
    """Return the JSON of a checked group with all of its fields and none besides, as `GET /batch` sends it.

    The values are spliced, never written anew: a number comes out digit by digit as it came in.
    """
    try:
        raws = _RAWS.decode(body)
    except msgspec.DecodeError:  # only in a field that the check passes over, such as a key that is no UTF-8
        return msgspec.json.encode(_WHOLE.decode(body))
    return b"".join(
        (
            b"{",
            b",".join(_KEYS[name] + bytes(raws[name]) if name in raws else _NULLS[name] for name in FIELDS),
            b"}",
        )
    )


def read_small(body: bytes, kind: type[T]) -> T:
    """Return a small document, lenient as atroposlib's own API is: `"32"` passes for 32."""
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, body, ()) from error


def decode_group(body: bytes) -> Posted:
    """Return a group that was checked before."""
    return _WHOLE.decode(body)


def _decode(body: bytes, place: tuple[str | int, ...]) -> Posted:
    try:
        if len(body) <= WHOLE:
            return _WHOLE.decode(body)
        raws = _RAWS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, body, place) from error
    values = {name: _decode_field(name, raws[name], place) for name in FIELDS if name in raws}
    for name in ("tokens", "masks", "scores"):
        if name not in values:
            raise Refused((*place, name), "this field is missing", "missing")
    return Posted(**values)


def _decode_field(name: str, raw: msgspec.Raw, place: tuple[str | int, ...]) -> Any:
    whole = bytes(raw)
    if name not in _ROWS or not whole.startswith(b"["):
        return _guarded(_DECODERS[name].decode, whole, (*place, name))
    rows: list[msgspec.Raw] = _guarded(_RAW_LIST.decode, whole, (*place, name))
    decode = _ROWS[name].decode
    return [_guarded(decode, bytes(row), (*place, name, index)) for index, row in enumerate(rows)]


def _guarded(decode: Callable[[bytes], Any], body: bytes, place: tuple[str | int, ...]) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, body, place) from error


def refusal(error: Exception, body: bytes, place: tuple[str | int, ...]) -> Refused:
    """Say where and why JSON can't be read; NaN and Infinity, which JSON has not, are named where they stand."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        message, _, at = text.partition(" - at `")
        where = [
            int(number) if number else name
            for name, number in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", at)
            if number != "..."
        ]
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            return Refused((*place, *where, missing[1]), "this field is missing", "missing")
        if "out of range" in message.lower():
            message += "; a number must be finite"
        return Refused((*place, *where), _lower(message).replace("`", ""), "type_error")
    if isinstance(error, RecursionError):
        return Refused(place, "is nested too deeply")
    found = re.search(r"byte (\d+)", text)
    at_byte = int(found[1]) if found else 0
    number = _NUMBER.match(body, max(at_byte - 1, 0)) or _NUMBER.match(body, at_byte)
    if number:
        where = _place_of(body, number.start())
        return Refused((*place, *where), f"{number[0].decode()} is not a finite number", "finite_number")
    return Refused(place, f"is not valid JSON: {_lower(text)}", "json_invalid")


def _place_of(body: bytes, at: int) -> list[str | int]:
    """Return the key before a byte, and the indices in the lists between."""
    key = None
    for key in _KEY.finditer(body, max(0, body.rfind(b'":', 0, at) - 100), at):  # noqa: B007
        pass
    if key is None:
        return []
    between = body[key.end() : at]
    name = key[1].decode("utf-8", "replace")
    if b"[" not in between:
        return [name]
    if between.count(b"[") == 1:
        return [name, between.count(b",")]
    return [name, between.count(b"]"), between[between.rfind(b"[") :].count(b",")]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _check(posted: Posted, place: tuple[str | int, ...]) -> None:
    tokens = posted.tokens
    count = len(tokens)
    if count == 0:
        raise Refused((*place, "tokens"), "a group needs at least one sequence", "too_short")
    for index, row in enumerate(tokens):
        if not row:
            raise Refused((*place, "tokens", index), "a sequence needs at least one token", "too_short")
    lengths = [len(row) for row in tokens]
    _check_rows(posted.masks, lengths, (*place, "masks"))
    if len(posted.scores) != count:
        raise Refused((*place, "scores"), f"{len(posted.scores)} scores for {count} sequences")
    _check_finite(posted.scores, (*place, "scores"))
    _check_messages(posted, count, place)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        rows: list[list[float]] | None = getattr(posted, name)
        if rows:  # atroposlib posts [] for none
            if name == "advantages":
                _check_advantages(posted, rows, lengths, place)
            else:
                _check_rows(rows, lengths, (*place, name))
            for index, values in enumerate(rows):
                _check_finite(values, (*place, name, index))
    if posted.overrides and len(posted.overrides) > count:
        raise Refused((*place, "overrides"), f"{len(posted.overrides)} entries for {count} sequences")
    if posted.env_id is not None and not 0 <= posted.env_id < 2**31:
        raise Refused((*place, "env_id"), f"{posted.env_id} is no number that /register-env gave")
    _check_distillation(posted, lengths, place)


def _check_rows(rows: Sequence[Sequence[Any]], lengths: list[int], place: tuple[str | int, ...]) -> None:
    if len(rows) != len(lengths):
        raise Refused(place, f"{len(rows)} rows for {len(lengths)} sequences")
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise Refused((*place, index), f"{len(row)} values for {length} tokens")


def _check_advantages(
    posted: Posted, rows: list[list[float]], lengths: list[int], place: tuple[str | int, ...]
) -> None:
    """One advantage a token. atroposlib's own tests post one a message too, and any number for supervised data."""
    if len(rows) != len(lengths):
        raise Refused((*place, "advantages"), f"{len(rows)} rows for {len(lengths)} sequences")
    if (posted.group_overrides or {}).get("sft"):
        return
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        turns = len(posted.messages[index]) if posted.messages else length
        if len(row) not in (length, turns):
            also = f" or {turns} messages" if turns != length else ""
            raise Refused((*place, "advantages", index), f"{len(row)} values for {length} tokens{also}")


def _check_finite(values: Sequence[float], place: tuple[str | int, ...]) -> None:
    if sum(map(abs, values)) <= LARGEST:
        return
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise Refused((*place, index), f"{value} is not a finite number", "finite_number")
        if abs(value) > LARGEST:
            raise Refused(
                (*place, index), f"{value} is beyond float32; give a number within ±3.4028234e38", "finite_number"
            )


def _check_messages(posted: Posted, count: int, place: tuple[str | int, ...]) -> None:
    if not posted.messages:
        return
    if len(posted.messages) != count:
        raise Refused((*place, "messages"), f"{len(posted.messages)} conversations for {count} sequences")
    for index, conversation in enumerate(posted.messages):
        for turn, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                raise Refused(
                    (*place, "messages", index, turn), "a message must have 'role' and 'content' fields", "missing"
                )


def _check_distillation(posted: Posted, lengths: list[int], place: tuple[str | int, ...]) -> None:
    ids, logprobs = posted.distill_token_ids or None, posted.distill_logprobs or None
    if ids is None and logprobs is None:
        return
    if ids is None or logprobs is None:
        given, absent = (
            ("distill_token_ids", "distill_logprobs") if logprobs is None else ("distill_logprobs", "distill_token_ids")
        )
        raise Refused((*place, absent), f"is missing beside {given}", "missing")
    _check_rows(ids, lengths, (*place, "distill_token_ids"))
    _check_rows(logprobs, lengths, (*place, "distill_logprobs"))
    for index, (id_rows, logprob_rows) in enumerate(zip(ids, logprobs, strict=True)):
        for at, (one, other) in enumerate(zip(id_rows, logprob_rows, strict=True)):
            if len(one) != len(other):
                raise Refused((*place, "distill_logprobs", index, at), f"{len(other)} values for {len(one)} token ids")
            _check_finite(other, (*place, "distill_logprobs", index, at))
