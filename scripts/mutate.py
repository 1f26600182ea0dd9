"""Breaks the code of each claim of docs/THREATS.md in turn, and lists what no test notices.

``scripts/mutations.toml`` says for each claim which code is replaced by what. Each mutation is made
in a copy of the tree, where only the tests that the claim names are run: one of them must fail. A
guard that answers no attacker is no claim of that page: its mutation names its rule and its tests.
Ends with 1 if a mutation is not noticed, or cannot be tried.

Example::

    python scripts/mutate.py                  # all
    python scripts/mutate.py webhook receipt  # those of claims that contain one of the words
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, TABLE = Path("docs/THREATS.md"), Path("scripts/mutations.toml")
SITE = """import sys
# An editable installation finds deltawire before sys.path does, in the tree that is not broken.
sys.meta_path[:] = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
"""


@dataclass(frozen=True)
class Claim:
    """A row of the page's table of claims that names tests, as ``path::name``."""

    text: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mutation:
    """One change that must make a claim false. ``claim`` is how the claim's text begins; the rule
    of a guard has its ``tests`` here."""

    claim: str
    file: str
    code: str
    becomes: str
    tests: tuple[str, ...] = ()

    def of(self, claims: Sequence[Claim]) -> Claim:
        """Returns the claim that this breaks; raises `ValueError` unless there is exactly one."""
        if self.tests:
            return Claim(self.claim, self.tests)
        found = [claim for claim in claims if claim.text.startswith(self.claim)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} claims of {PAGE} begin with {self.claim!r}")
        return found[0]

    def applied(self, root: Path) -> str:
        """Returns the file's broken text; raises `ValueError` unless the code is there once."""
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.code) != 1:
            raise ValueError(
                f"{self.file} has this code {text.count(self.code)} times: {self.code}"
            )
        broken = text.replace(self.code, self.becomes)
        if self.file.endswith(".py"):
            compile(broken, self.file, "exec")
        return broken


def claims_of(root: Path = ROOT) -> list[Claim]:
    """Returns the claims of the page that name tests."""
    section = (root / PAGE).read_text(encoding="utf-8").split("## Claims\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [
        Claim(row[0].strip(), tuple(re.findall(r"`(tests/[\w/.]+\.py::\w+)`", row[-1])))
        for row in rows[2:]
        if "tests/" in row[-1]
    ]


def mutations_of(root: Path = ROOT) -> list[Mutation]:
    """Returns the declared mutations."""
    table = tomllib.loads((root / TABLE).read_text(encoding="utf-8"))
    guards = [
        Mutation(row.pop("rule"), tests=tuple(row.pop("tests")), **row) for row in table["guard"]
    ]
    return [*(Mutation(**row) for row in table["mutation"]), *guards]


def copy_tree(place: Path) -> None:
    """Copies the files that git knows or would add, and the native module."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    native = subprocess.run(
        [sys.executable, "-c", "import deltawire._native as n; print(n.__file__)"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    shutil.copy2(native, place / "src/deltawire")
    (place / "site").mkdir()
    (place / "site/sitecustomize.py").write_text(SITE)


def run_tests(place: Path, tests: Sequence[str], *options: str) -> tuple[int, list[str]]:
    """Runs tests of the copy; returns pytest's exit status and the tests that failed."""
    path = os.pathsep.join(str(place / name) for name in ("site", "src"))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603 - our own words
        [
            sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider",
            "-m", "drills or not drills", *options, *tests,
        ],
        cwd=place, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, rows


def tried(place: Path, mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, int, str]]:
    """Makes each mutation in the copy, runs its claim's tests until one fails, and takes it back;
    yields pytest's exit status and the test that failed."""
    claims = claims_of()
    for mutation in mutations:
        file = place / mutation.file
        whole = file.read_text(encoding="utf-8")
        file.write_text(mutation.applied(place), encoding="utf-8")
        try:
            status, failed = run_tests(place, mutation.of(claims).tests, "-x")
        finally:
            file.write_text(whole, encoding="utf-8")
        yield mutation, status, failed[0] if failed else ""


def unnoticed(place: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Tries the mutations, and returns a line for each that no test notices.

    A test notices only what it does not fail of anyway: in the end, all that failed are run without
    a mutation.
    """
    bad: list[str] = []
    noticed: dict[str, list[str]] = {}
    for mutation, status, test in tried(place, mutations):
        line = f"{mutation.claim} [{mutation.file}]"
        if status == 1:
            noticed.setdefault(test, []).append(line)
            say(f"{line}\n    noticed by {test}")
        else:
            wrong = "not noticed" if status == 0 else f"pytest ended with {status}"
            bad.append(f"{wrong}: {line}")
            say(f"{line}\n    {wrong}")
    status, failed = run_tests(place, list(noticed)) if noticed else (0, [])
    for test in failed:
        bad += [f"{test} fails without it too: {line}" for line in noticed.get(test, ())]
    if status not in (0, 1):
        bad.append(f"pytest ended with {status} on the tests that noticed something")
    return bad


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)  # noqa: T201


def main(words: Sequence[str]) -> int:
    """Tries the mutations whose claims contain one of the words, or all."""
    asked = [
        one for one in mutations_of() if not words or any(w in one.claim.lower() for w in words)
    ]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deltawire-mutate-") as folder:
        copy_tree(Path(folder))
        bad = unnoticed(Path(folder), asked)
    say(f"{len(asked)} mutations in {time.monotonic() - began:.0f} s; {len(bad)} not noticed")
    for line in bad:
        say(f"    {line}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main([word.lower() for word in sys.argv[1:]]))
