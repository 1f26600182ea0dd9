"""Captures and feedback: batches of served answers, and of reports about them.

A gateway stores both in segments, ``live/captures/<gateway>/<n>`` and
``live/feedback/<gateway>/<n>``, numbered from 0. A segment's bytes are fixed before it is uploaded
for the first time, so an upload may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from deltawire.errors import CorruptError
from deltawire.wire.decisions import UpstreamName
from deltawire.wire.live_secret import MAX_GENERATIONS, Fingerprint
from deltawire.wire.objects import FORMAT, decode_packed, encode_packed, prepared
from deltawire.wire.receipts import MAX_SPANS, Arm, Pseudonym, Span
from deltawire.wire.run import Identity, Key
from deltawire.wire.user_windows import MOST_WINDOWS, UserWindow

MAX_SEGMENT_BYTES = 256 << 20
MAX_GATEWAY_BYTES = 1 << 20
"""A `GatewayState`, at most."""
MAX_ROWS = 1 << 16
MAX_TEXT = 64

Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
"""A kind of feedback: one of `KINDS`, ``event_…`` for an event of the product, ``detected_…`` for a
signal that a detector found, or ``judged_…`` for the score of a judge."""
KINDS = ("accept", "reject", "thumbs", "score", "edit_distance", "kept_share", "edit")
MAX_EDIT = 1 << 15
"""Characters of the text of an edit, at most."""
Source = Literal["client", "webhook", "detector"]
Mark = Literal["refusal", "question", "hedging", "repetition"]
FAILED, LEFT, TIMED_OUT = "error", "left", "timeout"
"""The ``finish`` of an answer that a replica failed to give, of one whose client left before its
end, and of one that had not ended when its outcome was due."""
FILTERED = "content_filter"
"""The ``finish`` of an answer that a content filter withheld, the gateway's or a provider's own."""
ENDED_EARLY = frozenset({FAILED, LEFT, TIMED_OUT})
NOT_STORED = "the user did not agree to its storing"
WITHHELD = "its text could not be redacted"
"""Why an answer is unusable of which only what judges its arm is stored."""
_Name = Annotated[str, Meta(max_length=MAX_TEXT)]
_Finite = Annotated[float, Meta(ge=-1e9, le=1e9)]


class Capture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One served answer.

    ``prompt`` and ``tokens`` are int32, ``logprobs`` (nats, of the full distribution at
    ``temperature``) float32, little-endian, as the engine stated them; ``spans`` are the versions
    that drew the tokens. An ``unusable`` answer says why it cannot be trained on, and then has no
    tokens; those that ended early have a ``finish`` of `ENDED_EARLY`. Of an answer that may not be
    stored, `NOT_STORED` or `WITHHELD`, only what judges its arm is here: user, arm, propensity,
    versions, times and ``finish``. ``marks`` are properties of the text
    (`deltawire.live.capture.marks`). ``task`` names the kind of request where the product knows it,
    ``cohort`` the group of users that the product puts this one in. ``first_s`` and ``total_s`` are
    the seconds until the first token and until the end. ``text`` is the redacted conversation as
    JSON, empty unless the deployment keeps it. ``receipt`` is the sealed receipt.
    """

    answer: Identity
    conversation: Identity
    turn: int
    user: Pseudonym = ""
    cohort: _Name = ""
    task: Annotated[str, Meta(max_length=256)] = ""
    arm: Arm
    propensity: Annotated[float, Meta(gt=0, le=1)]
    kept: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The share of users who keep the hold-back version, if this user is compared with them or is
    one of them."""
    at: float
    receipt: str
    model: Annotated[str, Meta(max_length=256)] = ""
    finish: Annotated[str, Meta(max_length=32)] = ""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    truncated: bool = False
    """Sampling was restricted to likely tokens, or penalized or biased some."""
    prompt: bytes = b""
    tokens: bytes = b""
    logprobs: bytes = b""
    spans: Annotated[list[Span], Meta(max_length=MAX_SPANS)] = []
    unusable: Annotated[str, Meta(max_length=256)] = ""
    drawn: Annotated[int, Meta(ge=0)] | None = None
    """How many tokens the answer has, where it is stored without them."""
    first_s: float = 0.0
    total_s: float = 0.0
    calls: int = 0
    broken_calls: int = 0
    marks: Annotated[list[Mark], Meta(max_length=16)] = []
    text: bytes = b""
    retried: bool = False
    """A replica failed to answer, and another one got the request."""
    upstream: UpstreamName = ""
    """The other provider whose model answered; empty for a version of the run."""

    @property
    def asked_at(self) -> float:
        """When the request came, in seconds since 1970."""
        return self.at - self.total_s

    @property
    def judged_only(self) -> bool:
        """The answer may not be stored, so the row only judges its arm."""
        return self.unusable in (NOT_STORED, WITHHELD)

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The prompt's tokens."""
        return np.frombuffer(self.prompt, "<i4")

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The answer's tokens."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def token_logprobs(self) -> NDArray[np.float32]:
        """The log-probability of each of the answer's tokens, in nats."""
        return np.frombuffer(self.logprobs, "<f4")

    @property
    def token_versions(self) -> NDArray[np.int32]:
        """The version that drew each of the answer's tokens."""
        versions = [version for version, _ in self.spans]
        return np.repeat(np.array(versions, np.int32), [count for _, count in self.spans])

    def fault(self) -> str:
        """Returns the first contradiction in a usable answer; empty if there is none, or it is
        unusable.
        """
        if self.unusable:
            return ""
        count = len(self.tokens) // 4
        if not count or not self.prompt:
            return "no tokens"
        if len(self.tokens) % 4 or len(self.prompt) % 4 or len(self.logprobs) != 4 * count:
            return "arrays of different lengths"
        if sum(length for _, length in self.spans) != count:
            return "versions that do not cover the tokens"
        if (self.token_ids < 0).any() or (self.prompt_ids < 0).any():
            return "a negative token"
        if not np.isfinite(self.token_logprobs).all() or (self.token_logprobs > 1e-3).any():
            return "log-probabilities that are none"
        return ""


