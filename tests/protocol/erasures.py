"""The world of erasures: users who are forgotten while gateways upload what waits in their spools.

Segments lie under ``live/captures/``; the spool is a list of rows in place of a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from itertools import count
from typing import Any

from exploring import World
from stepping import Process, ScriptedBucket
from worlds import History

from deltawire.live.capture.uploader import SpooledStream, SpoolUploader
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.forgotten import forgotten_users
from deltawire.wire import keys
from deltawire.wire.captures import NOT_STORED, Capture, decode_segment, encode_row, encode_segment

STORED, WAITING = 0, 1
"""The numbers of a segment in the bucket, and of one in the gateway's spool."""
GATEWAY = "g"


def pseudonym(name: str) -> str:
    return name.encode().hex().zfill(32)


def rows(*users: str) -> list[bytes]:
    """One answer of each user."""
    return [
        encode_row(
            Capture(
                answer=f"{number:032x}",
                conversation=f"{number:032x}",
                turn=0,
                user=pseudonym(user),
                arm="serving",
                propensity=1.0,
                at=1.0,
                receipt="",
                unusable=NOT_STORED,
                drawn=1,
            )
        )
        for number, user in enumerate(users)
    ]


class WaitingRows:
    """A spool with one segment."""

    def __init__(self, users: Sequence[str]) -> None:
        self._segments = {WAITING: rows(*users)}

    def seal(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def sealed(self) -> list[int]:
        return list(self._segments)

    def read(self, number: int) -> list[bytes]:
        return self._segments[number]

    def remove(self, number: int) -> None:
        del self._segments[number]


def gateway(users: Sequence[str], reading: Callable[..., Any]) -> Process:
    """Uploads a segment with a row of each of ``users``, and says so. It gets who was forgotten
    from ``reading``."""

    def body(bucket: ScriptedBucket) -> None:
        stream = SpooledStream(WaitingRows(users), keys.live_captures, Capture)  # type: ignore[arg-type]
        forgotten = reading(partial(forgotten_users, bucket))
        uploader = SpoolUploader(bucket, GATEWAY, [stream], forgotten=forgotten)
        for _ in range(2):
            if uploader.upload():
                bucket.note("uploaded")
                return

    return Process("gateway", body, writes=(keys.LIVE_CAPTURES,))


def every_time(read: Callable[[], frozenset[str]]) -> Callable[[], frozenset[str]]:
    return read


def first_time(read: Callable[[], frozenset[str]]) -> Callable[[], frozenset[str]]:
    """A gateway that asks once: its later looks show what the first one did."""
    return cache(read)


def once_a_look(read: Callable[[], frozenset[str]]) -> Callable[[], frozenset[str]]:
    """A gateway that lists once for each of its looks, of which all but the first ask twice."""
    calls = count()
    found = frozenset[str]()

    def forgotten() -> frozenset[str]:
        nonlocal found
        if (number := next(calls)) % 2 or number == 0:
            found = read()
        return found

    return forgotten


def eraser(history: History, user: str) -> Process:
    """Forgets a user, and says so once everything is deleted."""

    def body(bucket: ScriptedBucket) -> None:
        forget_user(bucket, history.run, pseudonym(user))
        bucket.note("forgot", user)

    written = (keys.LIVE_FORGOTTEN, keys.LIVE_CAPTURES, keys.LIVE_FEEDBACK)
    return Process(f"eraser of {user}", body, writes=written)


def invariant(objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
    """Checks that nothing is left of a user who was forgotten, once the gateway has uploaded and
    all erasures that began have ended: one that stopped must be run again."""
    stated = [note for found in notes.values() for note in found]
    ended = {keys.live_forgotten(pseudonym(note[1])) for note in stated if note[0] == "forgot"}
    began = {key for key in objects if key.startswith(keys.LIVE_FORGOTTEN)}
    if ("gateway" in notes and ("uploaded",) not in stated) or began != ended:
        return None
    for key, data in objects.items():
        if not key.startswith(keys.LIVE_CAPTURES):
            continue
        number = keys.trailing_number(key) or 0
        stored = decode_segment(data, Capture, gateway=GATEWAY, number=number, run="", key=key)
        found = {row.user for row in stored}
        for note in stated:
            if note[0] == "forgot" and pseudonym(note[1]) in found:
                return f"a row of {note[1]} is there, who was forgotten"
    return None


def erasures(
    *,
    users: Sequence[str] = ("ann",),
    uploading: bool = True,
    reading: Callable[..., Any] = every_time,
) -> World:
    """Erasures of these users at the same time, rows of them that are stored, and a gateway that
    uploads more."""
    history = History([10])
    stored = encode_segment(GATEWAY, STORED, rows(*users, "zoe"))
    objects = {**history.objects(), keys.live_captures(GATEWAY, STORED): stored}
    processes = [eraser(history, user) for user in users]
    if uploading:
        processes.append(gateway([*users, "zoe"], reading))
    return World(objects, processes, invariant)
