"""The series of decisions in a bucket: read the newest, append the next.

Any number of processes may decide. Each decision has a number and is created if absent, so of two
that decide at once one succeeds, and the other reads what was decided and decides again.

Each decision names the hash of the one before, and a reader with a pin remembers the highest number
that this machine has read. So a decision that was deleted, such as a rollback, is noticed: the
series ends in an error, and no earlier decision counts again.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError, InputError, SignatureError
from deltawire.runtime.signed_bucket import signing
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import Absent, Sound, Unknown, evidence_of
from deltawire.wire import keys
from deltawire.wire.decisions import (
    DECAYED,
    ENDED,
    GATE_FAILURES,
    MAX_DECISION_BYTES,
    PAUSED_UNTIL,
    RESTORES,
    Decision,
    fault_after,
)
from deltawire.wire.objects import decode_json, encode_json


class DecisionLog:
    """The valid decisions of a run, the oldest first; `poll` reads those that are new.

    Decisions are never changed, so each is read once. One that is damaged in every answer, forged,
    of another run or number, or that cannot follow the one before, is void: it stays in the bucket,
    ``void`` says why, and every reader skips it, so that filling a number does not stop the series.

    Example::

        series = DecisionLog(bucket, run.id)
        series.poll()
        series.newest
    """

    def __init__(self, bucket: Bucket, run: str) -> None:
        self.decisions: list[Decision] = []
        self.void: dict[int, str] = {}
        self._bucket = bucket
        self.run = run
        self._newest_hash = ""
        self._started = False

    @property
    def newest(self) -> Decision | None:
        """The decision that counts."""
        return self.decisions[-1] if self.decisions else None

    @property
    def next_number(self) -> int:
        """The number of the decision that comes next."""
        return len(self.decisions) + len(self.void)

    def poll(self) -> int:
        """Reads new decisions, and returns how many valid ones there were.

        Raises `RetryError` if the store does not answer, and `SignatureError` if a decision is
        missing that later ones follow, or that this machine has read before.
        """
        before = len(self.decisions)
        signed = signing(self._bucket)
        highest = None if signed is None else signed.highest_decision()
        # Read before the bucket: other readers on this machine may record newer ones meanwhile.
        seen = -1 if self._started or highest is None else highest.read()
        while self._read(self.next_number):
            pass
        if not self._started:
            self._require_no_gap()
            if highest is not None and signed is not None:
                rollback = signed.allow_rollback
                highest.check(self.next_number - 1, seen=seen, allow_rollback=rollback)
            self._started = True
        elif highest is not None and len(self.decisions) > before:
            highest.note(self.next_number - 1)
        return len(self.decisions) - before

    def _require_no_gap(self) -> None:
        """Raises `SignatureError` if the bucket lists a decision after one that is not there."""
        after = self.next_number
        # Others may decide between the last read and the listing: what is listed is read first.
        listed = self._bucket.list(keys.LIVE_DECISIONS)
        while self._read(self.next_number):
            pass
        if self.next_number > after:
            return
        later = [keys.trailing_number(key) for key in listed]
        if found := [number for number in later if number is not None and number > after]:
            raise SignatureError(
                f"decision {after} is missing, and decision {min(found)} exists",
                hint="someone deleted it; restore it from a copy of the bucket",
                run=self._bucket.url,
                key=keys.live_decision(after),
            )

    def append(self, decision: Decision) -> bool:
        """Stores the next decision; returns False, after reading it, if there is one already.

        Decisions that are void are read again first: were one valid, this one might be another.
        Raises `InputError` for a decision that cannot follow the newest, and `RetryError` if the
        store does not answer: then it may be stored, and `poll` tells.
        """
        if self.void and self._read_again():
            return False
        if decision.number != self.next_number or decision.run != self.run:
            raise InputError(f"the next decision of this run is number {self.next_number}")
        if fault := fault_after(self.newest, decision):
            raise InputError(f"cannot decide this now: {fault}", run=self._bucket.url)
        self._require_no_gap()
        if decision.number != self.next_number:
            # Decided meanwhile: by another process, or by a create that got no answer.
            unchained = (msgspec.structs.replace(one, previous="") for one in self.decisions)
            return msgspec.structs.replace(decision, previous="") in unchained
        decision = msgspec.structs.replace(decision, previous=self._newest_hash)
        stored = self._bucket.create(keys.live_decision(decision.number), encode_json(decision))
        self.poll()
        return stored or decision in self.decisions  # A repeated create may find its own object.

    def rejected(self) -> frozenset[int]:
        """Returns the versions that were rolled back: they are no candidates again. A return to the
        hold-back version takes back all versions since."""
        found: set[int] = set()
        for one in self.decisions:
            if one.verdict == "rollback" and one.candidate is not None:
                found.add(one.candidate.version)
            if DECAYED in one.evidence and one.candidate is not None:
                between = one.serving.version, one.candidate.version
                served = (d.serving.version for d in self.decisions if d.number < one.number)
                found |= {v for v in served if between[0] < v <= between[1]}
        return frozenset(found)

    def decayed_until(self) -> int:
        """Returns the newest version that served when users were returned to a hold-back version;
        -1 if they never were. Versions up to it are no candidates again."""
        gone = (d.candidate for d in self.decisions if DECAYED in d.evidence)
        return max((one.version for one in gone if one is not None), default=-1)

    def before_serving(self) -> Decision | None:
        """Returns the newest decision by which a version with other weights served than now."""
        now = self.newest
        if now is None:
            return None
        others = (d for d in reversed(self.decisions) if d.serving.digest != now.serving.digest)
        return next((d for d in others if d.serving.version not in self.rejected()), None)

    def restores(self) -> dict[int, int]:
        """Returns, for each version that was promoted because a trainer restored an earlier one in
        it, that earlier version."""
        return {
            one.serving.version: int(one.evidence[RESTORES])
            for one in self.decisions
            if one.verdict == "promote" and RESTORES in one.evidence
        }

    def gate_failures(self) -> int:
        """Returns how many candidates in a row the evaluation gate stopped, up to now."""
        failed = self._last_failure()
        return 0 if failed is None else int(failed.evidence[GATE_FAILURES])

    def paused_until(self) -> float:
        """Returns until when learning pauses, in seconds since 1970; 0 if it does not. A candidate
        that began after the pause ends it."""
        now = self.newest
        failed = self._last_failure()
        if now is None or failed is None or now.verdict not in ("rollback", "promote"):
            return 0.0
        return failed.evidence.get(PAUSED_UNTIL, 0.0)

    def _last_failure(self) -> Decision | None:
        """Return the rollback by the gate after which no candidate was shown to users and nobody
        decided by hand."""
        for one in reversed(self.decisions):
            if GATE_FAILURES in one.evidence:
                return one
            unseen = one.verdict in ("gate", "hold") and not one.share
            if ENDED in one.evidence or not (unseen or RESTORES in one.evidence):
                return None
        return None

    def canary_since(self) -> float | None:
        """Returns when the undecided candidate was first shown to users; None if it was not."""
        now = self.newest
        if now is None or now.candidate is None or not now.share:
            return None
        since = now.at
        for decision in reversed(self.decisions):
            if decision.candidate != now.candidate or not decision.share:
                break
            since = decision.at
        return since

    def _read_again(self) -> bool:
        """Reads the series from its beginning; returns whether it is another than was read
        before."""
        there = DecisionLog(self._bucket, self.run)
        there.poll()
        changed = there.decisions != self.decisions
        self.decisions, self.void = there.decisions, there.void
        self._newest_hash = there._newest_hash
        return changed

    def _read(self, number: int) -> bool:
        """Reads a decision; returns whether there is one.

        An object without a signature counts once two answers agree. One that every answer refuses
        is void.
        """
        key = keys.live_decision(number)
        get = partial(self._bucket.get, key, limit=MAX_DECISION_BYTES)
        first_answer: list[bytes] = []

        def read() -> tuple[Decision, bytes] | None:
            first, second = first_answer.pop() if first_answer else get(), get()
            if first is None or second is None:
                return None
            if first != second:
                raise CorruptError("two answers to the same read differ")
            found = decode_json(first, Decision, run=self._bucket.url, key=key)
            if (found.number, found.run) != (number, self.run):
                raise CorruptError("a decision of another run or number")
            return found, first

        with suppress(CorruptError):  # Only the answer may be damaged: it is asked for again.
            answer = get()
            if answer is None:
                return False  # None yet, or one bad answer: the next poll asks again.
            first_answer.append(answer)
        match evidence_of(self._bucket, key, read):
            case Absent():
                return False
            case Unknown(error):
                self.void[number] = error.message
            case Sound((decision, data)):
                if fault := self._fault(decision):
                    self.void[number] = fault
                else:
                    self.decisions.append(decision)
                    self._newest_hash = blake3(data).hexdigest()
        return True

    def _fault(self, decision: Decision) -> str:
        chained = self.newest is not None and bool(self.newest.previous)
        if (decision.previous or chained) and decision.previous != self._newest_hash:
            return "it follows another decision than the one before"
        return fault_after(self.newest, decision)
