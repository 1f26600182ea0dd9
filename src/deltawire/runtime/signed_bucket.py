"""Signs the objects that a process of a signed run stores, and checks those that it reads.

::

    readers and writers of the loop    plain bytes
            │                              ▲
       SignedBucket   put, create: sign    │ get: check role, key, run and time; take the line off
            ▼                              │
         bucket       bytes + signature line

In an unsigned run every operation is passed on unchanged. The pin (``--public-key``) decides
whether the run is signed and who owns it; without one, ``run.json`` is trusted. The lines of a
signed run have its owner and its grants (`SignedBucket.line`). Sealed objects (weights) are checked
by their own readers; this bucket records their versions, so that a reader does not go back
(`deltawire.runtime.highest_version`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

import msgspec

from deltawire.errors import CorruptError, InputError, SignatureError
from deltawire.runtime.grant_log import EarlierKey, earlier_keys, log_grant, read_grants
from deltawire.runtime.highest_version import HighestVersion
from deltawire.store import Bucket, DelegatingBucket
from deltawire.sync.chain.objects import committed_versions, find_run
from deltawire.wire import keys
from deltawire.wire.objects import decode_json
from deltawire.wire.roles import (
    GATEWAY_ROLE,
    MAX_GRANT_BYTES,
    MAX_SIGNATURE_BYTES,
    Pin,
    RoleGrant,
    SignedBytes,
    Trust,
    check_age,
    decode_grant,
    encode_grant,
    open_bytes,
    role_for,
    run_of_line,
    sign_bytes,
)
from deltawire.wire.run import MAX_RUN_BYTES
from deltawire.wire.seal import Signer, check_seal, check_signature
from deltawire.wire.signing import verify

REREAD_S = 10.0
"""Seconds before a missing or unsuitable grant is looked up again."""
GRANT_S = 60.0
"""Seconds before a valid grant is read again, because its key may have been replaced."""
REPLACED = (
    *(keys.TRAINER, keys.PROBES, keys.RETAINED, keys.HEARTBEATS),
    *(keys.LIVE_OPERATOR, keys.LIVE_DECIDER),
)
"""Objects that are replaced in place: one signed before the last one read is a replay."""


class _RunIdentity(msgspec.Struct):
    id: str
    public_key: str = ""


class _Times(msgspec.Struct):
    run: str
    created_at: float


@dataclass
class _KnownGrant:
    """The newest grant of a role that was read, None if there is none; ``read_at`` is monotonic."""

    grant: RoleGrant | None
    read_at: float


@dataclass
class _State:
    """The state that all views of one bucket share."""

    pin: Pin | None
    signer: Signer | None
    role: str
    max_age_s: float | None
    clock: Callable[[], float]
    trust: Trust | None = None
    unsigned: bool = False
    grants: dict[str, _KnownGrant] = field(default_factory=dict)
    earlier: dict[str, tuple[str, list[EarlierKey]]] = field(default_factory=dict)
    """By role, its key now and those that it had before."""
    signed_at: dict[str, float] = field(default_factory=dict)
    upper: SignedBucket | None = None
    """The run that a line belongs to, whose grants count."""
    allow_rollback: bool = False
    newest: tuple[int, float] = (-1, 0.0)
    """The newest version whose manifest was read, and when it was signed."""
    highest: HighestVersion | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


class SignedBucket(DelegatingBucket):
    """Signs and checks the loop's objects of a signed run.

    ``signer`` signs in ``role``; without one, only objects that need no signature can be stored.
    ``max_age_s`` limits the age of the trainer's status and of the newest version.

    Raises `SignatureError` for an object of a signed run that its role did not sign, and
    `InputError` for storing one without the role's key.

    Example::

        bucket = SignedBucket(open_bucket(url), pin=Pin.parse(text), signer=key, role="trainer")
        read_trainer(bucket)
    """

    def __init__(
        self,
        inner: Bucket,
        *,
        pin: Pin | None = None,
        signer: Signer | None = None,
        role: str = "",
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(inner)
        self._state = _State(pin, signer, role, max_age_s, clock)

    def with_inner(self, inner: Bucket) -> SignedBucket:
        """Returns a bucket with the same keys and state over another connection to the same
        bucket.
        """
        other = SignedBucket(inner)
        other._state = self._state
        return other

    def line(self, place: Bucket, name: str) -> SignedBucket:
        """Returns the bucket of a line of this run, at ``place``, with this bucket's key and role.

        The line of a signed run has the run's owner, an id that follows from the run's, and no
        grants of its own: a role's key is that of the run. The line of an unsigned run is unsigned.

        Raises `SignatureError` if the pinned run is not there: its lines could be anyone's.
        """
        state, trust = self._state, self.trust
        if trust is None and state.pin is not None:
            raise SignatureError("there is no signed run here", run=self.url, key=keys.RUN)
        pin = None if trust is None else Pin(trust.owner, run_of_line(trust.run_id, name))
        found = SignedBucket(
            place, pin=pin, signer=state.signer if pin else None, role=state.role,
            max_age_s=state.max_age_s, clock=state.clock,
        )  # fmt: skip
        found._state.upper = self
        if state.highest is not None:
            found.remember(allow_rollback=state.allow_rollback)
        return found

    @property
    def upper(self) -> SignedBucket | None:
        """The run that this bucket's line belongs to; None if this is no line's."""
        return self._state.upper

    @property
    def trust(self) -> Trust | None:
        """The facts that a signed run is checked against; None if the run is not signed.

        Raises `SignatureError` if the bucket holds another run than the pinned one.
        """
        state = self._state
        with state.lock:
            if state.trust is None and not state.unsigned:
                if state.pin is not None and state.pin.run_id:
                    owner, run_id = state.pin.public_key, state.pin.run_id
                else:
                    run = find_run(
                        self.inner, public_key="" if state.pin is None else state.pin.public_key
                    )
                    if run is None:  # It does not exist yet and may become either.
                        return None
                    owner, run_id = run.public_key, run.id
                    state.unsigned = not owner
                if owner:
                    state.trust = Trust(run_id, owner, {}, verify, run=self.url)
            return state.trust

    @property
    def pin(self) -> Pin | None:
        """The pin that this bucket was opened with."""
        return self._state.pin

    def check_writer(self) -> None:
        """Raises `InputError` unless this process may sign in its role, or the run is unsigned."""
        state, trust = self._state, self.trust
        if trust is None:
            if state.signer is not None:
                raise InputError(
                    "a key was given, but no signed run exists here",
                    hint="omit --key for an unsigned run; if the run does not exist yet, give "
                    "its key and id with --public-key KEY:RUN_ID",
                    run=self.url,
                )
            return
        if state.signer is None:
            raise InputError(
                f"the run is signed, and the {state.role} has no key",
                hint="use --key with the key that the run's owner granted",
                run=self.url,
            )
        try:
            granted = self._granted(trust, state.role, keys.role(state.role), again=True)
        except CorruptError as error:
            raise InputError(
                f"no valid key is granted to the {state.role}: {error.message}",
                hint=error.hint,
                run=self.url,
                key=keys.role(state.role),
            ) from error
        if granted != state.signer.public_key:
            raise InputError(
                f"--key is not the key that is granted to the {state.role}",
                hint="ask the run's owner for the right key, or for another grant",
                run=self.url,
                key=keys.role(state.role),
            )

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Gets as `Bucket.get` does; returns the bytes that the object's role signed."""
        role = role_for(key)
        if role is None:
            data = self.inner.get(key, limit=limit)
            return self._noted(key, data)
        trust = self.trust
        if trust is None:
            if self._state.pin is not None and self.inner.exists(key):
                raise SignatureError("there is no signed run here", run=self.url, key=key)
            return self.inner.get(key, limit=limit)
        data = self.inner.get(key, limit=limit + MAX_SIGNATURE_BYTES)
        found = None if data is None else self._open(data, trust, key, role)
        if found is not None and len(found) > limit:
            raise CorruptError(
                f"the object has {len(found)} bytes; the limit is {limit}", run=self.url, key=key
            )
        return found

    def put(self, key: str, data: bytes) -> None:
        """Signs, then puts as `Bucket.put` does.

        It signs once: a put that is repeated below for an hour keeps its time. If another process
        replaced the object meanwhile, readers take the late one for a restored one.
        """
        self.inner.put(key, self._signed(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """Signs, then creates as `Bucket.create` does."""
        return self.inner.create(key, self._signed(key, data))

    def _signed(self, key: str, data: bytes) -> bytes:
        role, state = role_for(key), self._state
        if role is None or (trust := self.trust) is None:
            return data
        if state.signer is None or role != state.role:
            raise InputError(
                f"only the {role} may write this object of a signed run",
                hint="give its key with --key",
                run=self.url,
                key=key,
            )
        with state.lock:
            # Sign later than the predecessor even if the clock was set back; it would count as a
            # replay otherwise.
            now = max(state.clock(), state.signed_at.get(key, 0.0) + 1e-6)
            if key.startswith(REPLACED):
                state.signed_at[key] = now
        return sign_bytes(
            data, run_id=trust.run_id, key=key, signer=state.signer, role=role, now=now
        )

    def _open(self, data: bytes, trust: Trust, key: str, role: str) -> bytes:
        state = self._state
        now = state.clock()
        try:
            known = self._with(trust, role, key)
            found = open_bytes(data, trust=known, key=key, role=role, now=now)
        except SignatureError:  # Nothing is accepted: a newer or an earlier grant decides.
            if not self._is_due(role) and not _outlives_its_key(key, role):
                raise
            found = self._open_again(data, trust, key, role, now)
        if key == keys.TRAINER:
            check_age(found.signed_at, state.max_age_s, run=self.url, key=key, now=now)
        if key.startswith(REPLACED):
            with state.lock:
                if found.signed_at < state.signed_at.get(key, 0.0):
                    raise SignatureError(
                        "the object is older than the one read here before",
                        hint="someone has restored an old one",
                        run=self.url,
                        key=key,
                    )
                state.signed_at[key] = found.signed_at
        return found.data

    def _open_again(
        self, data: bytes, trust: Trust, key: str, role: str, now: float
    ) -> SignedBytes:
        """Opens an object whose signature is not by the key that the role was known to have: the
        role may have a new key, or the object an earlier one's signature."""
        known = self._with(trust, role, key, again=self._is_due(role))
        try:
            return open_bytes(data, trust=known, key=key, role=role, now=now)
        except SignatureError:  # Nothing is accepted that no key of the log signed.
            if not _outlives_its_key(key, role):
                raise
            for earlier in self._earlier(trust, role):
                at = replace(trust, grants={role: earlier.public_key})
                with contextlib.suppress(SignatureError):  # Another key of the log may be it.
                    found = open_bytes(data, trust=at, key=key, role=role, now=now)
                    if earlier.signs(key, found.signed_at):
                        return found
            raise

    def _earlier(self, trust: Trust, role: str) -> list[EarlierKey]:
        """Returns the keys that a role had before; none if its log is damaged."""
        state = self._state
        if state.upper is not None and (above := state.upper.trust) is not None:
            return state.upper._earlier(above, role)
        with state.lock:
            cached, grant = state.earlier.get(role), state.grants[role].grant
        if grant is None:
            return []
        if cached is None or cached[0] != grant.public_key:
            try:
                found = earlier_keys(read_grants(self.inner, role, trust=trust), grant)
            except CorruptError:  # The log is read again for the next object; this one is void.
                return []
            with state.lock:
                cached = state.earlier[role] = (grant.public_key, found)
        return cached[1]

    def _with(self, trust: Trust, role: str, key: str, *, again: bool = False) -> Trust:
        return replace(trust, grants={role: self._granted(trust, role, key, again=again)})

    def _is_due(self, role: str, after_s: float = REREAD_S) -> bool:
        with self._state.lock:
            cached = self._state.grants.get(role)
        return cached is None or monotonic() - cached.read_at > after_s

    def _granted(self, trust: Trust, role: str, key: str, *, again: bool = False) -> str:
        """Returns the public key of a role; raises `SignatureError` if none is granted."""
        state = self._state
        if state.upper is not None and (above := state.upper.trust) is not None:
            return state.upper._granted(above, role, key, again=again)
        with state.lock:
            cached = state.grants.get(role)
        doubtful = again or cached is None or cached.grant is None
        if cached is None or self._is_due(role, REREAD_S if doubtful else GRANT_S):
            before = None if cached is None else cached.grant
            data = self.inner.get(keys.role(role), limit=MAX_GRANT_BYTES)
            found = None
            if data is not None:
                try:
                    found = decode_grant(data, role, trust=trust)
                except CorruptError as error:
                    # The grant before stays in force; without one, nothing is read.
                    if before is None:
                        raise SignatureError(
                            error.message, hint=error.hint, run=self.url, key=keys.role(role)
                        ) from error
            if found is None or (before is not None and found.granted_at < before.granted_at):
                found = before  # Deleting or replaying a grant must not revoke a key.
            with state.lock:
                cached = state.grants[role] = _KnownGrant(found, monotonic())
        if cached.grant is None:
            return trust.key_of(role, key=key)
        return cached.grant.public_key

    def _noted(self, key: str, data: bytes | None) -> bytes | None:
        """Checks ``run.json`` against the pin, and notes the versions whose manifests are read."""
        state = self._state
        if key == keys.RUN:
            if data is not None and state.pin is not None:
                self._check_run(data, state.pin)
        elif key.startswith(keys.MANIFESTS) and state.pin is not None:
            if data is not None:
                self._note_manifest(key, data)
            elif state.newest[0] >= 0:
                check_age(
                    state.newest[1], state.max_age_s, run=self.url, key=key, now=state.clock()
                )
        return data

    def _check_run(self, data: bytes, pin: Pin) -> None:
        check_seal(data, "run", run=self.url, key=keys.RUN)
        outline = decode_json(data, _RunIdentity, run=self.url, key=keys.RUN, what="run")
        pin.check(outline.public_key, outline.id, run=self.url)
        check_signature(data, public_key=pin.public_key, verify=verify, run=self.url, key=keys.RUN)

    def _note_manifest(self, key: str, data: bytes) -> None:
        """Records a version that the owner signed."""
        state, trust, version = self._state, self.trust, keys.trailing_number(key)
        if trust is None or version is None or version <= state.newest[0]:
            return
        try:
            check_signature(data, public_key=trust.owner, verify=verify, run=self.url, key=key)
            times = decode_json(data, _Times, run=self.url, key=key)
        except CorruptError:
            return  # Noting no version refuses less; the object's reader checks it itself.
        if times.run != trust.run_id:
            return
        with state.lock:
            if version > state.newest[0]:
                state.newest = (version, times.created_at)
        if state.highest is not None:
            state.highest.note(version)

    def remember(self, *, allow_rollback: bool) -> None:
        """Refuses a bucket whose newest version is older than one that this machine saw before,
        unless ``allow_rollback``, and notes every version read from now on.

        Does nothing without a pin. Raises `SignatureError` for an older version, or for a newest
        one beyond ``max_age_s``.
        """
        state, trust = self._state, self.trust
        if state.pin is None or trust is None:
            return
        highest = HighestVersion(trust.owner, trust.run_id, self.url)
        seen = highest.read()
        for version in reversed(committed_versions(self.inner)):
            self.get(keys.manifest(version), limit=MAX_RUN_BYTES)
            if state.newest[0] == version:
                break
        newest, signed_at = state.newest
        if newest >= 0:
            check_age(
                signed_at, state.max_age_s, run=self.url, key=keys.manifest(newest),
                now=state.clock(),
            )  # fmt: skip
        highest.check(newest, seen=seen, allow_rollback=allow_rollback)
        state.highest, state.allow_rollback = highest, allow_rollback

    def highest_decision(self) -> HighestVersion | None:
        """Returns this machine's memory of the run's decisions; None unless `remember` was called
        for a pinned run."""
        trust, state = self.trust, self._state
        if trust is None or state.highest is None:
            return None
        return HighestVersion(trust.owner, trust.run_id, self.url, kind="decision")

    @property
    def allow_rollback(self) -> bool:
        """True if this reader accepts a bucket that was set back (``--allow-rollback``)."""
        return self._state.allow_rollback


def _outlives_its_key(key: str, role: str) -> bool:
    """Returns whether an object stays valid when its role gets another key: gateways create it once
    and it is read for as long as the run exists."""
    return role == GATEWAY_ROLE and not key.startswith(keys.LIVE_GATEWAYS)


def signing(bucket: Bucket) -> SignedBucket | None:
    """Returns the layer of a bucket that signs and checks; None if it has none."""
    layer = bucket
    while isinstance(layer, DelegatingBucket):
        if isinstance(layer, SignedBucket):
            return layer
        layer = layer.inner
    return None


def grant_role(
    bucket: Bucket,
    owner: Signer,
    *,
    run_id: str,
    role: str,
    public_key: str,
    revoke: bool = False,
) -> RoleGrant:
    """Lets ``public_key`` sign in ``role`` from now on, and no other key, signed by the owner.

    Keeps an existing grant of the same key. With ``revoke``, what earlier keys of the role signed
    is void too, as after a theft; else it stays valid (`deltawire.runtime.grant_log`). Returns the
    grant.
    """
    key, trust = keys.role(role), Trust(run_id, owner.public_key, {}, verify, run=bucket.url)
    data = bucket.get(key, limit=MAX_GRANT_BYTES)
    before = None
    with contextlib.suppress(CorruptError):
        # Granting again replaces it by the owner's newer one, which is what was asked for.
        before = None if data is None else decode_grant(data, role, trust=trust)
    if before is not None and before.public_key == public_key:
        return before
    after = 0.0 if before is None else before.granted_at + 1e-3
    decisions = 0
    if role == GATEWAY_ROLE and before is not None:
        made = map(keys.trailing_number, bucket.list(keys.LIVE_DECISIONS))
        decisions = max((number + 1 for number in made if number is not None), default=0)
    grant = RoleGrant(
        run=run_id,
        role=role,
        public_key=public_key,
        granted_at=max(time.time(), after),
        decisions=decisions,
        revokes=revoke,
    )
    # Logged before it counts: a key that signs is always in the log.
    log_grant(bucket, grant, before, signer=owner, trust=trust)
    bucket.put(key, encode_grant(grant, signer=owner))
    return grant