class Feedback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report about an answer.

    ``id`` is the client's, or follows from the content; a gateway keeps one report of a user for
    each, by `identity`.
    ``at`` is when the reported thing happened and ``received`` when the gateway took the report,
    both in seconds since 1970. ``text`` is the better answer of an ``edit``, empty if it may not be
    stored. The other members are the receipt's.
    """

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    answer: Identity
    conversation: Identity
    user: Pseudonym = ""
    arm: Arm
    kind: Kind
    value: _Finite
    source: Source = "client"
    at: float
    received: float
    served_at: float
    recorded: bool = True
    note: Annotated[str, Meta(max_length=512)] = ""
    text: Annotated[str, Meta(max_length=MAX_EDIT)] = ""

    @property
    def identity(self) -> tuple[Source, str]:
        """The name of a report among those about its answer: no source can take another's ids."""
        return self.source, self.id


class ShadowCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one gateway over the copies of requests that a candidate answered in the shadow
    whose decision has the salt ``shadow``. Nothing of a request, an answer or a user is in them.

    In ``rose`` and ``fell``, by guardrail, are the copies that touched it when the user's answer
    did not, and the reverse. ``dropped`` counts, by reason, requests that were to be copied and
    were not compared. ``first_s`` sums the seconds until the first token, of the candidate's
    answers and of the users'.
    """

    shadow: Annotated[str, Meta(max_length=64)]
    copies: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    rose: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = {}
    fell: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = {}
    dropped: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = {}
    first_s: tuple[float, float] = (0.0, 0.0)

    def fault(self) -> str:
        """Returns the first contradiction; empty if there is none."""
        names = self.rose.keys() | self.fell.keys()
        if any(self.rose.get(n, 0) + self.fell.get(n, 0) > self.copies for n in names):
            return "more differences than copies"
        return "" if all(0 <= s < float("inf") for s in self.first_s) else "no sum of seconds"


class ServingReplica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica as its gateway sees it. ``version`` is the one that it holds, null for none;
    ``fault`` is why it takes no requests, empty if it does."""

    name: Annotated[str, Meta(max_length=256)]
    version: Annotated[int, Meta(ge=0, le=1 << 48)] | None = None
    upstream: UpstreamName = ""
    fault: Annotated[str, Meta(max_length=256)] = ""


