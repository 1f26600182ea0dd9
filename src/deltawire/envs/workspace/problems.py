"""Generates small Python packages with a planted fault; a package is a function of its seed.

A problem has three sets of cases. The visible ones are the package's own tests. The hidden ones
decide the reward, the held-out ones a probe; the agent never sees either.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deltawire.envs.workspace.subjects import FAMILIES, SUBJECTS, Arguments, Subject

VISIBLE, HIDDEN = 6, 12
_OTHERS = 3
"""Cases of each correct function: a change must not break it."""
_DRAWS = 400
_PACKAGES = ("ledger", "orchard", "lantern", "harbour", "meadow", "compass", "quarry", "kiln")


@dataclass(frozen=True)
class Case:
    """A call and its expected outcome: ``["returned", value, arguments afterwards]`` or
    ``["raised", name of the exception]``.

    Example::

        Case("lists", "first", ([3, 1],), ["returned", 3, [[3, 1]]])
    """

    module: str
    function: str
    arguments: Arguments
    expected: list[Any]


@dataclass(frozen=True)
class Problem:
    """A package with one fault.

    ``files`` is the workspace; ``repair`` is the change of a solution as (path, wrong text, correct
    text), for scripted policies and tests.

    Example::

        fault = problem("heldout/0")
        path, wrong, right = fault.repair
        fault.files[path] = fault.files[path].replace(wrong.encode(), right.encode())
    """

    family: str
    package: str
    files: dict[str, bytes]
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]
    heldout: tuple[Case, ...]
    repair: tuple[str, str, str]


def outcome(function: Callable[..., Any], arguments: Arguments) -> list[Any]:
    """Calls one of the functions of this package; its arguments are copied first."""
    given = copy.deepcopy(arguments)
    try:
        value = function(*given)
    except Exception as error:
        return ["raised", type(error).__name__]
    return ["returned", value, given]


def problem(seed: str) -> Problem:
    """Generates the problem of a seed."""
    rng = random.Random(hashlib.blake2b(seed.encode()).digest())
    family = rng.choice(FAMILIES)
    subject, fault = rng.choice([(s, f) for s in SUBJECTS for f in s.faults if f.family == family])
    others = rng.sample([s for s in SUBJECTS if s is not subject], rng.randint(1, 3))
    package = rng.choice(_PACKAGES)
    names = {s: rng.choice(s.names) for s in (subject, *others)}
    modules = {s: f"{package}.{name}" for s, name in names.items()}
    wrong = _function(subject.source(names[subject], fault), names[subject])

    def cases(count: int) -> tuple[Case, ...]:
        found = _revealing_cases(rng, subject, wrong, modules[subject], names[subject], count)
        for other in others:
            found += [_case(rng, other, modules[other], names[other]) for _ in range(_OTHERS)]
        return tuple(found)

    visible, hidden, heldout = cases(VISIBLE), cases(HIDDEN), cases(HIDDEN)
    sources = {
        f"{package}/{names[s]}.py": s.source(names[s], fault if s is subject else None)
        for s in sorted(names, key=lambda s: names[s])
    }
    path = f"{package}/{names[subject]}.py"
    return Problem(
        family,
        package,
        _files(package, sources, visible),
        visible,
        hidden,
        heldout,
        repair=(path, sources[path], subject.source(names[subject])),
    )


def _function(source: str, name: str) -> Callable[..., Any]:
    """Compiles a function of this package with one of its faults."""
    space: dict[str, Any] = {}
    exec(source, space)  # noqa: S102  -- text of this package, not input
    function: Callable[..., Any] = space[name]
    return function


def _case(rng: random.Random, subject: Subject, module: str, name: str) -> Case:
    arguments = subject.arguments(rng)
    return Case(module, name, arguments, outcome(subject.function, arguments))


def _revealing_cases(
    rng: random.Random,
    subject: Subject,
    wrong: Callable[..., Any],
    module: str,
    name: str,
    count: int,
) -> list[Case]:
    """Different cases of a function: at least a third that the wrong version fails, and some that
    it passes."""
    passing: list[Case] = []
    failing: list[Case] = []
    seen: set[str] = set()
    for _ in range(_DRAWS):
        case = _case(rng, subject, module, name)
        if repr(case.arguments) in seen:
            continue
        seen.add(repr(case.arguments))
        same = outcome(wrong, case.arguments) == case.expected
        (passing if same else failing).append(case)
        enough = len(failing) >= count // 3 and len(passing) >= count // 6
        if enough and len(passing) + len(failing) >= count:
            break
    most = count - min(len(passing), count // 6)
    cases = failing[: min(most, max(count // 3, count - len(passing)))]
    cases += passing[: count - len(cases)]
    rng.shuffle(cases)
    return cases


def _files(package: str, sources: dict[str, str], visible: Sequence[Case]) -> dict[str, bytes]:
    names = sorted(path.removeprefix(f"{package}/").removesuffix(".py") for path in sources)
    exports = "".join(f"from {package}.{name} import {name}\n" for name in names)
    listed = ", ".join(f'"{name}"' for name in names)
    texts = {
        "README.md": f"# {package}\n\nFunctions: {', '.join(names)}. Each says in its docstring "
        "what it must do.\n\nRun the tests with `python -m unittest -q`.\n",
        f"{package}/__init__.py": f'"""{package}."""\n\n{exports}\n__all__ = [{listed}]\n',
        "tests/__init__.py": "",
        **sources,
    }
    for name in names:
        cases = [case for case in visible if case.function == name]
        texts[f"tests/test_{name}.py"] = _tests(package, name, cases)
    return {path: text.encode() for path, text in sorted(texts.items())}


def _tests(package: str, name: str, cases: Sequence[Case]) -> str:
    lines = [
        "import unittest",
        "",
        f"from {package} import {name}",
        "",
        "",
        f"class Test{name.title().replace('_', '')}(unittest.TestCase):",
    ]
    for number, case in enumerate(cases, 1):
        lines += [f"    def test_{number}(self):", f"        arguments = {case.arguments!r}"]
        if case.expected[0] == "raised":
            lines += [f"        with self.assertRaises({case.expected[1]}):"]
            lines += [f"            {name}(*arguments)", ""]
        else:
            lines += [f"        self.assertEqual({name}(*arguments), {case.expected[1]!r})"]
            lines += [f"        self.assertEqual(arguments, {case.expected[2]!r})", ""]
    return "\n".join(lines)


def fault_count() -> int:
    """The number of faults that can be planted."""
    return sum(len(subject.faults) for subject in SUBJECTS)


__all__ = ["Case", "Problem", "fault_count", "outcome", "problem"]
