"""``bugs_named``: rebuilt bugs of others that are named, while the same without them is equal."""

from __future__ import annotations

from benchmarks.attest.known_bugs import BUGS
from benchmarks.training.keys import Measured, Options


def measure(options: Options) -> Measured:
    """Rebuilds each bug, and the same without it."""
    del options
    named = {
        name: bug.rebuilt(True) == bug.named and not bug.rebuilt(False)
        for name, bug in BUGS.items()
    }
    details = {name: {"threads": bug.threads, "named": named[name]} for name, bug in BUGS.items()}
    return Measured({"bugs_named": sum(named.values())}, details)
