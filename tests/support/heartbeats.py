"""Heartbeats for tests."""

from __future__ import annotations

from typing import Any

from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat, WorkerStatus

_WORKER = frozenset(WorkerStatus.__struct_fields__)


def make_heartbeat(process: str, role: str = "worker", **changes: Any) -> Heartbeat:
    """A heartbeat; members of `WorkerStatus` among ``changes`` go to its worker part. Other roles
    have an ``alarm`` themselves."""
    worker = {"phase": "sampling", "version": 0, "digest": ""}
    of_worker = _WORKER if role == "worker" else _WORKER - {"alarm"}
    worker |= {name: changes.pop(name) for name in list(changes) if name in of_worker}
    fields: dict[str, Any] = {
        "process": process,
        "role": role,
        "nonce": "n",
        "lease": 0,
        "supervised": True,
        "host": "h",
        "pid": 1,
        "started_at": 0.0,
        "at": 0.0,
        "number": 0,
        "doing": "sample",
        "quiet_s": 0.0,
        "allowed_s": 5.0,
        "worker": WorkerStatus(**worker) if role == "worker" else None,
    }
    return Heartbeat(**{**fields, **changes})


def put_heartbeat(bucket: Bucket, process: str, role: str = "worker", **changes: Any) -> Heartbeat:
    """Store a heartbeat as its process would."""
    made = make_heartbeat(process, role, **changes)
    bucket.put(keys.heartbeat(process), encode_json(made))
    return made
