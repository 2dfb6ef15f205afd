"""Posted groups: what is wrong is named by field and sequence; what is sound comes out digit by digit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from tinker_atropos_atropos.bodies import BadBody, TooLarge, gunzip, gzipped
from tinker_atropos_atropos.posted import WHOLE, Refused, normal_form, read_group, read_groups

Make = Callable[..., dict[str, Any]]
NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"scores": [NAN, 0.0]}, "scores[0]: NaN"),
    ({"scores": [0.0, INF]}, "scores[1]: Infinity"),
    ({"scores": [0.0, -INF]}, "scores[1]: -Infinity"),
    ({"scores": [1.0]}, "scores: 1 scores for 2 sequences"),
    ({"scores": None}, "scores: expected"),
    ({"scores": ["a", 1]}, "scores[0]: expected"),
    ({"tokens": []}, "tokens: a group needs"),
    ({"tokens": [[1, 2, 3, 4], []]}, "tokens[1]: a sequence needs"),
    ({"tokens": [[1, 2, 3, 4], [1, 2, 3, -4]]}, "tokens[1][3]: expected int >= 0"),
    ({"tokens": [[1, 2, 3, 4], [1, 2, 3, 2**31]]}, "tokens[1][3]: expected int <"),
    ({"tokens": [[1, 2, 3, 4], [1, 2, 3, 1.5]]}, "tokens[1][3]: expected int"),
    ({"tokens": "text"}, "tokens: expected array"),
    ({"masks": [[-100, 1, 2, 3]]}, "masks: 1 rows for 2 sequences"),
    ({"masks": [[-100, 1, 2, 3], [-100]]}, "masks[1]: 1 values for 4 tokens"),
    ({"advantages": [[0.5] * 4, [0.5]]}, "advantages[1]: 1 values"),
    ({"advantages": [[0.5] * 4, [0.5, 0.5, NAN, 0.5]]}, "advantages[1][2]: NaN"),
    ({"ref_logprobs": [[0.5] * 4]}, "ref_logprobs: 1 rows"),
    ({"inference_logprobs": [[0.5] * 4, [0.5] * 3]}, "inference_logprobs[1]: 3 values"),
    ({"inference_logprobs": [[0.5] * 4, [0.5, -INF, 1, 1]]}, "inference_logprobs[1][1]: -Infinity"),
    ({"scores": [0.0, 1e300]}, "scores[1]: 1e+300 is beyond float32; give a number within ±3.4"),
    ({"advantages": [[0.5] * 4, [0.5, -1e39, 1.0, 1e39]]}, "advantages[1][1]: -1e+39 is beyond float32"),
    ({"inference_logprobs": [[0.5] * 4, [1e39, -1, 1, 1]]}, "inference_logprobs[1][0]: 1e+39 is beyond float32"),
    (
        {"distill_token_ids": [[[1]] * 4] * 2, "distill_logprobs": [[[-4e38]] * 4] * 2},
        "distill_logprobs[0][0][0]: -4e+38",
    ),
    ({"messages": [[{"role": "user"}], []]}, "messages[0][0]: a message must have"),
    ({"messages": [[]]}, "messages: 1 conversations for 2 sequences"),
    ({"overrides": [{}, {}, {}]}, "overrides: 3 entries"),
    ({"env_id": -1}, "env_id: -1"),
    ({"env_id": "x"}, "env_id: expected"),
    ({"distill_token_ids": [[[1]] * 4] * 2}, "distill_logprobs: is missing beside"),
    ({"distill_token_ids": [[[1]] * 4] * 2, "distill_logprobs": [[[1.0]] * 4, [[1.0]] * 3]}, "distill_logprobs[1]"),
    ({"distill_token_ids": [[[1]] * 4] * 2, "distill_logprobs": [[[1.0, 2.0]] * 4] * 2}, "distill_logprobs[0][0]"),
]


@pytest.mark.parametrize("large", [False, True], ids=["in one go", "row by row"])
@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_what_is_wrong_is_named(make_group: Make, changes: dict[str, Any], said: str, large: bool) -> None:
    # Blanks alone take it to the other way of decoding.
    body = json.dumps(make_group(1) | changes).encode() + b" " * (WHOLE if large else 0)
    with pytest.raises(Refused) as refused:
        read_group(body)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("field", ["tokens", "masks", "scores"])
def test_a_missing_field_is_named(make_group: Make, field: str) -> None:
    group = make_group(1)
    del group[field]
    with pytest.raises(Refused, match=f"^{field}: this field is missing"):
        read_group(json.dumps(group).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"tokens":[[1]],}', b"[" * 100_000])
def test_what_is_no_group_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        read_group(body)


def test_a_list_names_the_group(make_group: Make) -> None:
    with pytest.raises(Refused, match=r"^\[1\]\.scores\[0\]: NaN"):
        read_groups(json.dumps([make_group(1), make_group(2, scores=[NAN, 1.0])]).encode())


def test_numbers_come_out_digit_by_digit_and_unknown_fields_do_not(make_group: Make) -> None:
    body = b'{"scores":[1,0.10000000000000000555],"extra":[1],"masks":[[1],[1]],"tokens":[[1],[2]]}'
    read_group(body)
    assert b"0.10000000000000000555" in normal_form(body)
    out = json.loads(normal_form(body))
    assert "extra" not in out
    assert len(out) == 14
    assert out["overrides"] is None


def test_a_key_that_is_no_text_does_no_harm() -> None:
    body = b'{"scores":[1],"\xff":1,"masks":[[1]],"tokens":[[1]]}'
    try:
        read_group(body)
    except Refused:
        return
    assert json.loads(normal_form(body))["tokens"] == [[1]]


def test_booleans_and_the_empty_lists_of_atroposlib_pass(make_group: Make) -> None:
    empty: dict[str, list[Any]] = {key: [] for key in ("advantages", "ref_logprobs", "messages", "overrides", "images")}
    read_group(json.dumps(make_group(1, scores=[True, False], group_overrides={}, **empty)).encode())


def test_the_largest_of_float32_pass(make_group: Make) -> None:
    read_group(json.dumps(make_group(1, scores=[3.4028234e38, -3.4028234e38])).encode())


def test_gunzip_is_bounded_whole_and_honest() -> None:
    data = b"0123456789" * 1000
    for packed in (gzip.compress(data), gzipped(data), gzip.compress(data[:50]) + gzip.compress(data[50:])):
        assert gunzip(packed, len(data)) == data
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(TooLarge):
        gunzip(bomb, 1_000_000)
    packed = gzip.compress(data)
    for broken in (packed[:-5], packed[: len(packed) // 2], b"no gzip", packed[:20] + b"xx" + packed[22:]):
        with pytest.raises(BadBody):
            gunzip(broken, 10**6)
