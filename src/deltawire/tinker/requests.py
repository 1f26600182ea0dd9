"""Decodes the requests of Tinker's SDK, and refuses what the server cannot honor.

JSON members that are not named here are refused, so that no option is ignored in silence; members
that are here and must keep their default say so in `check` functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from blake3 import blake3
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Meta

from deltawire.errors import InputError
from deltawire.tinker import schema
from deltawire.train.client.types import (
    MOST_TOP_TOKENS,
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
)
from deltawire.wire.objects import prepared

MAX_CHUNK_DATA = 1024
"""The most data of one forward_backward request."""
MAX_CHUNK_BYTES = 5_000_000
"""The most bytes of the data of one forward_backward request, as the client estimates them; a
single datum may need more."""
MAX_BODY_BYTES = 64 << 20
"""The most bytes of any request."""
MAX_ELEMENTS = 1 << 26
"""The most elements of one loss input."""
OVERSIZE = "oversize"
"""The call by which a request is remembered that was too large to be read."""
EDGE_BYTES = 1 << 16
"""How much of the start and of the end of a request that is too large is looked at."""
MAX_CALL = 100
"""The most characters of the name of a call that is refused and remembered."""
MAX_SPARSITY = 64
"""The most bytes that one byte of a sparse loss input may become."""
MAX_STEPS = 10**10 - 1
TTL_S = (3600, 10 * 366 * 24 * 3600)

_MODEL_TAG = 0x0A
"""The tag of ``model_id``, whose length takes one byte: names of models are short."""
_SEQ_ID = re.compile(rb"\x10[\x80-\xff]{0,4}[\x00-\x7f]")
_JSON_MODEL = re.compile(rb'"model_id"\s{0,9}:\s{0,9}"([^"\\]{1,100})"')
_JSON_SEQ_ID = re.compile(rb'"seq_id"\s{0,9}:\s{0,9}(\d{1,10})\b')

Name = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
Notes = Annotated[dict[str, Any], Meta(max_length=256)]
M = TypeVar("M", bound="ClientRequest")


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of JSON requests."""

    type: Name = ""


class CreateSession(ClientRequest, frozen=True, kw_only=True):
    """Opens a session."""

    tags: list[Name] = []
    user_metadata: Notes = {}
    sdk_version: Name = ""
    project_id: Name = ""
    display_name: Name = ""


