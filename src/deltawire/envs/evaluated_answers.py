"""Keeps scorers of reasoning-gym from running what a model wrote.

Some scorers pass an answer to ``eval`` or to sympy's ``parse_expr``, which runs it as Python. Here
these two names are replaced, in the module of such a scorer, by calls of an `Evaluator`: the answer
is evaluated in a sandbox, in a fresh process, and comes back as data; the scorer compares it in
this process.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from deltawire.envs.sandbox.evaluator import Evaluator
from deltawire.errors import InputError

_COVERED = {"eval", "parse_expr"}
_REFUSED = {"exec", "compile", "sympify", "lambdify"}


def evaluating(dataset: Any) -> bool:
    """Returns whether the scorer of a dataset, or of a part of a composite one, evaluates anything.

    Raises `InputError` if it does so in a way that the sandbox does not cover.
    """
    names: set[str] = set()
    for module in _scoring_modules(dataset):
        names |= _names_used(module)
    if refused := names & _REFUSED:
        raise InputError(
            f"the scorer of {type(dataset).__name__} runs {', '.join(sorted(refused))} on answers, "
            "which no sandbox covers",
            hint="choose another dataset",
        )
    return bool(names & _COVERED)


def evaluate_in_sandbox(dataset: Any, evaluator: Evaluator) -> None:
    """Replaces ``eval`` and ``parse_expr`` in the modules of a dataset's scorers, for good."""
    import sympy

    def parse(text: str, local_dict: Mapping[str, Any] | None = None, **_: Any) -> Any:
        return evaluator.expression(str(text), local_dict or ())

    class Library:
        """sympy, whose ``parse_expr`` is the sandbox's."""

        parse_expr = staticmethod(parse)

        def __getattr__(self, name: str) -> Any:
            return getattr(sympy, name)

    library = Library()
    for module in _scoring_modules(dataset):
        space = vars(module)
        for name, value in list(space.items()):
            if value is sympy:
                space[name] = library
            elif value is sympy.parse_expr:
                space[name] = parse
        space["eval"] = lambda text, *_: evaluator.literal(str(text))


def _scoring_modules(dataset: Any) -> Iterator[ModuleType]:
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, Mapping):
        for part in parts.values():
            yield from _scoring_modules(part)
    module = inspect.getmodule(type(dataset).score_answer)
    if module is not None:
        yield module


def _names_used(module: ModuleType) -> set[str]:
    """The names of evaluating functions that ``score_answer`` uses, and the functions of the
    module that it calls."""
    tree = ast.parse(inspect.getsource(sys.modules[module.__name__]))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    waiting, seen, found = ["score_answer"], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Name):
                found.add(node.id)
                waiting.append(node.id)
            elif isinstance(node, ast.Attribute):
                waiting.append(node.attr)
                if node.attr not in ("compile", "eval"):  # re.compile, a frame's eval
                    found.add(node.attr)
    return (found - functions.keys()) & (_COVERED | _REFUSED)
