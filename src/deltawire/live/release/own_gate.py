"""Own gate: scores of versions by the operator's command or URL, for runs without an evaluator.

::

    decide ──▶ the candidate and the serving version ──▶ COMMAND or URL, in a thread
       ▲                                                   one JSON line per item: id, score
       └── `SetScore` of both, paired by item ◀────────────┘

A command gets ``DELTAWIRE_RUN``, ``DELTAWIRE_VERSION`` and ``DELTAWIRE_DIGEST`` in its environment;
a URL gets the same as a JSON object by POST (``run``, ``version``, ``digest``). A version is
measured once as a candidate and once more when it serves: the first result let it pass, so it is
too good. Nothing of an answer that breaks a rule counts.
"""

from __future__ import annotations

import http.client
import os
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from deltawire.display import safe_line
from deltawire.errors import DeltawireError, InputError
from deltawire.live.release.bounded_post import post
from deltawire.live.release.paired_gate import SetScore
from deltawire.wire.decisions import ServedVersion

SET = "items"
"""The name of the set of the gate that holds the scores."""
MAX_BYTES = 32 << 20
MAX_ITEMS = 100_000
LEAST_ITEMS = 2
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0
_TAIL_BYTES = 400

Measure = Callable[[ServedVersion], Mapping[str, float]]


class _Item(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=256)] | int
    score: Annotated[float, Meta(ge=0, le=1)]


class OwnGate:
    """The scores of versions that were measured so far.

    ``measure`` returns the score of each item for a version. `poll` starts it in a thread for what
    is missing, and `scores` has what is known. ``alarm`` is why the last measurement does not
    count; it is tried again after a minute, and later after longer pauses.

    Example::

        gate = OwnGate(command_measure("./score.sh", run_url))
        gate.poll(serving, candidate)
        gate.scores()
    """

    def __init__(
        self,
        measure: Measure,
        *,
        stopping: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alarm = ""
        self._stopping = stopping or threading.Event()
        self._measure = measure
        self._clock = clock
        self._found: dict[tuple[int, bool], Mapping[str, float]] = {}
        """Scores by item, of a version, and whether it served."""
        self._items: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._pause_s = FIRST_PAUSE_S
        self._next_at = float("-inf")

    def poll(self, serving: ServedVersion, candidate: ServedVersion) -> None:
        """Measures the first of the two that has no scores yet, if nothing is under way."""
        if self.measuring:
            return
        compared = {serving.version, candidate.version}
        self._found = {one: scores for one, scores in self._found.items() if one[0] in compared}
        wanted = [(serving, True), (candidate, False)]
        missing = [one for one in wanted if (one[0].version, one[1]) not in self._found]
        if not missing or self._clock() < self._next_at:
            return
        self._thread = threading.Thread(
            target=self._take, args=missing[0], name="own-gate", daemon=True
        )
        self._thread.start()

    @property
    def measuring(self) -> bool:
        """True while a measurement is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for a measurement that is under way."""
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)

    def close(self) -> None:
        """Ends a command that is under way, if the gate and the measurement share ``stopping``."""
        self._stopping.set()
        self.wait(timeout_s=5.0)

    def scores(self) -> dict[int, dict[str, SetScore]]:
        """Returns the scores by version; items come in the same order for all of them."""
        measured, order = dict(self._found), sorted(self._items)
        found: dict[int, dict[str, SetScore]] = {}
        for version in {version for version, _ in measured}:
            first, again = (
                tuple(scores[name] for name in order)
                for scores in (
                    measured.get((version, served), dict.fromkeys(order, -1.0))
                    for served in (False, True)
                )
            )
            # -1 is no result: a version that served from the start was never a candidate.
            known = again if first[0] < 0 else first
            accuracy = sum(known) / len(known)
            found[version] = {SET: SetScore(accuracy, known, () if again[0] < 0 else again)}
        return found

    def _take(self, version: ServedVersion, served: bool) -> None:
        try:
            scores = self._measure(version)
            self._check_items(scores)
        except (DeltawireError, OSError, ValueError, http.client.HTTPException) as error:
            words = error.message if isinstance(error, DeltawireError) else str(error)
            self.alarm = safe_line(f"version {version.version} cannot be measured: {words}")
            self._next_at = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        self._items = frozenset(scores)
        self._found[version.version, served] = scores
        self.alarm, self._pause_s = "", FIRST_PAUSE_S

    def _check_items(self, scores: Mapping[str, float]) -> None:
        """Raises `InputError` for other items than those of earlier measurements: a version must
        not gain by leaving out what it fails."""
        if self._items and self._items != scores.keys():
            missing, new = len(self._items - scores.keys()), len(scores.keys() - self._items)
            raise InputError(
                f"{missing} items are missing and {new} are new",
                hint="after a change of the items, start deltawire live decide again",
            )