class LoraConfig(ClientRequest, frozen=True, kw_only=True):
    """The parts of the model that the client wants to train."""

    rank: Annotated[int, Meta(ge=1, le=4096)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The optimizer of a model; AdamW is the one there is."""

    type: Name = "adamw"


class CreateModel(ClientRequest, frozen=True, kw_only=True):
    """Creates a model from the base model."""

    session_id: Name
    model_seq_id: Number
    base_model: Name
    user_metadata: Notes | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class LoadWeights(ClientRequest, frozen=True, kw_only=True):
    """Creates a model from a checkpoint (``session_id``), or loads one into a model."""

    path: Name
    optimizer: bool
    model_id: Name = ""
    seq_id: Number = 0
    session_id: Name = ""
    model_seq_id: Number = 0
    base_model: Name = ""
    user_metadata: Notes | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()
    weights_access_token: Name = ""


class AdamValues(ClientRequest, frozen=True, kw_only=True):
    """The parameters of one AdamW step; the client sends NaN as null."""

    learning_rate: float | None = 1e-4
    beta1: float | None = 0.9
    beta2: float | None = 0.95
    eps: float | None = 1e-12
    weight_decay: float | None = 0.0
    grad_clip_norm: float | None = 0.0


class OptimStep(ClientRequest, frozen=True, kw_only=True):
    """Takes an optimizer step."""

    model_id: Name
    seq_id: Number
    adam_params: AdamValues | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveTrainingState(ClientRequest, frozen=True, kw_only=True):
    """Saves a training state."""

    model_id: Name
    seq_id: Number
    path: Name = ""
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Notes | None = None


class SaveForSampler(ClientRequest, frozen=True, kw_only=True):
    """Saves weights to sample from, under a name or as a sampling session."""

    model_id: Name
    seq_id: Number
    path: Name = ""
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Notes | None = None


class CreateSampler(ClientRequest, frozen=True, kw_only=True):
    """Opens a sampling session on saved weights or on the base model."""

    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name = ""
    model_path: Name = ""


class PromptPart(ClientRequest, frozen=True, kw_only=True):
    """A part of a prompt."""

    tokens: list[int] | None = None
    data: Any = None
    format: Any = None
    location: Any = None
    expected_tokens: Any = None
    dmel: Any = None


class SamplePrompt(ClientRequest, frozen=True, kw_only=True):
    """A prompt."""

    chunks: list[PromptPart]


class SamplingValues(ClientRequest, frozen=True, kw_only=True):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(ClientRequest, frozen=True, kw_only=True):
    """Asks for completions of a prompt."""

    prompt: SamplePrompt
    sampling_params: SamplingValues = SamplingValues()
    num_samples: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    sampling_session_id: Name = ""
    seq_id: Annotated[int, Meta(ge=0)] = 0
    base_model: Name = ""
    model_path: Name = ""
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_TOKENS)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class ForwardBackward(msgspec.Struct, frozen=True, kw_only=True):
    """Computes a loss of data, and adds its gradients unless ``forward_only``."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    settings: dict[str, float | str]
    forward_only: bool


TrainingRequest = (
    ForwardBackward | OptimStep | SaveTrainingState | SaveForSampler | LoadWeights | CreateModel
)
"""The requests that a model works on in the order of their numbers."""

_JSON_KINDS: dict[str, type[Any]] = {
    "create_model": CreateModel,
    "load_weights": LoadWeights,
    "optim_step": OptimStep,
    "save_weights": SaveTrainingState,
    "save_weights_for_sampler": SaveForSampler,
}
KINDS = ("forward_backward", *_JSON_KINDS)
"""The calls of `TrainingRequest`, by the last part of their path."""


STABLE_REINFORCE = "stable_reinforce"
REFUSED_CALLS = {
    "save_weights_external": (
        "every save is a version of a run in the bucket: deltawire pull writes it as a Hugging "
        "Face directory"
    ),
    "get_external_weights_urls": "deltawire pull writes a version as a Hugging Face directory",
    "create_custom_loss": "use forward_backward_custom, which computes the loss on the client",
    "join_sampling_session": "create a sampling session for each process",
    "copy_weights": "a checkpoint stays in its bucket: load it by its tinker:// path",
    "publish": "everyone who has the server's key can read every checkpoint",
    "search": "list_sessions lists the sessions",
    "project": "there are no projects here: a server has one bucket and one key",
    "trace_export": "see the server's log and deltawire watch",
    "usage": "there is no billing here; deltawire status shows what a run stores",
    "audit": "see the server's log",
    "apikey": "the server's key is its TINKER_API_KEY or DELTAWIRE_TOKEN",
    "unload_model": "idle models leave memory when another one needs their place",
}
"""Calls of the SDK that a bucket cannot answer, by a part of their path, and what to do instead."""


def refusal(call: str) -> InputError:
    """Returns the error of a call that this server does not have, or of one that is too large."""
    if call == OVERSIZE:
        return InputError(
            f"the request has more than the {MAX_BODY_BYTES >> 20} MiB that this server reads",
            hint="give shorter data, or fewer in each call",
        )
    hint = next((text for name, text in REFUSED_CALLS.items() if name in call.split("/")), "")
    return InputError(
        f"this server has no call {call[:100]!r}", hint=hint or "it serves Tinker's SDK 0.38"
    )


def decode(kind: str, body: bytes) -> TrainingRequest:
    """Returns a training request; raises `InputError` for one that cannot be honored."""
    if kind not in KINDS:
        raise refusal(kind)
    if kind == "forward_backward":
        return _forward_backward(schema.parse("ForwardBackwardRequest", body))
    request: TrainingRequest = read_json(body, _JSON_KINDS[kind])
    check(request)
    return request


def with_known_loss(request: TrainingRequest, loss: str) -> TrainingRequest:
    """Returns a request whose ``stable_reinforce``, the default of most recipes, is ``loss``.
    Raises `InputError` if that is empty."""
    if not isinstance(request, ForwardBackward) or request.loss_fn != STABLE_REINFORCE:
        return request
    if not loss:
        raise InputError(
            f"the loss {STABLE_REINFORCE!r} needs what only the hosted service records, and has no "
            "public formula",
            hint="choose importance_sampling, ppo, cispo, dro or gspo (loss_fn=… in recipes), or "
            "start the server with --stable-reinforce LOSS",
        )
    return msgspec.structs.replace(request, loss_fn=loss)


def oversize(kind: str, head: bytes, tail: bytes, size: int) -> bytes:
    """Returns what is remembered of a request of ``size`` bytes that is not read, as the body of
    the call `OVERSIZE`; raises the refusal where its first and last bytes do not tell whose it is.

    The SDK writes a request's model and number before all data, or after them."""
    if kind == "forward_backward":
        start = 2 + head[1] if len(head) > 1 and head[0] == _MODEL_TAG else 0
        if number := _SEQ_ID.match(head, start):
            found = schema.parse("ForwardBackwardRequest", head[: number.end()])
            return msgspec.json.encode(
                {"model_id": found.model_id, "seq_id": found.seq_id, "bytes": size}
            )
        raise refusal(OVERSIZE)
    edges = head + b" " + tail
    model, turn = _JSON_MODEL.search(edges), _JSON_SEQ_ID.search(edges)
    if model is None or turn is None:
        raise refusal(OVERSIZE)
    name = model[1].decode("utf-8", "replace")
    return msgspec.json.encode({"model_id": name, "seq_id": int(turn[1]), "bytes": size})


def address(kind: str, body: bytes) -> tuple[str, int]:
    """Returns model and number of a request whatever else is wrong with it; raises `InputError`
    where it has none."""
    if kind == "forward_backward":
        found = schema.parse("ForwardBackwardRequest", body)
        return found.model_id, found.seq_id
    raw = decode_body(body, Any)
    try:
        if kind == "create_model" or (kind == "load_weights" and raw.get("session_id")):
            return f"{raw['session_id']}:train:{int(raw['model_seq_id'])}", 0
        return str(raw["model_id"]), int(raw["seq_id"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"a {kind} request names no model and number", hint="give model_id and seq_id"
        ) from error


def canonical_digest(kind: str, body: bytes) -> str:
    """Returns a digest that two encodings of the same request share: maps have no order."""
    if kind == "forward_backward":
        message = schema.parse("ForwardBackwardRequest", body)
        whole = message.SerializeToString(deterministic=True)
    else:
        whole = msgspec.json.encode(decode_body(body, Any), order="deterministic")
    return blake3(kind.encode() + b"\n" + whole).hexdigest()


def read_json(body: bytes, kind: type[M]) -> M:
    """Decodes a JSON request; raises `InputError`."""
    found: M = decode_body(body, kind)
    return found


def decode_body(body: bytes, kind: Any) -> Any:
    """Decodes JSON as ``kind``; raises `InputError`."""
    try:
        return msgspec.json.decode(body, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"the request cannot be honored: {error}") from error


def check(request: Any) -> None:
    """Raises `InputError` for options that there are not."""
    if isinstance(request, CreateModel | LoadWeights) and request.optimizer_config.type != "adamw":
        raise _unknown_optimizer(request.optimizer_config.type)
    if isinstance(request, LoadWeights) and request.weights_access_token:
        raise InputError("checkpoints have no access tokens here", hint="leave the token out")
    if isinstance(request, OptimStep):
        if request.optimizer_params is not None:
            raise _unknown_optimizer(str(request.optimizer_params.get("type")))
        if request.adam_params is None:
            raise InputError("optim_step has no adam_params")
    if isinstance(request, SaveTrainingState | SaveForSampler):
        check_ttl(request.ttl_seconds)
        if "/" in request.path or not request.path.isprintable():
            raise InputError(f"{request.path[:80]!r} cannot name a checkpoint", hint="leave / out")
    if isinstance(request, SaveTrainingState) and not request.path:
        raise InputError("save_weights has no path", hint="name the checkpoint")
    if isinstance(request, SaveForSampler):
        if bool(request.path) == (request.sampling_session_seq_id is not None):
            raise InputError(
                "save_weights_for_sampler needs a path or a sampling_session_seq_id, not both"
            )
        if request.path and request.kind != "snapshot":
            raise InputError("named sampler weights are a snapshot", hint="leave the path out")


def check_ttl(seconds: int | None) -> None:
    """Raises `InputError` unless a checkpoint may end after so many seconds."""
    if seconds is not None and not TTL_S[0] <= seconds <= TTL_S[1]:
        raise InputError(f"ttl_seconds is {seconds}", hint="give 3600 (an hour) to ten years")


def _unknown_optimizer(name: str) -> InputError:
    return InputError(
        f"there is no optimizer {name[:80]!r} here", hint="use AdamW: tinker.AdamParams"
    )


def _forward_backward(found: Any) -> ForwardBackward:
    if len(UnknownFieldSet(found)):
        raise InputError(
            "the request has members that this server does not know",
            hint="use the Tinker SDK 0.38",
        )
    if len(found.data) > MAX_CHUNK_DATA:
        raise InputError(
            f"a chunk of {len(found.data)} data", hint=f"the client config allows {MAX_CHUNK_DATA}"
        )
    size = sum(one.ByteSize() for one in found.data)
    # Twice the limit: the client estimates, and knows nothing of names and lengths.
    if len(found.data) > 1 and size > 2 * MAX_CHUNK_BYTES:
        raise InputError(
            f"a chunk of {size} bytes", hint=f"the client config allows {MAX_CHUNK_BYTES}"
        )
    settings: dict[str, float | str] = dict(found.loss_fn_config)
    for name, value in found.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackward(
        model_id=found.model_id,
        seq_id=found.seq_id,
        data=[_datum(one) for one in found.data],
        loss_fn=found.loss_fn,
        settings=settings,
        forward_only=found.forward_only,
    )


def _datum(found: Any) -> Datum:
    tokens: list[int] = []
    for chunk in found.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InputError(
                f"a model input has a chunk of {chunk.WhichOneof('chunk') or 'nothing'}",
                hint="this server takes tokens only",
            )
        tokens += _array(chunk.encoded_text.tokens, np.dtype(np.int32)).tolist()
    inputs = {name: _tensor(name, value) for name, value in found.loss_fn_inputs.items()}
    return Datum(ModelInput.from_ints(tokens), inputs)


def _array(data: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise InputError(f"{len(data)} bytes are not a whole number of {dtype} elements")
    return np.frombuffer(data, dtype)


def _tensor(name: str, found: Any) -> torch.Tensor:
    """Returns a loss input, dense, float32 or int64, on the CPU."""
    dtypes: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64)}
    dtype = dtypes.get(found.dtype)
    shape = list(found.shape)
    if dtype is None or any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise InputError(
            f"the loss input {name[:80]!r} has dtype {found.dtype} and shape {shape[:8]}",
            hint=f"give float32 or int64, and at most {MAX_ELEMENTS} elements",
        )
    if found.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(name, found.sparse_csr, shape, dtype)
    values = _array(found.dense, dtype)
    shape = shape or [len(values)]
    if math.prod(shape) != len(values):
        raise InputError(
            f"the loss input {name[:80]!r} has {len(values)} elements for the shape {shape[:8]}"
        )
    return torch.from_numpy(values.copy()).view(shape)


def _from_csr(name: str, csr: Any, shape: list[int], dtype: np.dtype[Any]) -> torch.Tensor:
    sent = len(csr.values) + len(csr.crow_indices) + len(csr.col_indices)
    if math.prod(shape) * dtype.itemsize > MAX_SPARSITY * sent:
        raise InputError(
            f"the loss input {name[:80]!r} of shape {shape[:8]} is sent in {sent} bytes",
            hint=f"a sparse input may be {MAX_SPARSITY} times as large as its encoding; send fewer "
            "rows and columns that are all zero",
        )
    values = _array(csr.values, dtype)
    rows = _array(csr.crow_indices, np.dtype(np.int64))
    columns = _array(csr.col_indices, np.dtype(np.int64))
    sound = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not sound:
        raise InputError(f"the loss input {name[:80]!r} is not a sparse matrix in CSR form")
    dense = np.zeros(shape, dtype)  # At most MAX_SPARSITY times what was sent.
    np.add.at(dense, (np.repeat(np.arange(shape[0]), np.diff(rows)), columns), values)
    return torch.from_numpy(dense)


def prompt_tokens(prompt: SamplePrompt) -> list[int]:
    """Returns the tokens of a prompt; raises `InputError` for anything else in it."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.tokens is None:
            raise InputError(
                f"a prompt has a chunk of type {chunk.type[:40]!r}",
                hint="this server takes tokens only",
            )
        tokens += chunk.tokens
    return tokens


def sampling_params(
    sample: SampleRequest, *, room: int, stability_info: bool = False
) -> SamplingParams:
    """Returns how to sample; ``room`` is how many tokens fit after the prompt. With
    ``stability_info``, a client may ask to record what stable_reinforce needs, and nothing is
    recorded. Raises `InputError` for what cannot be honored."""
    refused: Mapping[str, Any] = {
        "topk_sample_logprobs": sample.topk_sample_logprobs,
        "target_prompt_logprobs": sample.target_prompt_logprobs,
        "prompt_alt_tokens_k": sample.prompt_alt_tokens_k,
        "record_stability_info": sample.record_stability_info and not stability_info,
    }
    for name, value in refused.items():
        if value not in (None, 0, False):
            raise InputError(f"this server cannot honor {name}", hint="leave it out")
    last = sample.prompt_logprobs_last_n
    if last is not None and not (sample.prompt_logprobs and last >= 1):
        raise InputError("prompt_logprobs_last_n needs prompt_logprobs, and is 1 or more")
    values = sample.sampling_params
    return SamplingParams(
        max_tokens=max(room, 1) if values.max_tokens is None else values.max_tokens,
        seed=values.seed,
        stop=_stop(values.stop),
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
    )


def _stop(stop: str | list[str | int] | None) -> str | list[str] | list[int] | None:
    if stop is None or isinstance(stop, str):
        return stop
    texts = [one for one in stop if isinstance(one, str)]
    ids = [one for one in stop if isinstance(one, int)]
    if texts and ids:
        raise InputError("stop mixes strings and token ids", hint="give one kind")
    return texts or ids


def adam_params(values: AdamValues) -> AdamParams:
    """Returns the library's parameters of an optimizer step; raises `InputError`."""
    found = msgspec.structs.asdict(values)
    del found["type"]
    for name, value in found.items():
        if value is None:
            raise InputError(
                f"{name} is NaN or infinite", hint="check the schedule that computes it"
            )
    return AdamParams(**found)
