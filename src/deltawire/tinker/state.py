"""State that the server keeps in the bucket: sessions, models, accepted requests, results,
checkpoints.

::

    tinker/server.json                          the model directory's fingerprint
    tinker/sessions/SESSION.json
    tinker/samplers/SESSION/NUMBER.json         which version a sampling session serves
    tinker/models/SESSION-train-NUMBER/model.json
                                      requests/NUMBER   before it is acknowledged
                                      results/NUMBER    before a client gets it
                                      saves/HASH.json   a named checkpoint

A request is acknowledged once it is stored. After a restart, the requests since the newest state of
the model are repeated from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.tinker.requests import MAX_BODY_BYTES, LoraConfig, Name, Notes, Number
from deltawire.tinker.results import MAX_RESULT_BYTES, RequestResult
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json, prepared

MAX_RECORD_BYTES = 1 << 20
_MODEL = re.compile(r"([0-9a-f]{32}):train:([0-9]{1,9})\Z")
_SAMPLER = re.compile(r"([0-9a-f]{32}):sample:([0-9]{1,9})\Z")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)\Z")
R = TypeVar("R", bound=msgspec.Struct)
SaveKind = Literal["weights", "sampler_weights"]


class MissingError(InputError):
    """A request names a model, a session or a checkpoint that there is not."""


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the served model: the fingerprint of its directory."""

    model: Name


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A client's session; ``finished`` is the reason for its end."""

    created_at: float
    metadata: Notes = {}
    finished: Name = ""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a client trains. ``folder`` is where its run lies below the server's bucket,
    empty for the bucket itself. ``lora`` is None where all parameters are trained. ``source`` is
    the version ``FOLDER@VERSION`` of the checkpoint that it starts from."""

    id: Name
    folder: Name
    base_model: Name
    created_at: float
    lora: LoraConfig | None = None
    source: Name = ""
    optimizer: bool = False
    metadata: Notes | None = None


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A named checkpoint: the version that holds it, the request that made it, and until when it
    exists (seconds since 1970)."""

    model: Name
    kind: SaveKind
    name: Name
    version: Number
    seq_id: Number
    created_at: float
    expires_at: float | None = None
    metadata: Notes | None = None

    @property
    def path(self) -> str:
        """The path that clients know."""
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a sampling session: a version of the run in ``folder``, or that one or
    newer."""

    folder: Name
    version: Number
    kind: Literal["snapshot", "inflight"]
    base_model: Name
    model_path: Name = ""


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came in, also one of a call that the server does not have."""

    kind: Name
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)]


def model_name(model: str) -> str:
    """Returns the name of a model in keys; raises `MissingError` for what is no model's id."""
    found = _MODEL.match(model)
    if found is None:
        raise MissingError(f"there is no model {model[:100]!r}", hint="create it first")
    return f"{found[1]}-train-{int(found[2])}"


def model_id(session: str, number: int) -> str:
    """Returns the id of a session's model, which clients derive too."""
    return f"{session}:train:{number}"


def sampler_of(sampler: str) -> tuple[str, int]:
    """Returns session and number of a sampling session; raises `InputError`."""
    found = _SAMPLER.match(sampler)
    if found is None:
        raise MissingError(f"there is no sampling session {sampler[:100]!r}")
    return found[1], int(found[2])


