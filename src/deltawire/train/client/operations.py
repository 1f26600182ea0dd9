"""Operations of a training client, as messages to the ranks that carry them out.

::

    client ── Operation ──▶ rank 0 ── the same bytes ──▶ other ranks
           ◀─ Answer ──────        all carry it out together

A client in rank 0's own process sends nothing over a connection. Messages are MessagePack; nothing
that is received is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from deltawire import errors
from deltawire.errors import BugError, DeltawireError, InputError
from deltawire.train.client.losses import check_inputs
from deltawire.train.client.types import AdamParams, Datum, tensor_of, tokens_of

_DTYPES = {"float32": torch.float32, "int64": torch.int64}


class TrainerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all messages."""


class PreparedDatum(TrainerMessage, frozen=True):
    """A datum, checked: its tokens int64[L], and its loss inputs, ``target_tokens`` among them."""

    tokens: Tensor
    inputs: dict[str, Tensor]

    @property
    def targets(self) -> Tensor:
        """Returns the target tokens: int64[L] or int64[L, K]."""
        return self.inputs["target_tokens"]


class Evaluate(TrainerMessage, frozen=True, tag="evaluate"):
    """Compute a loss and log-probabilities; with ``backward``, add the loss's gradients."""

    data: list[PreparedDatum]
    loss: str
    settings: dict[str, float]
    backward: bool


class TakeStep(TrainerMessage, frozen=True, tag="step"):
    """Take an optimizer step on the gradients, and clear them."""

    params: AdamParams


class PublishWeights(TrainerMessage, frozen=True, tag="publish"):
    """Publish the weights as a version."""

    name: str
    record: dict[str, Any]


class SaveState(TrainerMessage, frozen=True, tag="save"):
    """Publish the weights, and store the optimizer's state for that version."""

    name: str
    record: dict[str, Any]
    keep: bool


class Restore(TrainerMessage, frozen=True, tag="restore"):
    """Restore the state of ``RUN_URL@VERSION``."""

    path: str
    optimizer: bool


class StayAlive(TrainerMessage, frozen=True, tag="wait"):
    """Nothing to do: rank 0 is alive."""


class EndTrainer(TrainerMessage, frozen=True, tag="end"):
    """End; what is not saved is dropped."""


Operation = Evaluate | TakeStep | PublishWeights | SaveState | Restore | StayAlive | EndTrainer


class Begin(TrainerMessage, frozen=True, tag="begin"):
    """Rank 0's first message to the other ranks: the run, the version to start from, and the
    publishers' epoch and session. ``public_key`` is empty for a run that is not signed."""

    run: str
    public_key: str
    version: int
    epoch: int
    session: str


class Opened(TrainerMessage, frozen=True, tag="opened"):
    """The trainer is ready. ``version`` is the newest one, ``vocabulary`` the number of tokens,
    ``state_record`` the record of the save that the state is from. ``notice`` says what a user
    should know about the state; it is empty if there is nothing."""

    version: int
    ranks: int
    vocabulary: int
    state_record: dict[str, Any]
    notice: str


class Evaluation(TrainerMessage, frozen=True, tag="evaluated"):
    """Log-probabilities of each datum, in the shape of its targets, and the sum of the losses."""

    logprobs: list[Tensor]
    loss: float


class Stepped(TrainerMessage, frozen=True, tag="stepped"):
    """The metrics of an optimizer step."""

    metrics: dict[str, float]


class Saved(TrainerMessage, frozen=True, tag="saved"):
    """The version that the weights are, and the newest one."""

    version: int
    newest: int


class Done(TrainerMessage, frozen=True, tag="done"):
    """The operation has no result."""


