"""Translates between the SDK's messages (protobuf, JSON) and the values of the engine and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tinker.proto import tinker_public_pb2 as pb
from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.base_model import BaseModel
from tinker_atropos_local_tinker.decode import SampleParams, TopK
from tinker_atropos_local_tinker.draw import DrawParams
from tinker_atropos_local_tinker.engine import Array, Datum, PassResult
from tinker_atropos_local_tinker.fields import mapping, number, whole
from tinker_atropos_local_tinker.sampler import SampleResult
from tinker_atropos_local_tinker.stops import parse_stops

MAX_BODY_BYTES = 128 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_SAMPLES = 1024
MAX_TOP = 1024

_DTYPES: dict[int, npt.DTypeLike] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


@dataclass(frozen=True, slots=True, eq=False)
class PassRequest:
    """One forward or forward_backward request. `data` is not decoded yet: a bad datum is the future's error."""

    model_id: str
    seq_id: int
    loss: str
    config: dict[str, float | str]
    backward: bool
    message: Any

    def data(self) -> list[Datum]:
        """Decode the data; raises `UserError` naming the datum."""
        return [_datum(i, datum) for i, datum in enumerate(self.message.data)]


def decode_pass(body: bytes) -> PassRequest:
    """Decode a forward_backward body, zstd-compressed or not: some HTTP servers undo the compression on their own."""
    if body.startswith(ZSTD_MAGIC):
        try:
            # What a frame says of its own size goes before `max_output_size`, so it is looked at first.
            stated = zstandard.get_frame_parameters(body).content_size
            if stated != zstandard.CONTENTSIZE_UNKNOWN and stated > MAX_BODY_BYTES:
                raise UserError(f"the zstd body is {stated} bytes unpacked; {MAX_BODY_BYTES} is the limit, send less")
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_BODY_BYTES)
        except zstandard.ZstdError as error:
            raise UserError(f"the zstd body can't be read: {error}") from error
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassRequest(message.model_id, message.seq_id, message.loss_fn, config, not message.forward_only, message)


def _datum(index: int, message: Any) -> Datum:
    tokens: list[Array] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(
                f"datum {index}: model_input has a chunk of kind {kind!r}; only text tokens are served here"
            )
        tokens.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    inputs = {name: _tensor(index, name, value) for name, value in sorted(message.loss_fn_inputs.items())}
    return Datum(joined, inputs)


def _tensor(index: int, name: str, message: Any) -> Array:
    where = f"datum {index}: {name}"
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"{where} has an unknown dtype {message.dtype}; send float32 or int64")
    shape = list(message.shape)
    try:
        if message.HasField("sparse_csr"):
            return _densify(message.sparse_csr, np.dtype(dtype), shape)
        flat: Array = np.frombuffer(message.dense, dtype)
        return flat.reshape(shape) if shape else flat
    except (ValueError, IndexError) as error:
        raise UserError(f"{where} does not fit its shape {shape}: {error}") from error


