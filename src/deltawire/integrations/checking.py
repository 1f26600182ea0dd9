"""Compares what engines hold after an update with what the trainer held, and warns or stops.

::

    trainer ── digests (before the update) ── update of the framework ── ask each engine ─▶ compare
                                                                        (training waits)

An engine that cannot be asked, or tensors that are not readable, give one warning for each text,
and count neither as equal nor as different. So does any other error of a comparison: only a
mismatch may end a training.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, Literal, TypeVar

from deltawire.attest import Digests
from deltawire.attest.engine import compare_settled
from deltawire.attest.sides import Side
from deltawire.attest.verdicts import WeightReport
from deltawire.display import safe_line
from deltawire.engines.live_parts import RankParts
from deltawire.errors import DeltawireError, InputError, StoppedError

OnMismatch = Literal["warn", "stop"]
Ask = Callable[[Side], list[RankParts]]
"""Has all ranks of an engine digest what they hold of a reference."""

LIMIT_S = 240.0
"""Seconds for all engines of a comparison together. The trainer's other ranks wait meanwhile, and
NCCL gives up after ten minutes."""

Found = TypeVar("Found")

log = logging.getLogger(__name__)


class WeightCheck:
    """Compares after updates, and keeps the newest report of each engine in ``last``.

    With ``on_mismatch="stop"`` tensors that differ raise `StoppedError`, with ``"warn"`` they are
    logged. ``every`` leaves updates out: the first one is compared, then each Nth. Floating-point
    weights are compared as ``dtype``, which the engine serves; None keeps that of the trainer.

    Example::

        check = WeightCheck("stop")
        reference = check.reference(lambda: digests(model, dtype=check.dtype))
        check.examine(reference, lambda: {url: ask})
    """

    def __init__(
        self,
        on_mismatch: OnMismatch = "warn",
        *,
        every: int = 1,
        dtype: str | None = "bfloat16",
        token: str = "",
    ) -> None:
        if on_mismatch not in ("warn", "stop"):
            raise InputError(f'on_mismatch is "warn" or "stop", not {on_mismatch!r}')
        if every < 1:
            raise InputError("every must be at least 1")
        self.on_mismatch, self.dtype, self.token = on_mismatch, dtype, token
        self.last: dict[str, WeightReport] = {}
        self.updates = 0
        self._every = every
        self._before: Side | None = None
        self._said: set[str] = set()

    def due(self) -> bool:
        """Counts an update, and returns whether it is compared."""
        due = self.next_is_due
        self.updates += 1
        return due

    @property
    def next_is_due(self) -> bool:
        """Returns whether the next update is compared."""
        return self.updates % self._every == 0

    def reference(self, digest: Callable[[], Digests | str]) -> Side | None:
        """Returns the trainer's weights of this update as a side. If ``digest`` fails, or returns a
        sentence that says why not, that is logged once, and there is nothing to compare."""
        found = self.tried(digest)
        if isinstance(found, str):
            self.warn_once(found)
            return None
        return None if found is None else Side(f"update {self.updates}", found)

    def tried(self, call: Callable[[], Found]) -> Found | None:
        """Returns what ``call`` does; None if it fails with any error, which is logged once."""
        try:
            return call()
        except Exception as error:
            self.warn_once(f"nothing was compared: {said(error)}")
            return None

    def examine(self, reference: Side | None, engines: Callable[[], Mapping[str, Ask]]) -> None:
        """Compares each engine; see the class for what a difference does."""
        if reference is not None:
            self.act(self.compare(reference, engines))

    def compare(self, reference: Side, engines: Callable[[], Mapping[str, Ask]]) -> str:
        """Compares all engines at the same time, and returns what differs in one sentence; empty if
        nothing does. ``engines`` finds them; an error of it is logged as others are."""
        before, self._before = self._before, reference
        others = [] if before is None else [before]
        named = self.tried(engines)
        if named is None:
            return ""
        calls = {
            name: partial(compare_settled, name, partial(ask, reference), reference, lambda: others)
            for name, ask in named.items()
        }
        answers = dict(_at_once(calls))
        found = []
        for name in named:
            report = answers.get(name)
            if report is None:
                self.warn_once(f"{name} was not compared: no answer within {LIMIT_S:.0f} s")
                continue
            if isinstance(report, Exception):
                self.warn_once(f"{name} was not compared: {said(report)}")
                continue
            self.last[name] = report
            if report.differs:
                found.append(safe_line(report.problem))
            elif not report.equal:
                self.warn_once(f"{name}: {_unreadable(report)}")
        if not named:
            self.warn_once("there is no engine to compare")
        return "; ".join(found)

    def act(self, problem: str) -> None:
        """Logs a problem, or stops the training because of it."""
        if problem and self.on_mismatch == "stop":
            raise StoppedError(
                f"after an update, {problem}", hint='on_mismatch="warn" would log it and train on'
            )
        if problem:
            log.warning("after an update, %s", problem)

    def warn_once(self, text: str) -> None:
        """Logs a text that was not logged before."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", safe_line(text))


def said(error: Exception) -> str:
    """Returns an error as one line of a warning; foreign ones with their type."""
    if isinstance(error, DeltawireError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:500]}"


def _at_once(
    calls: Mapping[str, Callable[[], WeightReport]],
) -> Iterator[tuple[str, WeightReport | Exception]]:
    """Calls all in threads of their own, and yields the results, or errors, that come within
    `LIMIT_S`. A call that takes longer is left behind, and ends with its process."""
    done: queue.SimpleQueue[tuple[str, WeightReport | Exception]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], WeightReport]) -> None:
        try:
            done.put((name, call()))
        except Exception as error:
            done.put((name, error))

    for name, call in calls.items():
        threading.Thread(
            target=run, args=(name, call), name="deltawire-compare", daemon=True
        ).start()
    until = time.monotonic() + LIMIT_S
    for _ in calls:
        try:
            yield done.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return


def _unreadable(report: WeightReport) -> str:
    odd = [one for one in report.tensors if one.verdict == "not readable"]
    first = f", such as {odd[0].name}: {odd[0].text}" if odd else ""
    return f"{len(odd)} of {len(report.tensors)} tensors are not readable{first}"


def wrapped_once(
    owner: Any, name: str, check: WeightCheck, around: Callable[..., Any]
) -> WeightCheck:
    """Replaces a function of a class or a module by ``around(original, check, *arguments)``, which
    is asynchronous if the function is. Once: a later ``verify`` takes the place of an earlier one.
    Returns the check."""
    original = getattr(owner, name)
    original = getattr(original, "_deltawire_original", original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, check, *args, **kwargs)

    @wraps(original)
    async def call_later(*args: Any, **kwargs: Any) -> Any:
        return await around(original, check, *args, **kwargs)

    replacement: Any = call_later if inspect.iscoroutinefunction(original) else call
    replacement._deltawire_original = original
    replacement._deltawire_check = check
    setattr(owner, name, replacement)
    return check
