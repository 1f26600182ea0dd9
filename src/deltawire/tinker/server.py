"""The server's verbs: sessions, models, sampling sessions, checkpoints, futures.

`deltawire.tinker.app` carries them over HTTP. Futures are named after what they answer, so that a
restarted server knows them: ``MODEL:NUMBER`` for training, ``SAMPLER:NUMBER`` for samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from deltawire.errors import InputError
from deltawire.store import Bucket
from deltawire.sync import find_run, newest_version
from deltawire.tinker import requests
from deltawire.tinker.model_runs import ModelOptions, lora_targets, start_run
from deltawire.tinker.models import HostedModel
from deltawire.tinker.requests import (
    CreateModel,
    CreateSampler,
    CreateSession,
    LoadWeights,
    LoraConfig,
    SampleRequest,
    read_json,
)
from deltawire.tinker.rest import RestAnswers
from deltawire.tinker.results import RequestResult
from deltawire.tinker.samplers import SamplerOptions, Samplers
from deltawire.tinker.state import (
    MissingError,
    ModelRecord,
    SamplerRecord,
    ServerRecord,
    ServerState,
    SessionRecord,
    model_name,
    sampler_of,
)

HOLD_S = 30.0
"""How long a call for a result is held; the client waits 45 s."""


class ExpiredError(InputError):
    """The answer to a request is no longer there: ask again."""


@dataclass(frozen=True, kw_only=True)
class TinkerOptions:
    """The offer of a server: the base model in ``directory``, under ``names`` besides its own.

    With ``lora`` a model is the adapter that its client asks for, otherwise all parameters are
    trained, whatever adapter it asks for. ``frozen_head`` accepts adapters for the unembedding
    layer, and leaves it frozen. ``stable_reinforce`` is the loss that is computed for the one of
    that name. At most ``models`` are held in memory; others wait in the bucket. ``ranks`` processes
    compute for each.
    """

    directory: Path
    names: tuple[str, ...] = ()
    lora: bool = False
    frozen_head: bool = False
    stable_reinforce: str = ""
    models: int = 4
    checkpoint_every: int = 16
    ranks: int = 1
    tokenizer: str = ""
    sampling: SamplerOptions = field(default_factory=SamplerOptions)

    @property
    def of_models(self) -> ModelOptions:
        """Returns what models need to know."""
        return ModelOptions(
            directory=self.directory,
            checkpoint_every=self.checkpoint_every,
            ranks=self.ranks,
            frozen_head=self.frozen_head,
            stable_reinforce=self.stable_reinforce,
        )


class TinkerServer:
    """A server on a bucket.

    Example::

        server = TinkerServer(bucket, TinkerOptions(directory=Path("models/qwen3-0.6b")))
        await server.start()
        session = await server.create_session(b"{}")
    """

    def __init__(self, bucket: Bucket, options: TinkerOptions) -> None:
        self.options = options
        self.state = ServerState(bucket)
        self.samplers = Samplers(self.state, options.sampling)
        self.rest = RestAnswers(self.state, last_used=self._last_used)
        self._bucket = bucket
        self._models: OrderedDict[str, HostedModel] = OrderedDict()
        self._opening = asyncio.Lock()
        self._sessions: set[str] = set()

    def _last_used(self, model: str) -> float | None:
        hosted = self._models.get(model)
        return None if hosted is None else time.time() - (time.monotonic() - hosted.used_at)

    @property
    def names(self) -> list[str]:
        """The names by which clients may ask for the base model, the advertised one first."""
        directory = self.options.directory
        whole = directory.resolve()
        own = [*self.options.names, "/".join(whole.parts[-2:]), str(directory), str(whole)]
        return list(dict.fromkeys([*own, whole.name]))

    async def start(self) -> None:
        """Checks that bucket and model directory fit together; with full parameters, starts the
        run, so that what is wrong with the model is found at once. Raises `InputError`."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        mine = ServerRecord(model=fingerprint(self.options.directory))
        if not self.state.claimed and find_run(self._bucket) is not None:
            raise InputError(
                "the run in this bucket was not started by deltawire tinker",
                hint="choose another bucket; TrainingClient.load continues this run",
                run=self.state.url,
            )
        if self.state.claim(mine) != mine:
            raise InputError(
                f"this bucket was served with another model than {self.options.directory}",
                hint="give --model the directory that it was started with, or another bucket",
                run=self.state.url,
            )
        if not self.options.lora:
            self._need_root()

    def _need_root(self, lora: LoraConfig | None = None) -> None:
        """Makes sure that there is a run in the bucket itself."""
        record = ModelRecord(id="", folder="", base_model="", created_at=time.time(), lora=lora)
        start_run(self._bucket, record, self.options.of_models)

    async def close(self) -> None:
        """Stores the state of every model, and closes everything."""
        await self.samplers.close()
        for model in self._models.values():
            await model.close(save=True)
        self._models.clear()

    async def create_session(self, body: bytes) -> dict[str, Any]:
        """Opens a session under an id that was never used."""
        request = read_json(body, CreateSession)
        session = secrets.token_hex(16)
        record = SessionRecord(created_at=time.time(), metadata=request.user_metadata)
        await asyncio.to_thread(self.state.put_session, session, record)
        self._sessions.add(session)
        notices = []
        if not self.options.lora:
            notices.append(
                "this server trains all parameters of a model, whatever lora_config says"
            )
        if loss := self.options.stable_reinforce:
            notices.append(f"this server computes {loss} for the loss stable_reinforce")
        notice = "; ".join(notices) or None
        return {"type": "create_session", "session_id": session, "info_message": notice}

    async def finish_session(self, session: str, reason: str) -> dict[str, Any]:
        """Ends a session and takes its models out of memory."""
        record = await asyncio.to_thread(self.state.session, session)
        ended = SessionRecord(
            created_at=record.created_at, metadata=record.metadata, finished=reason[:100] or "ended"
        )
        await asyncio.to_thread(self.state.put_session, session, ended)
        self._sessions.discard(session)
        for name in [one for one in self._models if one.startswith(f"{session}:")]:
            await self._models.pop(name).close(save=True)
        return {}

    async def submit(self, kind: str, body: bytes) -> dict[str, Any]:
        """Accepts a training request; returns its future once the request is stored."""
        model, number = await asyncio.to_thread(requests.address, kind, body)
        if number == 0:
            await self._create(kind, model, body)
        elif number < 0 or number > requests.MAX_STEPS:
            raise InputError(f"seq_id is {number}", hint="numbers count from 1")
        else:
            hosted = await self._model(model)
            await hosted.accept(number, kind, body)
        return {"request_id": f"{model}:{number}", "model_id": model}

    async def refuse(self, call: str, body: bytes) -> dict[str, Any]:
        """Refuses a call that the server does not have. If the request names a model and a number,
        it takes its place in the model's order, so that the client's next requests do not wait for
        it; the refusal is then the result of the future that this returns. Raises `InputError`
        otherwise."""
        refusal = requests.refusal(call)
        if call in requests.KINDS or len(call) > requests.MAX_CALL:
            raise refusal
        try:
            model, number = requests.address(call, body)
            known = number > 0 and await asyncio.to_thread(self.state.model, model) is not None
        except InputError:
            known = False
        if not known:
            raise refusal
        return await self.submit(call, body)

    async def _create(self, kind: str, model: str, body: bytes) -> None:
        request = requests.decode(kind, body)
        if not isinstance(request, CreateModel | LoadWeights):
            raise InputError("seq_id is 0", hint="numbers count from 1")
        session = await self._live_session(request.session_id)
        digest = await asyncio.to_thread(requests.canonical_digest, kind, body)
        async with self._opening:
            record = await asyncio.to_thread(self.state.model, model)
            if record is None:
                record = await asyncio.to_thread(self._describe, model, request)
                await asyncio.to_thread(self.state.put_request, model, 0, kind, body)
                await asyncio.to_thread(self.state.put_model, record)
            else:
                stored = await asyncio.to_thread(self.state.request, model, 0)
                if stored is None or digest != requests.canonical_digest(stored.kind, stored.body):
                    raise InputError(
                        f"model {request.model_seq_id} of session {session} is another one",
                        hint="open a new training client",
                    )
        await self._model(model)

    def _describe(self, model: str, request: CreateModel | LoadWeights) -> ModelRecord:
        """Decides what a new model is; raises `InputError` for what cannot be honored."""
        if request.base_model or isinstance(request, CreateModel):
            self._require_base(request.base_model)
        lora: LoraConfig | None = None
        source, optimizer, name = "", False, request.base_model
        if isinstance(request, LoadWeights):
            saved = self.state.checkpoint(request.path, now=time.time())
            if saved.kind != "weights":
                raise InputError(
                    f"{request.path} holds weights for sampling only",
                    hint="load a checkpoint of save_state",
                )
            origin = self.state.model(saved.model)
            assert origin is not None
            lora, optimizer = origin.lora, request.optimizer
            name = name or origin.base_model
            source = f"{origin.folder}@{saved.version}"
        elif self.options.lora:
            lora = self._lora(request.lora_config)
        free = newest_version(self._bucket) is None or self._root_fits(lora)
        folder = "" if free and not self.state.root_is_taken() else f"models/{model_name(model)}"
        return ModelRecord(
            id=model,
            folder=folder,
            base_model=name,
            created_at=time.time(),
            lora=lora,
            source=source,
            optimizer=optimizer,
            metadata=request.user_metadata,
        )

    def _root_fits(self, lora: LoraConfig | None) -> bool:
        run = find_run(self._bucket)
        return (
            run is not None
            and lora is None
            and not run.config.get("train", {})
            .get("adapter", {})
            .get("kind", "none")
            .startswith("lora")
        )

    def _lora(self, wanted: LoraConfig | None) -> LoraConfig:
        if wanted is None:
            raise InputError("this server trains LoRA adapters", hint="give a lora_config")
        if self.options.frozen_head:
            wanted = msgspec.structs.replace(wanted, train_unembed=False)
        lora_targets(self.options.of_models, wanted)
        return wanted

    def _require_base(self, name: str) -> None:
        if name not in self.names:
            raise InputError(
                f"there is no base model {name[:200]!r} here",
                hint=f"this server has {', '.join(self.names)}; --name adds a name",
            )

    async def _live_session(self, session: str) -> str:
        if session not in self._sessions:
            record = await asyncio.to_thread(self.state.session, session)
            if record.finished:
                raise InputError(f"session {session} is finished", hint="create another one")
            self._sessions.add(session)
        return session

    async def _model(self, model: str) -> HostedModel:
        """Returns a model, opened again from the bucket if need be."""
        model_name(model)
        async with self._opening:
            hosted = self._models.get(model)
            if hosted is not None and hosted.failed is not None:
                await self._models.pop(model).close(save=False)
                hosted = None
            if hosted is None:
                record = await asyncio.to_thread(self.state.model, model)
                if record is None:
                    raise MissingError(f"there is no model {model[:100]!r}", hint="create it first")
                await self._make_room()
                hosted = HostedModel(self.state, record, self.options.of_models)
                await hosted.open()
                self._models[model] = hosted
            self._models.move_to_end(model)
            return hosted

    async def _make_room(self) -> None:
        """Takes the least recently used models without work out of memory."""
        for name in list(self._models):
            if len(self._models) < self.options.models:
                return
            if self._models[name].idle:
                await self._models.pop(name).close(save=True)

    async def create_sampler(self, body: bytes) -> dict[str, Any]:
        """Opens a sampling session on saved weights, or on the base model."""
        request = read_json(body, CreateSampler)
        session = await self._live_session(request.session_id)
        record = await asyncio.to_thread(self._sampler_record, request)
        number = request.sampling_session_seq_id
        known = await asyncio.to_thread(self.state.sampler, session, number)
        if known is None:
            await asyncio.to_thread(self.state.put_sampler, session, number, record)
        elif known != record:
            raise InputError(
                f"sampling session {number} of session {session} is another one",
                hint="a retry must repeat its request",
            )
        return {
            "type": "create_sampling_session",
            "sampling_session_id": f"{session}:sample:{number}",
        }

    def _sampler_record(self, request: CreateSampler) -> SamplerRecord:
        if request.model_path:
            saved = self.state.checkpoint(request.model_path, now=time.time())
            origin = self.state.model(saved.model)
            assert origin is not None
            return SamplerRecord(
                folder=origin.folder,
                version=saved.version,
                kind="snapshot",
                base_model=origin.base_model,
                model_path=request.model_path,
            )
        self._require_base(request.base_model)
        self._need_root()
        return SamplerRecord(folder="", version=0, kind="snapshot", base_model=request.base_model)

    async def sampler(self, sampler: str) -> dict[str, Any]:
        """Describes a sampling session."""
        record = await self._sampler(sampler)
        return {
            "sampler_id": sampler,
            "base_model": record.base_model,
            "model_path": record.model_path or None,
        }

    async def _sampler(self, sampler: str) -> SamplerRecord:
        record = await asyncio.to_thread(self.state.sampler, *sampler_of(sampler))
        if record is None:
            raise MissingError(f"there is no sampling session {sampler[:100]!r}")
        return record

    async def sample(self, body: bytes) -> dict[str, Any]:
        """Starts a sample; returns its future."""
        request = await asyncio.to_thread(read_json, body, SampleRequest)
        if not request.sampling_session_id:
            raise InputError(
                "a sample has no sampling_session_id", hint="create a sampling session first"
            )
        sampler, number = request.sampling_session_id, request.seq_id
        record = await self._sampler(sampler)
        digest = await asyncio.to_thread(requests.canonical_digest, "asample", body)
        self.samplers.submit(sampler, number, digest, record, request)
        name = f"{sampler}:{number}"
        ids = [f"{name}:{place}" for place in range(request.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def retrieve(self, request_id: str, *, hold_s: float = HOLD_S) -> RequestResult | None:
        """Waits at most ``hold_s`` seconds for a future; None if it is not done.

        Raises `InputError` for a future that there is not, `ExpiredError` for a sample of a server
        that was restarted since: clients submit it again.
        """
        owner, _, last = request_id.rpartition(":")
        if not last.isdecimal() or len(last) > 19:
            raise InputError(f"there is no request {request_id[:200]!r}")
        if ":sample:" in owner:
            if not self.samplers.knows(owner, int(last)):
                raise ExpiredError(f"the sample {request_id[:200]} is no longer known")
            return await self.samplers.result(owner, int(last), hold_s=hold_s)
        hosted = await self._model(owner)
        return await hosted.result(int(last), hold_s=hold_s)

    async def model_info(self, model: str) -> dict[str, Any]:
        """Describes a model as ``get_info`` does."""
        record = await asyncio.to_thread(self._record, model)
        tokenizer = self.options.tokenizer or record.base_model
        return {
            "type": "get_info",
            "model_id": model,
            "model_data": {
                "model_name": record.base_model,
                "tokenizer_id": tokenizer,
                "arch": "transformer",
            },
            "is_lora": record.lora is not None,
            "lora_rank": record.lora.rank if record.lora else None,
            "model_name": record.base_model,
        }

    def _record(self, model: str) -> ModelRecord:
        record = self.state.model(model)
        if record is None:
            raise MissingError(f"there is no model {model[:100]!r}", hint="create it first")
        return record


def fingerprint(directory: Path) -> str:
    """Returns what tells one model directory from another: its configuration, and the names and
    sizes of its weights. Raises `InputError` if it is none."""
    from deltawire.export.models import check_directory

    check_directory(directory)
    found = blake3((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        with contextlib.suppress(OSError):
            found.update(f"{file.name} {file.stat().st_size}".encode())
    return found.hexdigest()
