"""The server's answers to Tinker's `RestClient`: training runs, checkpoints, sessions.

All of them are read from the bucket, so that they are the same after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from deltawire.errors import InputError
from deltawire.tinker.models import release_unused
from deltawire.tinker.requests import check_ttl
from deltawire.tinker.state import MissingError, ModelRecord, SaveRecord, ServerState

MAX_PAGE = 1000
"""The most entries of one page of a list."""

_CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler"}


class RestAnswers:
    """Answers from the ``state`` of a server. ``last_used`` returns when a model was last asked
    for something, in seconds since 1970, or None if it is not in memory.

    Example::

        answers = RestAnswers(state, last_used=lambda model: None)
        found = await answers.training_runs({"limit": "20", "offset": "0"})
    """

    def __init__(self, state: ServerState, *, last_used: Callable[[str], float | None]) -> None:
        self._state = state
        self._last_used = last_used

    async def training_runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Lists a page of the models, newest first."""
        limit, offset = _page(query)
        records = await asyncio.to_thread(lambda: [*self._state.models()])
        records.sort(key=lambda one: (-one.created_at, one.id))
        page = records[offset : offset + limit]
        return {
            "training_runs": [await asyncio.to_thread(self._run, one) for one in page],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(records)},
        }

    async def training_run(self, model: str) -> dict[str, Any]:
        """Describes a model."""
        return await asyncio.to_thread(lambda: self._run(self._record(model)))

    def _run(self, record: ModelRecord) -> dict[str, Any]:
        saves = self._live_saves(record.id)
        used = self._last_used(record.id)
        if used is None:
            used = max([record.created_at, *(one.created_at for one in saves)])
        last = {kind: [one for one in saves if one.kind == kind] for kind in _CHECKPOINT_TYPES}
        return {
            "training_run_id": record.id,
            "base_model": record.base_model,
            "model_owner": "deltawire",
            "is_lora": record.lora is not None,
            "lora_rank": record.lora.rank if record.lora else None,
            "last_request_time": _time(used),
            "last_checkpoint": _described(last["weights"][-1:]),
            "last_sampler_checkpoint": _described(last["sampler_weights"][-1:]),
            "user_metadata": record.metadata,
        }

    async def user_checkpoints(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Lists a page of the checkpoints of all models, newest first."""
        limit, offset = _page(query)

        def read() -> list[SaveRecord]:
            saves = [save for one in self._state.models() for save in self._live_saves(one.id)]
            return sorted(saves, key=lambda one: (-one.created_at, one.path))

        saves = await asyncio.to_thread(read)
        return {
            "checkpoints": [_described([one]) for one in saves[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(saves)},
        }

    async def checkpoints(self, model: str) -> dict[str, Any]:
        """Lists a model's checkpoints, oldest first."""
        await asyncio.to_thread(self._record, model)
        saves = await asyncio.to_thread(self._live_saves, model)
        return {"checkpoints": [_described([one]) for one in saves]}

    async def weights_info(self, path: str) -> dict[str, Any]:
        """Describes what a checkpoint was trained from."""
        saved = await asyncio.to_thread(self._state.checkpoint, path, now=time.time())
        record = await asyncio.to_thread(self._record, saved.model)
        lora = record.lora
        return {
            "base_model": record.base_model,
            "is_lora": lora is not None,
            "lora_rank": lora.rank if lora else None,
            "train_unembed": lora.train_unembed if lora else None,
            "train_mlp": lora.train_mlp if lora else None,
            "train_attn": lora.train_attn if lora else None,
        }

    async def delete_checkpoint(self, model: str, kind: str, name: str) -> None:
        """Deletes a named checkpoint; the versions stay."""
        record, saved = await self._named(model, kind, name)
        await asyncio.to_thread(self._state.delete_save, saved)
        await asyncio.to_thread(release_unused, self._state, record, saved)

    async def set_ttl(self, model: str, kind: str, name: str, ttl_seconds: int | None) -> None:
        """Lets a checkpoint end ``ttl_seconds`` from now, or never."""
        check_ttl(ttl_seconds)
        _, saved = await self._named(model, kind, name)
        ends = None if ttl_seconds is None else time.time() + ttl_seconds
        renewed = msgspec.structs.replace(saved, expires_at=ends)
        await asyncio.to_thread(self._state.put_save, renewed)

    async def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Lists a page of the ids of sessions, newest first."""
        limit, offset = _page(query)
        found = [*await asyncio.to_thread(self._state.sessions)]
        return {"sessions": found[offset : offset + limit]}

    async def session(self, session: str) -> dict[str, Any]:
        """Describes a session: its models and sampling sessions."""
        record = await asyncio.to_thread(self._state.session, session)
        models = await asyncio.to_thread(lambda: [*self._state.models(session)])
        samplers = await asyncio.to_thread(self._state.sampler_ids, session)
        return {
            "training_run_ids": [one.id for one in models],
            "sampler_ids": samplers,
            "user_metadata": record.metadata,
        }

    async def _named(self, model: str, kind: str, name: str) -> tuple[ModelRecord, SaveRecord]:
        record = await asyncio.to_thread(self._record, model)
        path = f"tinker://{model}/{kind}/{name}"
        return record, await asyncio.to_thread(self._state.checkpoint, path, now=time.time())

    def _record(self, model: str) -> ModelRecord:
        record = self._state.model(model)
        if record is None:
            raise MissingError(f"there is no model {model[:100]!r}", hint="create it first")
        return record

    def _live_saves(self, model: str) -> list[SaveRecord]:
        now = time.time()
        saves = self._state.saves(model)
        return [one for one in saves if one.expires_at is None or one.expires_at > now]


def _page(query: Mapping[str, str]) -> tuple[int, int]:
    """Returns limit and offset of a list; raises `InputError`."""
    if query.get("project_id"):
        raise InputError("there are no projects here", hint="leave project_id out")
    found = []
    for name, default, most in (("limit", 20, MAX_PAGE), ("offset", 0, 1 << 31)):
        text = query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise InputError(f"{name} is {text[:40]!r}", hint="give a whole number from 0")
        found.append(min(int(text), most))
    return found[0], found[1]


def _described(saves: list[SaveRecord]) -> dict[str, Any] | None:
    if not saves:
        return None
    one = saves[0]
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": _CHECKPOINT_TYPES[one.kind],
        "time": _time(one.created_at),
        "tinker_path": one.path,
        "user_metadata": one.metadata,
        "expires_at": None if one.expires_at is None else _time(one.expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
