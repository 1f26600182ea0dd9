"""Exporting: all that a run's bucket holds of one user, as rows of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import msgspec

from deltawire.live.erasure.stored_rows import require_rows_of
from deltawire.rl.control.lineages import require_lineages
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import require_agreed
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback
from deltawire.wire.lineage import MAX_FORGOTTEN_BYTES, Forgotten, Lineage
from deltawire.wire.live_secret import MAX_GENERATION_BYTES, Readmitted
from deltawire.wire.objects import decode_json
from deltawire.wire.reference_scores import MAX_SCORES_BYTES, arrays_of, decode_scores
from deltawire.wire.rollouts import MAX_GROUP_BYTES, decode_group


def export_user(bucket: Bucket, users: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields each stored row of a user with these pseudonyms, its member ``kind`` first:
    ``answer``, ``feedback``, ``learned`` (an answer's place, reward and advantage in a group),
    ``trajectory`` (what that group and its reference hold of the answer), ``forgotten`` and
    ``readmitted``.

    Raises `RetryError` if something cannot be read that may be the user's.
    """
    named = frozenset(users)
    for gateway, answer in require_rows_of(bucket, "captures", Capture, named):
        yield {"kind": "answer", "gateway": gateway, **_answer(answer)}
    for gateway, report in require_rows_of(bucket, "feedback", Feedback, named):
        row = msgspec.to_builtins(report)
        row["report"] = row.pop("kind")
        yield {"kind": "feedback", "gateway": gateway, **row}
    for lineage in require_lineages(bucket, users=users):
        yield from _learned(bucket, lineage, users)
    for user in sorted(users):
        yield from _records(bucket, user)


def _answer(row: Capture) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in row.__struct_fields__}
    return found | {
        "prompt": row.prompt_ids.tolist(),
        "tokens": row.token_ids.tolist(),
        "logprobs": row.token_logprobs.tolist(),
        "spans": [list(span) for span in row.spans],
        "text": msgspec.json.decode(row.text) if row.text else None,
    }


def _learned(bucket: Bucket, lineage: Lineage, users: Collection[str]) -> Iterator[dict[str, Any]]:
    place = (lineage.worker, lineage.sequence)
    named = {"worker": lineage.worker, "sequence": lineage.sequence}
    read = partial(require_agreed, bucket, so="nothing was exported")
    key = keys.rollout(*place)
    data = read(key, limit=MAX_GROUP_BYTES)
    group = None if data is None else decode_group(data, run=bucket.url, key=key)
    key = keys.reference(*place)
    data = read(key, limit=MAX_SCORES_BYTES)
    scores = None if data is None else arrays_of(decode_scores(data, run=bucket.url, key=key))
    for number, one in enumerate(lineage.answers):
        if one.user not in users:
            continue
        facts = {name: getattr(one, name) for name in one.__struct_fields__}
        yield {"kind": "learned", **named, "at": lineage.at, **facts}
        if group is None or number >= len(group.trajectories):
            continue
        trajectory = group.trajectories[number]
        yield {
            "kind": "trajectory",
            **named,
            "answer": one.answer,
            "prompt": group.prompt_of(trajectory).tolist(),
            "tokens": trajectory.tokens_T.tolist(),
            "logprobs": trajectory.logprobs_T.tolist(),
            "versions": trajectory.versions_T.tolist(),
            "reward": trajectory.reward,
            "finish": trajectory.finish,
            "probes": dict(trajectory.probes),
            "reference": [] if scores is None else scores[number].tolist(),
        }


def _records(bucket: Bucket, user: str) -> Iterator[dict[str, Any]]:
    read = partial(require_agreed, bucket, so="nothing was exported")
    key = keys.live_forgotten(user)
    if (data := read(key, limit=MAX_FORGOTTEN_BYTES)) is not None:
        record = decode_json(data, Forgotten, run=bucket.url, key=key)
        yield {"kind": "forgotten", **msgspec.to_builtins(record)}
    key = keys.live_readmitted(user)
    if (data := read(key, limit=MAX_GENERATION_BYTES)) is not None:
        back = decode_json(data, Readmitted, run=bucket.url, key=key)
        yield {"kind": "readmitted", "user": user, **msgspec.to_builtins(back)}
