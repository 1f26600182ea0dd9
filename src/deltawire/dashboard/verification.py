"""Shows whether a run's training could be repeated bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console

from deltawire.display import legible, safe_line
from deltawire.rl.trainer.verify_intervals import TrainingCheck, escape_probability
from deltawire.rl.trainer.verify_training import NAMED, TrainingVerification

SHARES = (0.05, 0.1, 0.25, 0.5)
"""Forged shares of a run for which the probability to escape is shown."""


def print_verification(found: TrainingVerification, console: Console) -> None:
    """Prints the outcome, and the tensors that differ."""
    origin = f"from the state at version {found.origin}, on {found.groups} groups of the bucket"
    if found.exact:
        many = found.last - found.first + 1
        versions = "version" if many == 1 else "versions"
        console.print(
            f"{many} {versions} ({found.first} to {found.last}) repeated {origin}: "
            "all with the same bits"
        )
        return
    console.print(f"version {found.differs} is the first that differs, repeated {origin}")
    console.print(safe_line(found.reason), markup=False, emoji=False)
    worst = sorted(found.tensors.items(), key=lambda item: -item[1])
    for name, count in worst[:NAMED]:
        console.print(f"  {count} weights of {legible(name, 100)}", markup=False, emoji=False)
    if len(worst) > NAMED:
        console.print(f"  and {len(worst) - NAMED} more tensors")


def lines_of_check(found: TrainingCheck) -> Iterator[str]:
    """Yields what a check of intervals found, what that shows, and what it does not."""
    whole = len(found.drawn) == found.intervals
    yield (
        f"{len(found.checked)} of {found.intervals} intervals computed again"
        f"{'' if whole else ', drawn at random'}: {found.versions} versions from {found.groups} "
        "groups"
    )
    if found.began:
        yield (
            f"the run is a fork: the steps up to version {found.began} are its parent's, and were "
            "not checked here"
        )
    for fault in found.faults:
        yield f"version {fault.version} does not follow: {fault.reason}"
    for reason, versions in groupby(found.not_checkable.items(), key=lambda one: one[1]):
        numbers = [number for number, _ in versions]
        yield (
            f"not checkable: {len(numbers)} versions ({numbers[0]} to {numbers[-1]}), because "
            f"{reason}"
        )
    if found.faults:
        return
    if whole and found.versions:
        yield (
            "shown: every version that was computed again, and the stored state at the end of each "
            "whole interval, follows from the one before by the run's groups, settings and seed, "
            "to the bit"
        )
    elif draws := len(found.checked):
        shares = ", ".join(
            f"{escape_probability(share, draws):.1%} with f = {share:.0%}" for share in SHARES
        )
        yield (
            f"shown: a forger of a share f of the intervals that can be checked would have escaped "
            f"with a probability of at most (1 − f)^{draws}: {shares}"
        )
    yield (
        "not shown: that answers were sampled and rewards given as stated; deltawire verifies what "
        "was computed from them"
    )
