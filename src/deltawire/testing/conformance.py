"""Runs the store suite against a bucket without pytest, in a scratch prefix for each case."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deltawire.errors import DeltawireError, InputError
from deltawire.testing.scratch import scratch_bucket
from deltawire.testing.store_suite import StoreSuite

PREFIX = "test_"


@dataclass(frozen=True)
class SuiteCase:
    """One case of the suite: its name, the promise that it tests, and how it ended."""

    name: str
    promise: str
    failure: str = ""

    @property
    def passed(self) -> bool:
        """True if the store kept the promise."""
        return not self.failure


def run_store_suite(
    url: str, report: Callable[[str], object] = str, **options: Any
) -> Iterator[SuiteCase]:
    """Runs every case of `StoreSuite` in its own prefix below ``url``, and deletes what it wrote.

    ``report`` is called with the name of each case before it runs; ``options`` are those of
    `deltawire.store.open_bucket`. Raises `InputError` if Python runs without assertions, and what
    opening the bucket raises.

    Example::

        failed = [case for case in run_store_suite("s3://bucket/try") if not case.passed]
    """
    if not __debug__:
        raise InputError(
            "the suite is made of assertions, which this Python leaves out",
            hint="run without -O and PYTHONOPTIMIZE",
        )
    for name, method in inspect.getmembers(StoreSuite, inspect.isfunction):
        if not name.startswith(PREFIX):
            continue
        report(name.removeprefix(PREFIX))
        promise = (inspect.getdoc(method) or "").partition("\n")[0]
        with scratch_bucket(url, **options) as bucket:
            failure = _failure_of(lambda: method(StoreSuite(), bucket))  # noqa: B023
        yield SuiteCase(name.removeprefix(PREFIX), promise, failure)


def _failure_of(call: Callable[[], None]) -> str:
    """The failed line of the suite, or the store's error; empty if there is none."""
    try:
        call()
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(frames) if frame.line), "assert")
        return f"{line}: {error}" if str(error) else str(line)
    except DeltawireError as error:
        return str(error)
    return ""
