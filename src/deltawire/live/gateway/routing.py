"""Assigns users to arms, and replicas to versions, as the newest decision in the bucket says.

Concurrency::

    one task of the event loop                          request handlers
      each second: read new decisions (a thread)          assignment(user, conversation)
      a new one ─▶ ReplicaSet.aim: replicas change          only reads what is decided

An outage of the bucket changes nothing: the decision that was read last goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from deltawire.errors import DeltawireError, RetryError
from deltawire.runtime.decision_log import DecisionLog
from deltawire.serving.replica_set import ReplicaSet, TargetVersion
from deltawire.wire.decisions import Assignment, Decision, ServedVersion, assign

POLL_EVERY_S = 1.0
MAX_CONVERSATIONS = 20_000
LEAST_SHARE = 1e-9
_LOG = logging.getLogger("deltawire.live")


class ArmRouter:
    """The arms of one gateway.

    Users are assigned at random only while replicas hold both versions; otherwise all of them stay
    on the serving arm with propensity 1, which no test counts. So it is with the hold-back version,
    which needs a third replica. A conversation keeps its arm while
    that arm's version may be served. ``decision`` is the one that replicas were aimed by, and
    ``on_decision`` gets each one after that.

    Example::

        router = ArmRouter(replicas)
        task = asyncio.create_task(router.follow())
        router.assignment(user, conversation)
    """

    def __init__(
        self, replicas: ReplicaSet, on_decision: Callable[[Decision], None] = lambda _: None
    ) -> None:
        self.decision: Decision | None = None
        self._on_decision = on_decision
        self.fault = ""
        self._replicas = replicas
        self._log = DecisionLog(replicas.bucket, replicas.run.id)
        self._kept: OrderedDict[str, tuple[str, Assignment]] = OrderedDict()

    async def follow(self) -> None:
        """Reads decisions and aims the replicas, until it is cancelled."""
        while True:
            try:
                await self.poll()
            except RetryError as error:
                _LOG.warning("cannot read decisions: %s", error.message)
            except DeltawireError as error:
                if error.message != self.fault:
                    _LOG.error("cannot follow a decision: %s", error.message)
                self.fault = error.message
            await asyncio.sleep(POLL_EVERY_S)

    async def poll(self) -> None:
        """Reads new decisions, and aims the replicas by the newest.

        Raises `RetryError` if the store does not answer, and `CorruptError` if the decision names a
        version by another digest than its manifest: then replicas stay as they are.
        """
        await asyncio.to_thread(self._log.poll)
        newest = self._log.newest
        if newest is None or newest == self.decision:
            return
        candidate = newest.candidate if newest.share or newest.copies else None
        shown = None if candidate is None else _target(candidate)
        held = None if newest.held_back is None else _target(newest.held_back)
        # Copies of requests need one replica.
        await self._replicas.aim(
            _target(newest.serving),
            shown,
            newest.share or LEAST_SHARE,
            hold_back=held,
            hold_back_share=newest.hold_back_share,
        )
        self.decision, self.fault = newest, ""
        self._on_decision(newest)

    def generation(self) -> int | None:
        """Returns the generation of the secret by which the canary assigns users; None without a
        canary."""
        decision = self.decision
        if decision is None or decision.candidate is None or not decision.share:
            return None
        return decision.generation

    def assignment(self, user: str, conversation: str) -> Assignment:
        """Returns the arm of a request."""
        decision = self.decision
        if decision is None:
            return assign(None, user)
        held = decision.held_back
        if held is not None and not self._replicas.serves(held.version):
            decision = msgspec.structs.replace(decision, hold_back=None, hold_back_share=0.0)
        if decision.candidate is None or not decision.share:
            return assign(decision, user)
        kept = self._kept.get(conversation)
        chosen = kept[1] if kept is not None and kept[0] == decision.salt else None
        versions = decision.serving.version, decision.candidate.version
        if chosen is None:
            shown = all(self._replicas.serves(version) for version in versions)
            if not shown:
                decision = msgspec.structs.replace(decision, candidate=None, share=0.0)
            chosen = assign(decision, user)
            self._keep(conversation, decision.salt, chosen)
        return chosen

    def _keep(self, conversation: str, salt: str, chosen: Assignment) -> None:
        self._kept.pop(conversation, None)
        self._kept[conversation] = salt, chosen
        if len(self._kept) > MAX_CONVERSATIONS:
            self._kept.popitem(last=False)


def _target(one: ServedVersion) -> TargetVersion:
    return TargetVersion(one.version, one.digest, "all", one.upstream)