class GatewayState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object at ``live/gateways/<gateway>.json``.

    ``generations`` are the fingerprints of the deployment's secret that the gateway holds. Gateways
    of earlier releases had a key in its place: ``public_key`` checks their receipts. ``counts`` are
    totals since the gateway started (at ``started``), and ``rates`` the mean values of its
    detectors. ``shadow`` are those of the newest shadow since then. All rows that the gateway made
    until ``uploaded_until`` are in the bucket; 0 before its first upload, None in states of earlier
    releases. ``ended`` says that it has stopped and that nothing waits on its disk.
    """

    format: int = FORMAT
    gateway: _Name
    run: Identity
    public_key: Key = ""
    generations: Annotated[list[Fingerprint], Meta(max_length=MAX_GENERATIONS)] = []
    started: float
    at: float
    counts: Annotated[dict[str, float], Meta(max_length=256)] = {}
    rates: Annotated[dict[str, float], Meta(max_length=256)] = {}
    shadow: ShadowCounts | None = None
    uploaded_until: float | None = None
    ended: bool = False
    upstreams: Annotated[dict[str, _Name], Meta(max_length=64)] = {}
    """The models of other providers that it can ask, by the upstream's name; nothing attests
    them."""
    windows: Annotated[list[UserWindow], Meta(max_length=MOST_WINDOWS)] = []
    """How answers and their users fared, the oldest window first; no user is named."""
    replicas: Annotated[list[ServingReplica], Meta(max_length=1024)] = []


class _RowSegment(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    gateway: _Name
    number: int
    rows: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ROWS)]


R = TypeVar("R", bound=Capture | Feedback)


def encode_row(row: Capture | Feedback) -> bytes:
    """Encodes one row of a segment."""
    return encode_packed(row)


def encode_segment(gateway: str, number: int, rows: list[bytes]) -> bytes:
    """Encodes the object of one segment from encoded rows."""
    raw = [msgspec.Raw(row) for row in rows]
    return encode_packed(_RowSegment(gateway=gateway, number=number, rows=raw))


def decode_segment(
    data: bytes, kind: type[R], *, gateway: str, number: int, run: str, key: str
) -> list[R]:
    """Decodes a segment's rows; raises `CorruptError` for another gateway's or number's segment,
    and for a capture whose arrays contradict each other."""
    encoded = raw_rows(data, gateway=gateway, number=number, run=run, key=key)
    return decode_rows(encoded, kind, run=run, key=key)


def raw_rows(data: bytes, *, gateway: str, number: int, run: str, key: str) -> list[msgspec.Raw]:
    """Returns a segment's rows as they were encoded; raises `CorruptError` for another gateway's
    or number's segment."""
    segment = decode_packed(data, _RowSegment, run=run, key=key)
    if (segment.format, segment.gateway, segment.number) != (FORMAT, gateway, number):
        raise CorruptError("a segment of another place or format", run=run, key=key)
    return segment.rows


def decode_rows(
    encoded: Iterable[bytes | msgspec.Raw], kind: type[R], *, run: str, key: str
) -> list[R]:
    """Decodes rows of the object at ``key``; raises `CorruptError` as `decode_segment`."""
    try:
        rows = [msgspec.msgpack.decode(row, type=prepared(kind)) for row in encoded]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"a row: {str(error)[:200]}", run=run, key=key) from error
    for row in rows:
        if isinstance(row, Capture) and (fault := row.fault()):
            raise CorruptError(f"a capture: {fault}", run=run, key=key)
    return rows