class ServerState:
    """The server's objects in its bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.url = bucket.url.rstrip("/")

    def run_url(self, folder: str) -> str:
        """Returns where the run of a model lies."""
        return f"{self.url}/{folder}" if folder else self.url

    @property
    def claimed(self) -> bool:
        """Returns whether a server used this bucket before."""
        return self.bucket.exists(keys.TINKER_SERVER)

    def claim(self, record: ServerRecord) -> ServerRecord:
        """Stores what is served, once; returns what is stored."""
        self.bucket.create(keys.TINKER_SERVER, encode_json(record))
        found = self._read(keys.TINKER_SERVER, ServerRecord)
        assert found is not None
        return found

    def put_session(self, session: str, record: SessionRecord) -> None:
        """Stores a session."""
        self.bucket.put(keys.tinker_session(session), encode_json(record))

    def session(self, session: str) -> SessionRecord:
        """Returns a session; raises `MissingError` if there is none."""
        found = None
        if keys.valid_name(session):
            found = self._read(keys.tinker_session(session), SessionRecord)
        if found is None:
            raise MissingError(f"there is no session {session[:100]!r}", hint="create one")
        return found

    def sessions(self) -> dict[str, SessionRecord]:
        """Returns all sessions, newest first."""
        prefix = keys.tinker_sessions()
        listed = self.bucket.list(prefix)
        names = [key.removeprefix(prefix).removesuffix(".json") for key in listed]
        found = {name: self._read(keys.tinker_session(name), SessionRecord) for name in names}
        there = [(name, record) for name, record in found.items() if record is not None]
        return dict(sorted(there, key=lambda one: -one[1].created_at))

    def sampler_ids(self, session: str) -> list[str]:
        """Returns the ids of a session's sampling sessions."""
        listed = self.bucket.list(keys.tinker_samplers(session))
        numbers = (keys.trailing_number(key) for key in listed)
        return [f"{session}:sample:{number}" for number in numbers if number is not None]

    def put_model(self, record: ModelRecord) -> None:
        """Stores the description of a model."""
        self.bucket.put(keys.tinker_model(model_name(record.id)), encode_json(record))

    def model(self, model: str) -> ModelRecord | None:
        """Returns the description of a model, None if there is none."""
        return self._read(keys.tinker_model(model_name(model)), ModelRecord)

    def models(self, session: str = "") -> Iterator[ModelRecord]:
        """Yields the descriptions of all models, or of a session's."""
        for name in self.bucket.list_prefixes(keys.tinker_models()):
            if session and not name.startswith(f"{session}-train-"):
                continue
            record = self._read(keys.tinker_model(name), ModelRecord)
            if record is not None:
                yield record

    def root_is_taken(self) -> bool:
        """Returns whether a model's run lies in the bucket itself."""
        return any(not record.folder for record in self.models())

    def put_request(self, model: str, number: int, kind: str, body: bytes) -> None:
        """Stores a request; it counts as accepted from here on."""
        data = msgspec.msgpack.encode(StoredRequest(kind=kind, body=body))
        self.bucket.put(keys.tinker_request(model_name(model), number), data)

    def request(self, model: str, number: int) -> StoredRequest | None:
        """Returns an accepted request."""
        key = keys.tinker_request(model_name(model), number)
        data = self.bucket.get(key, limit=MAX_BODY_BYTES + 1024)
        if data is None:
            return None
        try:
            return msgspec.msgpack.decode(data, type=prepared(StoredRequest))
        except msgspec.DecodeError as error:
            raise CorruptError("a request cannot be read", run=self.url, key=key) from error

    def put_result(self, model: str, number: int, result: RequestResult) -> None:
        """Stores a result."""
        self.bucket.put(keys.tinker_result(model_name(model), number), result.encoded())

    def result(self, model: str, number: int) -> RequestResult | None:
        """Returns a stored result."""
        key = keys.tinker_result(model_name(model), number)
        data = self.bucket.get(key, limit=MAX_RESULT_BYTES)
        return None if data is None else RequestResult.decoded(data, run=self.url, key=key)

    def numbers(self, model: str) -> tuple[set[int], set[int]]:
        """Returns the numbers of a model's stored requests, and of its stored results."""
        name = model_name(model)
        found = []
        for prefix in (keys.tinker_requests(name), keys.tinker_results(name)):
            numbers = (keys.trailing_number(key) for key in self.bucket.list(prefix))
            found.append({number for number in numbers if number is not None})
        return found[0], found[1]

    def forget(self, model: str, *, requests: set[int], results: set[int]) -> None:
        """Deletes stored requests and results."""
        name = model_name(model)
        for number in requests:
            self.bucket.delete(keys.tinker_request(name, number))
        for number in results:
            self.bucket.delete(keys.tinker_result(name, number))

    def put_save(self, record: SaveRecord) -> None:
        """Stores a named checkpoint."""
        self.bucket.put(_save_key(record.model, record.kind, record.name), encode_json(record))

    def save(self, model: str, kind: SaveKind, name: str) -> SaveRecord | None:
        """Returns a named checkpoint, expired or not."""
        return self._read(_save_key(model, kind, name), SaveRecord)

    def saves(self, model: str) -> list[SaveRecord]:
        """Returns a model's named checkpoints, oldest first, expired ones too."""
        listed = self.bucket.list(keys.tinker_saves(model_name(model)))
        found = [self._read(key, SaveRecord) for key in listed]
        return sorted((one for one in found if one is not None), key=lambda one: one.created_at)

    def delete_save(self, record: SaveRecord) -> None:
        """Deletes a named checkpoint's name; versions belong to retention."""
        self.bucket.delete(_save_key(record.model, record.kind, record.name))

    def checkpoint(self, path: str, *, now: float) -> SaveRecord:
        """Returns the checkpoint of a ``tinker://`` path; raises `MissingError` without one."""
        found = _PATH.match(path)
        record = None
        if found is not None and _MODEL.match(found[1]):
            kind: SaveKind = "weights" if found[2] == "weights" else "sampler_weights"
            record = self.save(found[1], kind, found[3])
        if record is None or (record.expires_at is not None and record.expires_at <= now):
            raise MissingError(
                f"there is no checkpoint {path[:300]!r}" + (", it expired" if record else ""),
                hint="save_state and save_weights_for_sampler return the paths that exist",
                run=self.url,
            )
        return record

    def put_sampler(self, session: str, number: int, record: SamplerRecord) -> None:
        """Stores what a sampling session samples from."""
        self.bucket.put(keys.tinker_sampler(session, number), encode_json(record))

    def sampler(self, session: str, number: int) -> SamplerRecord | None:
        """Returns what a sampling session samples from."""
        return self._read(keys.tinker_sampler(session, number), SamplerRecord)

    def _read(self, key: str, kind: type[R]) -> R | None:
        data = self.bucket.get(key, limit=MAX_RECORD_BYTES)
        return None if data is None else decode_json(data, kind, run=self.url, key=key)


def _save_key(model: str, kind: SaveKind, name: str) -> str:
    digest = blake3(f"{kind}/{name}".encode("utf-8", "surrogatepass")).hexdigest()
    return keys.tinker_save(model_name(model), digest)
