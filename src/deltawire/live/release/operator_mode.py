"""Operator's mode: reads and stores it, and says which decisions it allows."""

from __future__ import annotations

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.decisions import Decision
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.operator_state import MAX_OPERATOR_BYTES, OperatorState


def read_operator(bucket: Bucket, run: str) -> OperatorState:
    """Returns the operator's state; ``running`` if nobody has set one. Raises `RetryError`.

    One that cannot be read counts as ``frozen``: an operator may have stopped decisions, and
    deciding less harms nobody.
    """
    key = keys.LIVE_OPERATOR
    try:
        data = bucket.get(key, limit=MAX_OPERATOR_BYTES)
        if data is None:
            return OperatorState(run=run)
        found = decode_json(data, OperatorState, run=bucket.url, key=key)
        if found.run != run:
            raise CorruptError("the operator's state of another run", run=bucket.url, key=key)
        return found
    except CorruptError as error:
        # It may say "frozen", and a frozen run is safe: it promotes and rolls back nothing.
        return OperatorState(run=run, mode="frozen", reason=f"{key}: {error.message}"[:1024])


def store_operator(bucket: Bucket, state: OperatorState) -> None:
    """Replaces the operator's state."""
    bucket.put(keys.LIVE_OPERATOR, encode_json(state))


def allows(state: OperatorState, before: Decision | None, decision: Decision) -> bool:
    """Returns whether a process may take a decision in this mode.

    Paused, a candidate that no user has seen goes no further; a canary that is under way is judged,
    and a rollback is completed.
    """
    if state.mode != "paused":
        return state.mode == "running"
    seen = before is not None and bool(before.share)
    return seen or decision.verdict not in ("gate", "shadow", "canary")
