"""Moves an engine from version to version, between two of its steps.

Concurrency::

    watching thread            the engine's loop                     each rank
      polls for a newer ─────▶  between two steps: prepare N ──────▶  starts a thread: fetch,
      version; wakes the        …steps continue…                      decode, verify, stage
      loop if it sleeps         between two steps: all staged? ◀────  reports its status
                                (drain: new requests wait until
                                the running ones have finished)
                                between two steps: swap to N ──────▶  scatter, agree, commit
                                relabel, resalt                       or undo
                                the next step is N's

The loop never waits for the bucket, and the ranks agree on each swap among themselves: all of them
hold N afterwards, or none.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Literal

from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.following.version_watcher import POLL_EVERY_S, VersionWatcher
from deltawire.errors import BugError, InputError, ResyncError
from deltawire.runtime.reader_report import Kind
from deltawire.store import Bucket, open_bare_bucket

RETRY_AFTER_S = 1.0
"""The pause before a failed swap is tried again; it doubles each time, up to `RETRY_AT_MOST_S`."""

RETRY_AT_MOST_S = 30.0

Phase = Literal["serving", "preparing", "ready"]


class SwapController(ABC):
    """Moves an engine from version to version; an engine's own class says how it is asked.

    `ENGINE` is the engine's package. ``settings`` is None until a call from outside names the run.
    """

    ENGINE: Kind

    def __init__(self, settings: FollowSettings | None) -> None:
        self.settings = settings
        self.phase: Phase = "serving"
        self.version = -1
        self.wanted = -1
        self.failure = ""
        self.swaps = 0
        self.last_swap: dict[str, Any] = {}
        self._failures = 0
        self._not_before = 0.0
        self._attest_at = float("inf")
        self._watch: VersionWatcher | None = None

    # Left to an engine's own class.

    @abstractmethod
    def call_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Has all ranks do one of ``open``, ``prepare``, ``status``, ``swap``, ``attest`` and
        ``repair``, and returns their answers in rank order."""

    @abstractmethod
    def wake(self) -> None:
        """Wakes a sleeping loop."""

    @abstractmethod
    def may_swap(self) -> bool:
        """Returns whether no step and, with ``drain``, no sequence is running. If not, sees to it
        that none will be."""

    @abstractmethod
    def resume(self) -> None:
        """Undoes what `may_swap` did to the engine."""

    @abstractmethod
    def label(self, answers: list[dict[str, Any]]) -> None:
        """Labels tokens with ``version`` from here on, and hides older cached prefixes from new
        requests."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Writes to the engine's log."""

    # Calls from outside.

    def status(self) -> dict[str, Any]:
        """Returns the version served, the one wanted, the last failure, and each rank's status."""
        ranks = self.call_ranks("status") if self.settings is not None else []
        return {
            "engine": self.ENGINE,
            "version": self.version,
            "digest": ranks[0]["digest"] if ranks else "",
            "wanted": self.wanted,
            "phase": self.phase,
            "failure": self.failure or (self._watch.failure_now() if self._watch else ""),
            "swaps": self.swaps,
            "last_swap": self.last_swap,
            "run": self.settings.run if self.settings else "",
            "ranks": ranks,
        }

    def want(self, version: int | str) -> dict[str, Any]:
        """Moves to ``version``, newer or older, once it is prepared; returns at once."""
        if self.settings is None:
            raise InputError("no run is open")
        self.wanted, self._not_before = int(version), 0.0
        self.failure, self._failures = "", 0
        self.wake()
        return self.status()

    def attest(self) -> dict[str, Any]:
        """Digests the live bits of all ranks, and repairs those that are not the version's before
        the next step."""
        answers = self.call_ranks("attest")
        bad = [answer for answer in answers if not answer.get("sound")]
        if bad:
            self.failure = "; ".join(answer["failure"] for answer in bad)
            self._repair()
            self.failure = f"repaired: {self.failure}"
        return {"version": self.version, "sound": not bad, "ranks": answers}

    def close(self) -> None:
        """Ends the thread that polls for versions; the engine's shutdown calls it."""
        if self._watch is not None:
            self._watch.close()

    # Following the run.

    def open(self, settings: FollowSettings) -> None:
        """Has all ranks load the newest version, and follows the run if the settings say so."""
        for answer in self.call_ranks("open", settings):
            _raise_if_failed(answer)
        self.adopt()
        self.follow(settings)

    def follow(self, settings: FollowSettings) -> None:
        """Starts the thread that polls for versions, if one is needed."""
        if settings.attest_every_s:
            self._attest_at = time.monotonic() + settings.attest_every_s
        if self._watch is None and (settings.follow or settings.attest_every_s):
            self._watch = self.watcher(open_bare_bucket(settings.run), settings)
            self._watch.start()

    def watcher(self, bucket: Bucket, settings: FollowSettings) -> VersionWatcher:
        """Returns the thread that leads this controller, not started."""
        return VersionWatcher(self, bucket, polling=settings.follow, public_key=settings.public_key)

    @property
    def epoch(self) -> str:
        """Names the weights of this swap: two swaps to one version differ."""
        return f"{self.swaps} {self.version}"

    def due(self) -> bool:
        """Returns whether the controller has work to do before the next step."""
        if self.phase == "ready":
            return True
        now = time.monotonic()
        if self.phase == "preparing":
            return now >= self._not_before
        return now >= self._attest_at or (self.wanted != self.version and now >= self._not_before)

    def attest_is_due(self) -> bool:
        """Returns whether the next work is a check of the live bits."""
        return self.phase == "serving" and time.monotonic() >= self._attest_at

    def busy(self) -> bool:
        """Returns whether the loop must be woken even if no newer version was found."""
        return self.phase != "serving" or self.due()

    def advance(self, *, attest: bool) -> None:
        """Does the next piece of work, between two steps."""
        if attest:
            assert self.settings is not None
            self._attest_at = time.monotonic() + self.settings.attest_every_s
            self.attest()
        elif self.phase == "serving":
            self._succeeded(self.call_ranks("prepare", self.wanted))
            self.phase = "preparing"
            self._not_before = time.monotonic() + POLL_EVERY_S
        elif self.phase == "preparing":
            answers = self.call_ranks("status")
            if not self._succeeded(answers):
                return
            self._not_before = time.monotonic() + POLL_EVERY_S
            if all(answer["prepared"] == self.wanted for answer in answers):
                self.phase = "ready"
            elif not any(answer["preparing"] for answer in answers):
                self.phase = "serving"  # The wanted version has changed meanwhile.
        if self.phase == "ready" and self.may_swap():
            self._swap()

    def _succeeded(self, answers: list[dict[str, Any]]) -> bool:
        """Returns whether nothing failed; otherwise keeps the old version and schedules a retry."""
        failed = [answer["failure"] for answer in answers if answer["failure"]]
        if not failed:
            return True
        self._fail(failed[0])
        return False

    def _fail(self, failure: str) -> None:
        self.failure = failure
        pause = min(RETRY_AFTER_S * 2**self._failures, RETRY_AT_MOST_S)
        self.warn(f"stays at version {self.version}, retrying in {pause:.0f} s: {failure}")
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self.phase = "serving"
        self.resume()

    def _swap(self) -> None:
        began = time.perf_counter()
        answers = self.call_ranks("swap", self.wanted)
        if not self._succeeded(answers):
            self.attest()  # The live bits may have differed from the mirrors.
            return
        self.adopt()
        self.resume()
        self.phase, self._failures, self.failure = "serving", 0, ""
        self.last_swap = {
            "version": self.version,
            "engine_ms": (time.perf_counter() - began) * 1e3,
            "ranks": [answer["swap"] for answer in answers],
        }

    def _repair(self) -> None:
        """Writes the mirrors' bits over the live ones at once. Raises if that fails, which ends the
        engine: it then has no valid weights to serve.
        """
        for answer in self.call_ranks("repair"):
            _raise_if_failed(answer)
        self.adopt()

    def adopt(self) -> None:
        """Takes over the version that the ranks hold now."""
        answers = self.call_ranks("status")
        versions = {answer["version"] for answer in answers}
        if len(versions) != 1:
            raise BugError(f"the ranks hold versions {sorted(versions)}")
        self.version = versions.pop()
        self.wanted = self.version if self.wanted < 0 else self.wanted
        self.swaps += 1
        self.label(answers)


def _raise_if_failed(answer: dict[str, Any]) -> None:
    if answer["failure"]:
        raise ResyncError(answer["failure"])
