"""Calls of a redaction function that are slow or never end delay no other answer for long."""

import asyncio
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from deltawire.errors import InputError
from deltawire.live.capture import presidio, redaction
from deltawire.live.capture.redaction import AT_ONCE, MOST_STUCK, Redaction, load_redact

WITHIN_S = 0.4
PLENTY_S = 30.0
"""For calls that must succeed, on a busy machine too."""


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


def test_slow_calls_of_others_delay_no_answer(released, monkeypatch):
    """As many as run at once but one."""
    monkeypatch.setattr(redaction, "REDACT_WITHIN_S", PLENTY_S)

    async def scenario():
        calls = redactor(released)
        stuck = [asyncio.ensure_future(calls.apply(["stuck"])) for _ in range(AT_ONCE - 1)]
        await asyncio.sleep(0)
        found = await calls.apply(["Ada asks"])
        assert (found.texts, found.changed) == (["NAME asks"], True)
        assert not any(task.done() for task in stuck)
        released.set()
        for result in await asyncio.gather(*stuck):
            assert result.texts == ["stuck"]
        assert calls.failures == 0

    asyncio.run(scenario())


def test_an_answer_waits_no_longer_than_stated_and_calls_that_never_end_block_no_later_one(
    released, monkeypatch
):
    async def scenario():
        calls = redactor(released)
        stuck = [asyncio.ensure_future(calls.apply(["stuck"])) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        began = time.monotonic()
        # It may get the place of a call that was given up a moment before.
        withheld = (await calls.apply(["Ada asks"])).texts is None
        assert time.monotonic() - began < WITHIN_S + 10
        await asyncio.gather(*stuck)
        assert calls.failures == AT_ONCE + withheld
        monkeypatch.setattr(redaction, "REDACT_WITHIN_S", PLENTY_S)
        assert (await calls.apply(["Ada asks"])).texts == ["NAME asks"]

    asyncio.run(scenario())


def test_calls_that_never_end_are_bounded_and_nothing_is_stored_then(released, monkeypatch):
    async def scenario():
        calls = redactor(released)
        for _ in range((AT_ONCE + MOST_STUCK) // AT_ONCE):
            await asyncio.gather(*(calls.apply(["stuck"]) for _ in range(AT_ONCE)))
        before = threading.active_count()
        monkeypatch.setattr(redaction, "REDACT_WITHIN_S", PLENTY_S)
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


def test_the_type_of_a_functions_error_is_logged_and_not_its_message(caplog):
    def missing(texts):
        raise KeyError(texts[0])

    with caplog.at_level(logging.ERROR, "deltawire.live"):
        asyncio.run(Redaction(missing).apply(["Ada asks"]))
    assert "the redaction function failed: KeyError" in caplog.text
    assert "Ada" not in caplog.text


def test_threads_that_did_not_start_are_no_calls_that_have_not_ended(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    async def scenario():
        calls = Redaction(list)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(AT_ONCE + MOST_STUCK):
                assert (await calls.apply(["Ada asks"])).texts is None
        monkeypatch.setattr(redaction, "REDACT_WITHIN_S", PLENTY_S)
        assert (await calls.apply(["Ada asks"])).texts == ["Ada asks"]

    asyncio.run(scenario())


@pytest.fixture
def built(monkeypatch):
    """The engines that a stand-in for Presidio built, each slowly."""
    engines = []

    class Engine:
        def __init__(self):
            engines.append(self)
            time.sleep(0.1)

        def analyze(self, text, language):
            return []

    monkeypatch.setitem(sys.modules, "presidio_analyzer", SimpleNamespace(AnalyzerEngine=Engine))
    presidio._analyzer.cache_clear()
    yield engines
    presidio._analyzer.cache_clear()


def test_threads_that_redact_at_once_share_one_engine_of_presidio(built):
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(presidio.redact, [["a"]] * 8)) == [["a"]] * 8
    assert len(built) == 1


def test_the_engine_is_built_before_the_first_answer(built):
    load_redact("deltawire.live.capture.presidio:redact")
    assert len(built) == 1


def test_a_gateway_without_presidio_does_not_start(built, monkeypatch):
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(InputError, match="presidio-analyzer"):
        load_redact("deltawire.live.capture.presidio:redact")