def _densify(sparse: Any, dtype: np.dtype[Any], shape: list[int]) -> Array:
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] * 8 > MAX_BODY_BYTES:
        raise ValueError("a sparse tensor has two dimensions of bounded size")
    values = np.frombuffer(sparse.values, dtype)
    crow = np.frombuffer(sparse.crow_indices, np.int64)
    columns = np.frombuffer(sparse.col_indices, np.int64)
    counts = np.diff(crow)
    if len(crow) != shape[0] + 1 or (counts < 0).any() or crow[0] != 0 or not crow[-1] == len(values) == len(columns):
        raise ValueError("the row pointers, columns and values contradict each other")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ValueError("a column is out of range")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def encode_pass(result: PassResult) -> bytes:
    """Encode what a pass returned; consecutive data of one width share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    for width, group in groupby(result.outputs, key=lambda output: output["logprobs"].shape[1:]):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
        for name in outputs[0]:
            arrays = [np.ascontiguousarray(output[name], np.float32) for output in outputs]
            field = record.fields[name]
            field.data = b"".join(a.tobytes() for a in arrays)
            field.offsets = np.cumsum([0, *(a.nbytes for a in arrays)], dtype=np.int64).tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(width)
    return bytes(message.SerializeToString())


def decode_sample(body: Mapping[str, Any], base: BaseModel) -> SampleParams:
    """Check a sampling request against the model; raises `UserError`."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if body.get(name):
            raise UserError(f"{name} is not served locally; leave it out, or use the hosted service")
    prompt = _prompt(body.get("prompt"), base)
    params = mapping(body, "sampling_params") or {}
    scored = bool(body.get("prompt_logprobs"))
    # The last sampled token is never fed back, so a prompt that fills the context can still be scored.
    left = base.context - len(prompt) + (1 if scored else 0)
    wanted = params.get("max_tokens")
    max_tokens = left if wanted is None else whole("max_tokens", wanted, 1, None)
    if left < 1 or max_tokens > left:
        asked = f" and max_tokens={wanted}" if wanted is not None else " leave no room to sample and"
        raise UserError(
            f"a prompt of {len(prompt)} tokens{asked} exceed the model's context of {base.context} tokens; "
            f"shorten the prompt or lower max_tokens"
        )
    last_n = body.get("prompt_logprobs_last_n")
    if last_n is not None:
        if not scored:
            raise UserError("prompt_logprobs_last_n needs prompt_logprobs")
        last_n = whole("prompt_logprobs_last_n", last_n, 1, len(prompt) - 1)
    seed = params.get("seed")
    return SampleParams(
        prompt=prompt,
        samples=whole("num_samples", body.get("num_samples", 1), 1, MAX_SAMPLES),
        max_tokens=max_tokens,
        draw=DrawParams(
            number("temperature", params.get("temperature", 1.0)),
            whole("top_k", params.get("top_k", -1), -1, None),
            number("top_p", params.get("top_p", 1.0)),
        ),
        stops=parse_stops(params.get("stop"), base.end_ids, base.vocab),
        seed=None if seed is None else whole("seed", seed, None, None),
        prompt_logprobs=scored,
        top_prompt=whole("topk_prompt_logprobs", body.get("topk_prompt_logprobs", 0), 0, min(MAX_TOP, base.vocab)),
        top_sampled=whole("topk_sample_logprobs", body.get("topk_sample_logprobs", 0), 0, min(MAX_TOP, base.vocab)),
        last_n=last_n,
    )


def _prompt(prompt: Any, base: BaseModel) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise UserError("prompt is no ModelInput; send {'chunks': [{'type': 'encoded_text', 'tokens': [...]}]}")
    tokens: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or not isinstance(chunk.get("tokens"), list):
            kind = chunk.get("type") if isinstance(chunk, dict) else type(chunk).__name__
            raise UserError(f"prompt has a chunk of kind {kind!r}; only text tokens are served here")
        tokens.extend(chunk["tokens"])
    if not tokens:
        raise UserError("the prompt is empty; give at least one token (a beginning-of-text token, for example)")
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < base.vocab:
            raise UserError(f"the prompt has token {token!r}, outside this model's vocabulary of {base.vocab}")
    return tokens


def encode_sample(params: SampleParams, result: SampleResult) -> bytes:
    """Encode what a sampling request gets."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if params.top_sampled:
            _write_top(added.topk_sampled_logprobs, sequence.top)
    if result.scores is not None:
        if params.prompt_logprobs:
            message.prompt_logprobs = result.scores.logprobs.tobytes()
        if result.scores.top is not None:
            _write_top(message.topk_prompt_logprobs, [result.scores.top])
    return bytes(message.SerializeToString())


def _write_top(message: Any, parts: Sequence[TopK]) -> None:
    ids, logprobs = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    message.token_ids = ids.astype(np.int32).tobytes()
    message.logprobs = logprobs.astype(np.float32).tobytes()
    message.length, message.k = ids.shape