class Failed(TrainerMessage, frozen=True, tag="failed"):
    """The operation failed. ``kind`` is a class of `deltawire.errors`, empty for other errors.
    ``ended`` says that the trainer is gone."""

    kind: str
    message: str
    hint: str = ""
    run: str = ""
    version: int | None = None
    key: str = ""
    ended: bool = False

    @classmethod
    def of(cls, error: BaseException, *, ended: bool = False) -> Failed:
        """Describes an error."""
        if not isinstance(error, DeltawireError):
            return cls(kind="", message=f"{type(error).__name__}: {error}", ended=ended)
        found = next(
            one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__
        )
        return cls(
            kind=found,
            message=error.message,
            hint=error.hint,
            run=error.run,
            version=error.version,
            key=error.key,
            ended=ended,
        )

    def error(self) -> Exception:
        """Returns the error that was described; `RuntimeError` for one that is not of
        `deltawire.errors`."""
        kind = getattr(errors, self.kind, None) if self.kind else None
        if not isinstance(kind, type) or not issubclass(kind, DeltawireError):
            return RuntimeError(self.message)
        return kind(self.message, hint=self.hint, run=self.run, version=self.version, key=self.key)


Answer = Opened | Evaluation | Stepped | Saved | Done | Failed
Result = Evaluation | Stepped | Saved | Done


def _packed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise NotImplementedError(type(value).__name__)
    dense = value.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(dense.dtype).removeprefix("torch."), list(dense.shape), data]


def _unpacked(kind: type, value: Any) -> Any:
    if kind is not Tensor:
        raise NotImplementedError(kind.__name__)
    dtype, shape, data = value
    return tensor_from(data, _DTYPES[dtype], shape)


def tensor_from(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor whose elements are the bytes."""
    if not data:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(*shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_operations = msgspec.msgpack.Decoder(Operation, dec_hook=_unpacked)
_answers = msgspec.msgpack.Decoder(Answer, dec_hook=_unpacked)
_begins = msgspec.msgpack.Decoder(Begin)


def encode(message: TrainerMessage) -> bytes:
    """Returns a message as bytes."""
    return _encoder.encode(message)


def decode_operation(data: bytes) -> Operation:
    """Returns the operation that the bytes hold."""
    found: Operation = _operations.decode(data)
    return found


def decode_answer(data: bytes) -> Answer:
    """Returns the answer that the bytes hold."""
    found: Answer = _answers.decode(data)
    return found


def decode_begin(data: bytes) -> Begin:
    """Returns rank 0's first message."""
    return _begins.decode(data)


def prepare(datum: Datum | Any, loss_fn: str, *, vocabulary: int) -> PreparedDatum:
    """Checks a datum; of one for a ``custom`` loss only the targets are kept. Raises `InputError`
    for what does not fit the loss or the vocabulary."""
    tokens = torch.tensor(tokens_of(datum.model_input))
    inputs = {name: tensor_of(name, value) for name, value in datum.loss_fn_inputs.items()}
    if loss_fn != "custom":
        check_inputs(loss_fn, inputs)
    elif "target_tokens" not in inputs:
        raise InputError("a datum has no 'target_tokens'", hint="every loss needs them")
    else:
        inputs = {"target_tokens": inputs["target_tokens"]}
    targets = inputs["target_tokens"]
    if targets.dim() not in (1, 2) or len(targets) != len(tokens):
        raise InputError(
            f"target_tokens has shape {list(targets.shape)} for {len(tokens)} input tokens",
            hint="give one row of targets for each input token, shifted by one",
        )
    check_tokens(tokens, vocabulary)
    check_tokens(targets, vocabulary)
    return PreparedDatum(tokens=tokens, inputs=inputs)


def check_tokens(ids: Tensor, vocabulary: int) -> None:
    """Raises `InputError` unless all ids are tokens of a model with so many."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise InputError(f"a token id is not one of the model's {vocabulary}")


def check_record(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a save's record as it will be read back; raises `InputError` if it is no JSON."""
    try:
        found = msgspec.json.decode(msgspec.json.encode(dict(record or {})))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise InputError(f"the record of a save is no JSON object: {error}") from error
    if not isinstance(found, dict):
        raise BugError("a record is not a JSON object")
    return found
