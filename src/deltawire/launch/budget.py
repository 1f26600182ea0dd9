"""Reads the decisions of a run's controller, and computes each again from the run's evaluations."""

from __future__ import annotations

import msgspec

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.events import Controlled, Evaluated
from deltawire.rl.budget.decision import replay
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.sync import read_run


class ReplayedBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Every decision that a run recorded, and how it compares with the one computed again.

    ``differ`` are the evaluated versions whose recorded decision is another one, or missing;
    ``extra`` those with a decision that follows from no evaluation.

    Example::

        found = replay_budget("runs/mine")
        found.equal   # True: the recorded moves follow from the recorded evaluations
    """

    decisions: list[Controlled]
    differ: list[int]
    extra: list[int]

    @property
    def equal(self) -> bool:
        """Returns whether every decision is the one computed again."""
        return not self.differ and not self.extra

    @property
    def moves(self) -> list[Controlled]:
        """The decisions that changed the setting."""
        return [one for one in self.decisions if one.moved]


def replay_budget(location: str, *, trust: ReaderTrust = ANY) -> ReplayedBudget:
    """Computes the decisions of the run at ``location`` again from its events.

    Raises `InputError` for a run without a controller.
    """
    bucket = open_trusted(location, trust)
    config = config_of(read_run(bucket), url=bucket.url)
    if config.budget.controller == "fixed":
        raise InputError(
            "this run has no controller",
            hint='set budget.controller = "auto" in the configuration of a new run',
            run=bucket.url,
        )
    events = EventTail(bucket, processes=("evaluator",)).read(everything=True)
    return compare(
        [one for one in events if isinstance(one, Evaluated)],
        [one for one in events if isinstance(one, Controlled)],
        config,
    )


def compare(
    evaluated: list[Evaluated], recorded: list[Controlled], config: RunConfig
) -> ReplayedBudget:
    """Compares recorded decisions with those that follow from the evaluations."""
    found = {one.version: one for one in recorded}
    again = {one.version: one for one in replay(evaluated, config)}
    return ReplayedBudget(
        decisions=[found[version] for version in sorted(found)],
        differ=[v for v, one in sorted(again.items()) if found.get(v) != one],
        extra=sorted(found.keys() - again.keys()),
    )
