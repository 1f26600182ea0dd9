"""Encodes results for Tinker's SDK, and for the bucket that keeps them until a client has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta

from deltawire.errors import CorruptError, DeltawireError, InputError
from deltawire.tinker import schema
from deltawire.train.client.types import ForwardBackwardOutput, SampleResponse
from deltawire.wire.objects import prepared

MAX_RESULT_BYTES = 1 << 30
Category = Literal["user", "server"]
_NO_LOGPROB = -99999.0
"""Tinker's sign, with token 0, for a place without likeliest tokens."""


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request: JSON or protocol buffer bytes, or an error and whose it is."""

    kind: Literal["json", "proto", "error"]
    body: Annotated[bytes, Meta(max_length=MAX_RESULT_BYTES)]
    category: Category = "server"

    @classmethod
    def json(cls, value: Any) -> RequestResult:
        """A JSON result."""
        return cls(kind="json", body=msgspec.json.encode(value))

    @classmethod
    def of_error(cls, error: BaseException) -> RequestResult:
        """The error of a request. Users see what is wrong with their request; of errors that are
        not deltawire's they see the type only."""
        if isinstance(error, DeltawireError):
            whose: Category = "user" if isinstance(error, InputError) else "server"
            return cls(kind="error", body=str(error).encode(), category=whose)
        text = f"the server failed to handle this request: {type(error).__name__}"
        return cls(kind="error", body=text.encode())

    def encoded(self) -> bytes:
        """The object that the bucket keeps."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decoded(cls, data: bytes, *, run: str, key: str) -> RequestResult:
        """Reads `encoded`; raises `CorruptError`."""
        try:
            return msgspec.msgpack.decode(data, type=prepared(cls))
        except msgspec.DecodeError as error:
            raise CorruptError(f"a result cannot be read: {error}", run=run, key=key) from error


def forward_backward_result(output: ForwardBackwardOutput) -> RequestResult:
    """Encodes log-probabilities, each in the shape of its datum's targets, and metrics."""
    message = schema.message("ForwardBackwardOutput")()
    message.loss_fn_output_type = output.loss_fn_output_type
    for record in _records([one["logprobs"] for one in output.loss_fn_outputs]):
        message.loss_fn_outputs.append(record)
    for name, value in output.metrics.items():
        message.metrics[name] = value
    return RequestResult(kind="proto", body=message.SerializeToString(deterministic=True))


def _records(logprobs: list[torch.Tensor]) -> list[Any]:
    """One record for each stretch of tensors whose shapes agree but for the first extent."""
    records: list[Any] = []
    parts: list[torch.Tensor] = []
    for place, one in enumerate(logprobs):
        parts.append(one)
        following = logprobs[place + 1] if place + 1 < len(logprobs) else None
        if following is None or following.shape[1:] != one.shape[1:]:
            records.append(_record(parts))
            parts = []
    return records


def _record(parts: list[torch.Tensor]) -> Any:
    record = schema.message("ArrayRecord")()
    record.num_datums = len(parts)
    field = record.fields["logprobs"]
    arrays = [np.ascontiguousarray(one.float().numpy()) for one in parts]
    field.data = b"".join(one.tobytes() for one in arrays)
    sizes = [one.nbytes for one in arrays]
    field.offsets = np.cumsum([0, *sizes], dtype=np.int64).tobytes()
    field.dtype = 1
    field.trailing_shape.extend(parts[0].shape[1:])
    return record


def sample_result(response: SampleResponse, *, last: int | None = None) -> RequestResult:
    """Encodes completions; of the prompt's log-probabilities only the ``last`` ones."""
    message = schema.message("SampleResponse")()
    for one in response.sequences:
        sequence = message.sequences.add()
        sequence.stop_reason = 0 if one.stop_reason == "stop" else 1
        sequence.tokens = np.asarray(one.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(one.logprobs, np.float32).tobytes()
    if response.prompt_logprobs is not None:
        scores = np.asarray(
            [np.nan if one is None else one for one in response.prompt_logprobs], np.float32
        )
        if last is not None:
            scores[: max(len(scores) - last, 0)] = np.nan
        message.prompt_logprobs = scores.tobytes()
    if response.topk_prompt_logprobs is not None:
        _fill_top(message.topk_prompt_logprobs, response.topk_prompt_logprobs, last=last)
    return RequestResult(kind="proto", body=message.SerializeToString(deterministic=True))


def _fill_top(
    message: Any, rows: list[list[tuple[int, float]] | None], *, last: int | None
) -> None:
    """Writes the likeliest tokens at each place as two matrices, int32 and float32 [L, K]."""
    count = max((len(row) for row in rows if row is not None), default=0)
    ids = np.zeros((len(rows), count), np.int32)
    scores = np.full((len(rows), count), _NO_LOGPROB, np.float32)
    first = 0 if last is None else max(len(rows) - last, 0)
    for place, row in enumerate(rows):
        if row is not None and place >= first:
            ids[place], scores[place] = zip(*row, strict=True)
    message.token_ids, message.logprobs = ids.tobytes(), scores.tobytes()
    message.k, message.length = count, len(rows)
