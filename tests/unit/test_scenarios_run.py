"""Scenarios in tests that would never run: functions that nothing calls."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NESTED = re.compile(r"^[ ]{4,}(?:async )?def (\w+)\((?!self\b|cls\b)", re.MULTILINE)
DECORATED = re.compile(
    r"^[ ]{4,}@[\w.]+(?:\(.*\))?\n[ ]+(?:async )?def \w+\((?!self\b|cls\b)", re.MULTILINE
)
TEST = re.compile(r"^(?:async )?def test_", re.MULTILINE)
HELPER = re.compile(r"((?:^@.*\n)*)^(?:async )?def (?!test_|pytest_)(\w+)", re.MULTILINE)
SHARED = ("live_decider",)
"""Modules of tests/support with decorators for several files."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def uncalled(text, runs_at_once):
    """The lines and names of functions within functions that nothing names, but for those that one
    of the decorators ``runs_at_once`` runs."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, FUNCTIONS):
            continue
        named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        found += [
            f"{one.lineno}: {one.name}"
            for one in own_functions(function)
            if one.name not in named
            and not {ast.unparse(place) for place in one.decorator_list} & runs_at_once
        ]
    return found


def own_functions(node):
    """The functions that stand in a function, but not in a class or in another function there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        elif not isinstance(child, ast.ClassDef):
            yield from own_functions(child)


def runs_at_once(text):
    """The decorators of a module that run what they decorate, instead of returning it."""
    return frozenset(
        one.name
        for one in ast.parse(text).body
        if isinstance(one, ast.FunctionDef) and not any(True for _ in own_functions(one))
        and not any(isinstance(node, ast.Return) and node.value for node in ast.walk(one))
    )  # fmt: skip


@cache
def texts():
    return {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def test_each_function_in_a_test_is_called():
    found = []
    shared = [runs_at_once(texts()[TESTS / "support" / f"{name}.py"]) for name in SHARED]
    assert shared == [{"run_now"}]
    for path, text in texts().items():
        words = None
        suspect = bool(DECORATED.search(text))
        for name in NESTED.findall(text):
            words = words or Counter(re.findall(r"\w+", text))
            suspect |= words[name] == 1
        if suspect:
            decorators = runs_at_once(text).union(*shared)
            found += [f"{path.relative_to(TESTS)}:{one}" for one in uncalled(text, decorators)]
    assert not found, "nothing calls these, so their assertions never run"


def test_each_module_level_function_of_a_test_file_is_named():
    alone = {}
    for path, text in texts().items():
        if not path.name.startswith("test_"):
            continue
        for decorators, name in HELPER.findall(text):
            if "@" not in decorators and len(re.findall(rf"\b{name}\b", text)) == 1:
                alone[name] = path
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for name, path in alone.items()
        if not any(name in text for other, text in texts().items() if other != path)
    ]
    assert not found, "a test whose name does not begin with test_, or a function without use"


def test_test_files_are_collected():
    """Files of other names hold tests only where a collected file imports them."""
    others = [
        path
        for path, text in texts().items()
        if not path.name.startswith("test_") and TEST.search(text)
    ]
    imports = "\n".join(text for path, text in texts().items() if path.name.startswith("test_"))
    found = [path.name for path in others if f"from {path.stem} import" not in imports]
    assert not found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("@in_loop\n    def one(): pass", ["3: one"]),
        ("@in_loop\n    def one(): pass\n    one()", []),
        ("def one(): pass", ["2: one"]),
        ("def one(): two()\n    def two(): pass\n    one()", []),
        ("@at_once\n    def one(): pass", []),
        ("class A:\n        def one(self): pass", []),
        ("if x:\n        def one(): pass", ["3: one"]),
    ],
)
def test_what_is_not_called_is_found(body, expected):
    assert uncalled(f"def test_a():\n    {body}", frozenset({"at_once"})) == expected


def test_a_decorator_that_returns_its_function_runs_nothing():
    wraps = "def in_loop(t):\n    def run(*a): asyncio.run(t(*a))\n    return run\n"
    assert runs_at_once(wraps) == frozenset()
    assert runs_at_once("def in_loop(t): return t") == frozenset()
    assert runs_at_once("def in_loop(t): asyncio.run(t())") == {"in_loop"}
