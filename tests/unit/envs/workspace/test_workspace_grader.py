"""Code of the workspace that tries to be graded as something it is not."""

import asyncio
import sys

import pytest

from deltawire.envs.sandbox.box import CommandLimits, Sandbox
from deltawire.envs.workspace import problem
from deltawire.envs.workspace.grader import _answers, grade

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

TASK = problem("grader/1")
PATH, WRONG, RIGHT = TASK.repair
NAME = PATH.split("/")[1].removesuffix(".py")
LIMITS = CommandLimits(wall_s=20)


def verdict(files):
    return asyncio.run(grade(Sandbox(), files, [TASK.hidden, TASK.heldout], LIMITS))


def test_the_repair_passes_everything_and_the_fault_does_not():
    solved = verdict({**TASK.files, PATH: RIGHT.encode()})
    assert solved.passed == solved.asked == (len(TASK.hidden), len(TASK.heldout))
    untouched = verdict(TASK.files)
    assert 0 < untouched.passed[0] < untouched.asked[0]
    assert not untouched.all_right(0)


OK = '["returned", 1, []]'
FORGERIES = {
    "leaves with status 0": "import os\nos._exit(0)\n",
    "raises SystemExit": "import sys\nsys.exit(0)\n",
    "answers for the driver, and leaves": (
        "import os\nfor fd in range(3, 64):\n    for n in range(40):\n"
        f"        try: os.write(fd, ('[%d, {OK}]\\n' % n).encode())\n"
        "        except OSError: break\nos._exit(0)\n"
    ),
    "prints as a test runner would": "print('OK'); print('12 passed'); print('Ran 12 tests')\n",
    "replaces the driver's json": "import json\njson.dumps = lambda value: '[0, true]'\n",
    "makes values equal to everything": (
        f"class Yes(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        f"def {NAME}(*a, **k):\n    return Yes(1)\n"
    ),
    "gives a mock for each call": (f"import unittest.mock\n{NAME} = unittest.mock.MagicMock()\n"),
    "loops for ever": "while True:\n    pass\n",
    "nests without end": f"def {NAME}(*a, **k):\n    x = []\n    for _ in range(9000): x = [x]\n"
    "    return x\n",
    "looks for the answers": (
        f"import gc, sys, os\ndef {NAME}(*a, **k):\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n"
        "    f = sys._getframe(1)\n    return f.f_locals.get('expected', f.f_locals)\n"
    ),
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_no_forgery_earns_the_reward(code):
    forged = asyncio.run(
        grade(
            Sandbox(),
            {**TASK.files, PATH: code.encode()},
            [TASK.hidden, TASK.heldout],
            CommandLimits(wall_s=3, cpu_s=3),
        )
    )
    assert not forged.all_right(0)
    assert not forged.all_right(1)


def test_files_that_interpreters_and_test_runners_pick_up_change_nothing():
    hook = b"import os\nos.write(1, b'[0, true]\\n')\nos._exit(0)\n"
    names = ["conftest.py", "sitecustomize.py", "usercustomize.py", "json.py", "os.py"]
    hooks = dict.fromkeys([*names, "unittest/__init__.py", "importlib/__init__.py"], hook)
    assert not verdict({**TASK.files, **hooks}).all_right(0)
    assert verdict({**TASK.files, **hooks, PATH: RIGHT.encode()}).all_right(0)


def test_answers_that_are_none_are_passed_over_and_doubled_ones_do_not_count():
    lines = [b'[0, ["returned", 1, []]]', b"[1, NaN]", b"[", b"\xff", b"[" * 100_000, b'["a", 1]']
    lines += [b"[2, 1]", b"[2, 2]", b"[3, []]", b""]
    assert _answers(b"\n".join(lines)) == {0: ["returned", 1, []], 3: []}
