"""Defines the sections about workers: which may take part, and how far the trainer trusts them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from deltawire.config.base import Fraction, Section

_WorkerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9*][A-Za-z0-9_*-]{0,62}\Z")]


class WorkersConfig(Section, frozen=True, kw_only=True):
    """The workers that may take part, and the largest share of a step that one of them makes.

    Example::

        [workers]
        allow = ["w*", "lab-7"]
        quota = 0.5
    """

    allow: Annotated[list[_WorkerName], Meta(max_length=1 << 16)] = []
    """Names of workers, in which ``*`` stands for any characters; empty allows all names. A
    machine's policy may name fewer (`deltawire.config.machine`).
    """
    quota: Fraction = 0.0
    """The largest share of a step's groups that one worker makes while others deliver. 0 derives
    it: a half with ``allow``, and no limit without, where all workers have one owner."""

    @property
    def share(self) -> float:
        """Return the quota, derived if none is set."""
        return self.quota or (0.5 if self.allow else 1.0)


class TrustConfig(Section, frozen=True, kw_only=True):
    """How far the trainer trusts its workers (`deltawire.rl.evaluate.rescoring`).

    Example::

        [trust]
        rescore_share = 0.2
    """

    rescore_share: Fraction = 0.1
    """The share of groups, drawn by the trainer, whose rewards and log-probabilities it computes
    again; 0 computes none. A worker whose groups disagree is quarantined."""
    rescore_waiting: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """The most groups that wait to be computed again; further drawn groups are skipped and
    counted.
    """
    logprob_gap: Annotated[float, Meta(ge=0, le=1e9)] = 0.1
    """The largest mean difference of a group's log-probabilities, in nats a token: room for other
    engines and precisions. One token may differ by 30 times as much."""
