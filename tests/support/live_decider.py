"""Decisions about a bucket's versions, and waiting for a gateway to follow them."""

import asyncio
import functools

from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_manifest, read_run
from deltawire.wire.decisions import Decision, ServedVersion


def in_loop(test):
    """Runs a test's coroutine."""

    @functools.wraps(test)
    def run(*args, **named):
        asyncio.run(test(*args, **named))

    return run


def run_now(scenario):
    """Runs a coroutine function of a test where it is defined."""
    asyncio.run(scenario())


class Decider:
    """Appends decisions about a bucket's versions, as any process may."""

    def __init__(self, bucket):
        self.bucket, self.run = bucket, read_run(bucket)
        self.log = DecisionLog(bucket, self.run.id)

    def served(self, version):
        return ServedVersion(version, read_manifest(self.bucket, self.run, version).digest)

    def decide(self, verdict, serving, candidate=None, **facts):
        self.log.poll()
        candidate = None if candidate is None else self.served(candidate)
        decision = Decision(
            number=self.log.next_number, run=self.run.id, verdict=verdict, at=0.0, by="ann",
            serving=self.served(serving), candidate=candidate, **facts,
        )  # fmt: skip
        assert self.log.append(decision)
        return decision


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
