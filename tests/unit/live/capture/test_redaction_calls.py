"""Calls of a redaction function that are slow or never end delay no other answer for long."""

import asyncio
import threading
import time

import pytest

from deltawire.live.capture import redaction
from deltawire.live.capture.redaction import AT_ONCE, MOST_STUCK, Redaction

WITHIN_S = 0.4


@pytest.fixture
def released(monkeypatch):
    """An event that ends the calls that are stuck."""
    monkeypatch.setattr(redaction, "REDACT_WITHIN_S", WITHIN_S)
    event = threading.Event()
    yield event
    event.set()


def redactor(released):
    def redact(texts):
        if texts == ["stuck"]:
            released.wait(60)
        return [text.replace("Ada", "NAME") for text in texts]

    return Redaction(redact)


def test_slow_calls_of_others_delay_no_answer(released):
    """As many as run at once but one."""

    async def scenario():
        calls = redactor(released)
        stuck = [asyncio.ensure_future(calls.apply(["stuck"])) for _ in range(AT_ONCE - 1)]
        await asyncio.sleep(0)
        found = await calls.apply(["Ada asks"])
        assert (found.texts, found.changed) == (["NAME asks"], True)
        assert not any(task.done() for task in stuck)
        for result in await asyncio.gather(*stuck):
            assert result.texts is None
        assert calls.failures == AT_ONCE - 1

    asyncio.run(scenario())


def test_an_answer_waits_no_longer_than_stated_and_calls_that_never_end_block_no_later_one(
    released,
):
    async def scenario():
        calls = redactor(released)
        stuck = [asyncio.ensure_future(calls.apply(["stuck"])) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        began = time.monotonic()
        assert (await calls.apply(["Ada asks"])).texts is None
        assert time.monotonic() - began < WITHIN_S + 1
        await asyncio.gather(*stuck)
        assert (await calls.apply(["Ada asks"])).texts == ["NAME asks"]

    asyncio.run(scenario())


def test_calls_that_never_end_are_bounded_and_nothing_is_stored_then(released):
    async def scenario():
        calls = redactor(released)
        for _ in range((AT_ONCE + MOST_STUCK) // AT_ONCE):
            await asyncio.gather(*(calls.apply(["stuck"]) for _ in range(AT_ONCE)))
        before = threading.active_count()
        assert (await calls.apply(["Ada asks"])).texts is None
        assert threading.active_count() == before
        released.set()
        async with asyncio.timeout(60):
            while (await calls.apply(["Ada asks"])).texts != ["NAME asks"]:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_what_a_function_raises_or_returns_wrongly_stores_nothing():
    async def scenario():
        def raising(texts):
            raise SystemExit(texts[0])

        for wrong in (raising, lambda texts: [], lambda texts: [None for _ in texts]):
            calls = Redaction(wrong)
            assert (await calls.apply(["Ada asks"])).texts is None
            assert calls.failures == 1

    asyncio.run(scenario())
