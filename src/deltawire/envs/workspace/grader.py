"""Grades a workspace outside the reach of its code.

Code of the workspace runs in the interpreter that calls it, where it can do anything: exit with
status 0, replace the test framework, print what a grader would. So no verdict is made there. A
fresh process in a fresh sandbox, over a copy of the workspace, receives calls and returns values;
the expected values never enter it, and are compared outside. The only way to forge a verdict is to
return the correct values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from deltawire.envs.sandbox.box import CommandLimits, Files, Sandbox
from deltawire.envs.workspace.problems import Case

_CALLS = """
import importlib, json, os, sys
answers = os.dup(1)
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
calls = json.loads(sys.argv[1])
sys.path.insert(0, os.getcwd())
for number, (module, function, arguments) in enumerate(calls):
    try:
        value = getattr(importlib.import_module(module), function)(*arguments)
        answer = json.dumps([number, ["returned", value, arguments]])
    except Exception as error:
        answer = json.dumps([number, ["raised", type(error).__name__]])
    os.write(answers, answer.encode() + b"\\n")
"""
OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Grade:
    """The number of passed cases in each set, of those that were asked."""

    passed: tuple[int, ...]
    asked: tuple[int, ...]

    def all_right(self, number: int) -> bool:
        """Returns whether all cases of a set passed."""
        return self.passed[number] == self.asked[number]


async def grade(
    sandbox: Sandbox, files: Files, sets: Sequence[Sequence[Case]], limits: CommandLimits
) -> Grade:
    """Calls every case of every set on a copy of ``files``, all in one process.

    Raises what `Sandbox.run` raises; an error of the workspace's code is a wrong answer.
    """
    asked = [case for cases in sets for case in cases]
    calls = json.dumps([[case.module, case.function, case.arguments] for case in asked])
    ended = await sandbox.run(
        ["python", "-I", "-S", "-B", "-c", _CALLS, calls],
        files,
        limits=replace(limits, output_bytes=OUTPUT_BYTES),
    )
    answers = _answers(ended.output)
    right = [answers.get(i) == case.expected for i, case in enumerate(asked)]
    passed, start = [], 0
    for cases in sets:
        passed.append(sum(right[start : start + len(cases)]))
        start += len(cases)
    return Grade(tuple(passed), tuple(map(len, sets)))


def _answers(output: bytes) -> dict[int, Any]:
    """Answers by number; a number that occurs twice is dropped, since each is written once."""
    answers: dict[int, Any] = {}
    twice: set[int] = set()
    for line in output.splitlines():
        try:
            number, answer = msgspec.json.decode(line, type=tuple[int, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if number in answers:
            twice.add(number)
        answers[number] = answer
    return {number: answer for number, answer in answers.items() if number not in twice}