def measure_by(
    gate: str, run_url: str, *, timeout_s: float, stopping: threading.Event | None = None
) -> Measure:
    """Returns the measurement by a command, or by a URL that begins with http:// or https://. A
    command ends once ``stopping`` is set.

    Raises `InputError` for a URL with credentials and for a command that cannot be split.
    """
    if gate.startswith(("http://", "https://")):
        if "@" in urlsplit(gate).netloc:
            raise InputError("the gate's URL contains credentials")
        return lambda version: parse_scores(_asked(gate, run_url, version, timeout_s))
    try:
        words = shlex.split(gate)
    except ValueError as error:
        raise InputError(f"the gate's command cannot be read: {error}") from error
    if not words:
        raise InputError("--gate is empty", hint="give a command, a URL, or none")
    stop = stopping or threading.Event()
    return lambda version: parse_scores(_run(words, run_url, version, timeout_s, stop))


def parse_scores(output: bytes) -> dict[str, float]:
    """Returns the scores by item from one JSON object per line: ``id``, and ``score`` from 0 to 1.

    Raises `InputError` for any other line, for an item that comes twice, and for fewer than
    `LEAST_ITEMS` items.
    """
    found: dict[str, float] = {}
    decoder = msgspec.json.Decoder(_Item)
    for number, line in enumerate(output.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            item = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InputError(
                f"line {number} of its output is no item: {str(error)[:200]}",
                hint='print {"id": "…", "score": 0.5} for each item, and nothing else',
            ) from error
        if str(item.id) in found:
            raise InputError(f"item {str(item.id)[:80]!r} comes twice")
        found[str(item.id)] = item.score
        if len(found) > MAX_ITEMS:
            raise InputError(f"more than {MAX_ITEMS} items")
    if len(found) < LEAST_ITEMS:
        raise InputError(f"{len(found)} items; the test needs at least {LEAST_ITEMS}")
    return found


def _run(
    words: list[str],
    run_url: str,
    version: ServedVersion,
    timeout_s: float,
    stopping: threading.Event,
) -> bytes:
    """Runs the command in a process group, and returns its output; kills all of it if it takes too
    long or prints too much."""
    environment = os.environ | {
        "DELTAWIRE_RUN": run_url,
        "DELTAWIRE_VERSION": str(version.version),
        "DELTAWIRE_DIGEST": version.digest,
    }
    try:
        process = subprocess.Popen(  # noqa: S603 - the operator's own command
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"the gate's command does not start: {error}") from error
    try:
        until = time.monotonic() + timeout_s
        output, tail = _read(process, until, stopping)
        while process.poll() is None:
            if time.monotonic() > until or stopping.is_set():
                raise InputError(f"it did not end within {timeout_s:g} s")
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # Also processes that it started.
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if process.returncode:
        said = tail.decode("utf-8", "replace").strip()
        raise InputError(f"it ended with status {process.returncode}: {said}")
    return output


def _read(
    process: subprocess.Popen[bytes], until: float, stopping: threading.Event
) -> tuple[bytes, bytes]:
    """Returns the output, and the end of what the command wrote to its standard error."""
    output, tail = bytearray(), bytearray()
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, tail)
        while selector.get_map():
            left_s = until - time.monotonic()
            if left_s <= 0 or stopping.is_set():
                raise InputError("it did not end in time")
            for key, _ in selector.select(min(left_s, 1.0)):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            del tail[:-_TAIL_BYTES]
            if len(output) > MAX_BYTES:
                raise InputError(f"it printed more than {MAX_BYTES >> 20} MiB")
    return bytes(output), bytes(tail)


def _asked(url: str, run_url: str, version: ServedVersion, timeout_s: float) -> bytes:
    body = msgspec.json.encode(
        {"run": run_url, "version": version.version, "digest": version.digest}
    )
    return post(url, body, timeout_s=timeout_s, most_bytes=MAX_BYTES)
