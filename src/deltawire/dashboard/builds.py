"""Sorts the processes of a run by the build of deltawire that they run, as heartbeats state it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from deltawire.builds import work_together
from deltawire.display import legible

NAMED = 4


def builds_of(processes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns names of processes by build, from pairs of build and name; empty if none has a build.
    Processes of releases that do not name their build have the build "".
    """
    found: dict[str, list[str]] = {}
    for build, name in processes:
        found.setdefault(build, []).append(name)
    return dict(sorted(found.items())) if any(found) else {}


def builds_words(builds: dict[str, list[str]]) -> str:
    """Says which build all processes have, or which process has which; empty without any."""
    if len(builds) <= 1:
        return "".join(f"build: {legible(build, 64)}" for build in builds)
    words = []
    for build, names in builds.items():
        shown = ", ".join(legible(name, 24) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        words.append(f"{legible(build, 64) or 'without a name'} ({shown}{more})")
    return f"builds: {'; '.join(words)}"


def builds_problem(builds: dict[str, list[str]]) -> str:
    """Says which two builds are further apart than processes of one run may be; empty for none."""
    for one, other in combinations(builds, 2):
        if not work_together(one, other):
            words = f"builds {one} and {other} are more than one release apart"
            return f"{words}: upgrade one release at a time (docs/UPGRADING.md)"
    return ""
