"""A model's answer is code to some scorers of reasoning-gym. None of it reaches the worker."""

import asyncio
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import pytest
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from deltawire.config import TaskConfig
from deltawire.envs import reasoning
from deltawire.envs.base import Action
from deltawire.envs.evaluated_answers import evaluating
from deltawire.envs.reasoning import ReasoningTasks
from deltawire.envs.sandbox import evaluator as sandboxed
from deltawire.envs.sandbox.box import Sandbox
from deltawire.envs.sandbox.evaluator import EvaluationError, Evaluator
from deltawire.errors import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
SECRET = "AKIA-the-workers-own"


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator() as one:
        yield one


@pytest.fixture(scope="module")
def impatient():
    """With less processor time than a worker's, which answers that never end use up."""
    with Evaluator(dataclasses.replace(sandboxed.LIMITS, cpu_s=1.0)) as one:
        yield one


def score(tasks, task, answer):
    async def play():
        episode = tasks.open(task)
        await episode.reset()
        return (await episode.step(Action(answer))).reward

    return asyncio.run(play())


def tasks_of(dataset, **options):
    return ReasoningTasks(TaskConfig(dataset=dataset, heldout=2, options=options), seed=0)


EVALUATING = {
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


def test_every_scorer_that_evaluates_is_found():
    """The list is of reasoning-gym 0.1; a release that adds one to it is noticed here."""
    found = set()
    for name, (kind, _) in DATASETS.items():
        if kind.score_answer is not ProceduralDataset.score_answer and name != "composite":
            found |= {name} if evaluating(object.__new__(kind)) else set()
    assert found == EVALUATING


READ_CREDENTIALS = [
    "__import__('os').environ['AWS_SECRET_ACCESS_KEY']",
    "__import__('os').getenv('AWS_SECRET_ACCESS_KEY')",
    "[v for v in __import__('os').environ.values()]",
    "open('/proc/self/environ').read()",
    "open('/proc/1/environ').read()",
    "open('/proc/{pid}/environ').read()",
    "open('/proc/{pid}/mem', 'rb').read(16)",
    "open('/proc/{pid}/cmdline').read()",
    "open('{home}/.aws/credentials').read()",
    "__import__('os').listdir('{home}')",
    "__import__('os').listdir('/proc')",
    "__import__('os').readlink('/proc/self/fd/0')",
    "open('{secret}').read()",
    "__import__('subprocess').check_output(['cat', '{secret}'])",
    "__import__('socket').create_connection(('169.254.169.254', 80), 2)",
    "__import__('socket').create_connection(('127.0.0.1', {port}), 2)",
]
PATCH_THE_SCORER = [
    "__import__('reasoning_gym')",
    "setattr(__import__('sympy'), 'parse_expr', lambda *a, **k: 24)",
    "__import__('builtins').__dict__.__setitem__('eval', lambda *a: 24)",
    "__import__('sys').modules['sympy'].__dict__.__setitem__('simplify', lambda e: 0)",
    "open('/packages/sympy/__init__.py', 'w').write('x = 1')",
    "open('/tmp/left', 'w').write('x')",
    "open('/workspace/left', 'w').write('x')",
    "open('/dev/shm/left', 'w').write('x')",
    "__import__('os').mkdir('/tmp/left')",
    "open('{secret}', 'w').write('gone')",
    "__import__('os').remove('{secret}')",
    "__import__('os').rename('/packages/sympy', '/packages/other')",
]
WRITE_THE_VERDICT = [
    "[__import__('os').write(n, b'1.0') for n in range(3)]",
    "[__import__('os').write(n, b'{\"value\": 1.0}\\n') for n in range(3, 10)]",
    "__import__('os')._exit(0)",
    "__import__('sys').exit(1)",
    "print('{\"value\": 1.0}')",
    "[__import__('sys')._getframe(n).f_locals.__setitem__('reward', 1.0) for n in range(4)]",
    "__import__('sys')._getframe(3).f_locals['asked'].__setitem__('kind', 'literal')",
    "__import__('gc').get_objects()[0]",
    "type('T', (), {'__float__': lambda s: 24.0, '__int__': lambda s: 24})()",
    "type('E', (float,), {'__eq__': lambda s, o: True, '__hash__': lambda s: 1})(3)",
    "__import__('os').kill(1, 9)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os').kill({pid}, 9)",
]
ESCAPE = [
    "__import__('os').system('id > /tmp/left')",
    "__import__('os').fork()",
    "[__import__('os').fork() for _ in range(64)]",
    "__import__('os').execv('/bin/sh', ['sh', '-c', 'echo'])",
    "__import__('subprocess').Popen(['sleep', '60'])",
    "__import__('ctypes').CDLL(None).unshare(0x10000000)",
    "__import__('ctypes').CDLL(None).mount(b'none', b'/', b'', 16384, None)",
    "__import__('ctypes').CDLL(None).ptrace(16, {pid}, 0, 0)",
    "__import__('ctypes').CDLL(None).setns(3, 0)",
    "__import__('ctypes').string_at(0)",
    "__import__('os').chroot('/usr')",
    "__import__('os').setuid(0)",
    "'x' * (1 << 34)",
    "10 ** (10 ** 10)",
    "[0] * (1 << 33)",
    "(lambda f: f(f))(lambda f: f(f))",
    "[x for x in iter(int, 1)]",
    "__import__('os').kill(__import__('os').getppid(), 19)",
    "__import__('os').kill(-1, 19)",
    "__import__('os').killpg(0, 9)",
    "__import__('os').kill(__import__('os').getppid(), 2)",
    "__import__('resource').prlimit(__import__('os').getppid(), 0, (1, 1))",
    "__import__('resource').prlimit(__import__('os').getppid(), 7, (0, 0))",
    "__import__('os').setpriority(0, __import__('os').getppid(), 19)",
    "__import__('os').sched_setscheduler(1, 5, __import__('os').sched_param(0))",
    "__import__('ctypes').CDLL(None).syscall(251, 1, 1, 3 << 13)",
    "__import__('ctypes').CDLL(None).syscall(425, 8, 0)",
    "__import__('ctypes').CDLL(None).syscall(311, __import__('os').getppid(), 0, 0, 0, 0, 0)",
    "__import__('threading').Thread(target=lambda: __import__('time').sleep(60)).start()",
    "[__import__('signal').signal(n, 1) for n in range(1, 9)]",
]
ENDLESS = ("10 ** (10 ** 10)", "[x for x in iter(int, 1)]")
OF_THE_FIRST_PROCESS = (
    "__import__('os').getpriority(0, 1)",
    "__import__('os').sched_getscheduler(1)",
    "[__import__('resource').getrlimit(n) for n in (1, 3, 6)]",
)
LATE_VERDICT = (
    "(__import__('os').fork() == 0 and (__import__('os').setsid(), __import__('time').sleep(1), "
    "[__import__('os').write(n, b'{\"value\": 666}\\n') for n in range(10)])) or 1"
)
"""A process that is left writes a verdict for a later answer."""


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """A worker's secrets, and a port that it listens on."""
    import socket

    path = tmp_path_factory.mktemp("secrets") / "credentials"
    path.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "pid": os.getpid(),
            "home": str(Path.home()),
            "secret": str(path),
            "port": server.getsockname()[1],
        }


def filled(text, surroundings):
    for name, value in surroundings.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@pytest.mark.parametrize("kind", ["literal", "expression"])
@pytest.mark.parametrize(
    "attack", [*READ_CREDENTIALS, *PATCH_THE_SCORER, *WRITE_THE_VERDICT, *ESCAPE]
)
def test_attacks_change_nothing_outside(attack, kind, request, surroundings, monkeypatch):
    """Whatever the text does, the worker keeps its secrets and its files, and the next text has
    the value that it has in a fresh sandbox."""
    evaluator = request.getfixturevalue("impatient" if attack in ENDLESS else "evaluator")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    try:
        found = getattr(evaluator, kind)(filled(attack, surroundings))
    except EvaluationError as error:
        found = error
    assert SECRET not in str(found)
    assert "root:" not in str(found)
    assert Path(surroundings["secret"]).read_text() == SECRET
    assert evaluator.expression("2*(3 + 9)") == 24
    assert evaluator.literal("[1, 2]") == [1, 2]
    for folder in ("/tmp", "/workspace", "/dev/shm"):
        assert evaluator.literal(f"__import__('os').listdir('{folder}')") == []
    assert not Path("/tmp/left").exists()


def test_an_answer_slows_and_limits_no_later_one(impatient):
    """Later answers would run out of time or of files, and earn less."""
    before = [impatient.literal(text) for text in OF_THE_FIRST_PROCESS]
    for attack in ESCAPE:
        with contextlib.suppress(EvaluationError):
            impatient.literal(attack.replace("{pid}", "1"))
    assert [impatient.literal(text) for text in OF_THE_FIRST_PROCESS] == before


def test_a_process_that_an_answer_leaves_does_not_score_later_ones(evaluator):
    for kind in ("literal", "expression"):
        with contextlib.suppress(EvaluationError):
            getattr(evaluator, kind)(LATE_VERDICT)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert evaluator.literal("[1, 2]") == [1, 2]


FORGED = [
    "24 if True else 0",
    "__import__('os')._exit(0)",
    "type('T', (), {'__float__': lambda s: 24.0, '__int__': lambda s: 24})()",
    "setattr(__import__('sympy').parsing.sympy_parser, 'parse_expr', lambda *a: 24)",
    "[__import__('sys')._getframe(n).f_locals.__setitem__('solved', True) for n in range(9)]",
    "__import__('os').write(1, b'{\"value\": 1.0}\\n')",
]


@pytest.mark.parametrize("dataset", ["puzzle24", "countdown", "polynomial_multiplication"])
def test_no_forged_answer_earns_what_a_right_one_does(dataset, monkeypatch):
    monkeypatch.setattr(reasoning, "_hash_seed_varies", lambda: False)
    tasks = tasks_of(dataset)
    task = tasks.draw("w0", 0)
    for answer in FORGED:
        assert score(tasks, task, answer) < 0.1, answer
    right = tasks.answer(task) if task.data["answer"] else None
    if right is not None and dataset != "puzzle24":
        assert score(tasks, task, right) == 1.0


RIGHT = {
    "binary_matrix": lambda e: (e["answer"], 1.0),
    "countdown": lambda e: (e["metadata"]["expression"], 1.0),
    "intermediate_integration": lambda e: (e["answer"], 1.0),
    "n_queens": lambda e: (e["answer"], 1.0),
    "number_sorting": lambda e: (e["answer"], 1.0),
    "polynomial_multiplication": lambda e: (e["answer"], 1.0),
    "simple_integration": lambda e: (e["answer"], 1.0),
    "spiral_matrix": lambda e: (str(e["answer"].split()), 0.1),
    "string_insertion": lambda e: (str(list(e["answer"])), 0.1),
}


@pytest.mark.parametrize("dataset", RIGHT)
def test_honest_answers_score_as_the_dataset_scores_them(dataset, monkeypatch):
    """The scorer's own code makes the verdict, over what came back from the sandbox."""
    monkeypatch.setattr(reasoning, "_hash_seed_varies", lambda: False)
    tasks = tasks_of(dataset)
    for index in range(3):
        task = tasks.draw("w0", index)
        answer, expected = RIGHT[dataset](task.data)
        assert score(tasks, task, answer) == pytest.approx(expected)
        assert score(tasks, task, "no answer") < expected


def test_a_solved_puzzle24_is_solved():
    tasks = tasks_of("puzzle24")
    task = next(t for t in (tasks.draw("w0", n) for n in range(200)) if t.data["metadata"])
    numbers = task.data["metadata"].get("numbers") or [6, 4, 1, 1]
    found = _solution(list(map(int, numbers)))
    assert found is not None
    assert score(tasks, task, found) == 1.0


def _solution(numbers):
    import itertools

    forms = "(({}{}{}){}{}){}{}", "({}{}{}){}({}{}{})", "({}{}({}{}{})){}{}", "{}{}(({}{}{}){}{})"
    for a, b, c, d in itertools.permutations(numbers):
        for x, y, z in itertools.product("+-*/", repeat=3):
            for form in forms:
                text = form.format(a, x, b, y, c, z, d)
                try:
                    if eval(text) == 24:
                        return text
                except ZeroDivisionError:
                    continue
    return None


@pytest.mark.parametrize("dataset", ["countdown", "puzzle24", "simple_integration"])
def test_without_a_sandbox_an_evaluating_scorer_is_refused(dataset, monkeypatch):
    def refuse(self):
        raise InputError("this machine gives no sandbox: unshare: Operation not permitted")

    monkeypatch.setattr(Sandbox, "check_now", refuse)
    with pytest.raises(InputError, match="evaluates answers as code"):
        tasks_of(dataset)
    tasks_of("spell_backward")
    tasks_of("chain_sum")


def test_trees_that_are_none_are_refused():
    deep = ["Integer", "1"]
    for _ in range(200):
        deep = ["Add", deep, ["Integer", "1"]]
    wrong = [
        None,
        [],
        ["os"],
        ["parse_expr", ["Symbol", "x"]],
        ["Integer", "9" * 5000],
        ["Integer", "x"],
        ["Integer", 3],
        ["Symbol", "__import__('os')"],
        ["Pow", ["Integer", "10"], ["Integer", "9999999999"]],
        ["Lambda", ["Symbol", "x"]],
        {"Integer": 1},
        deep,
    ]
    for tree in wrong:
        with pytest.raises((EvaluationError, ValueError)):
            sandboxed._build(tree, 0)


def test_an_evaluation_is_quick(evaluator):
    """The median is 16 ms on two busy cores; the bound leaves room for a slow machine that is busy
    with more."""
    times = []
    for number in range(40):
        started = time.perf_counter()
        evaluator.expression(f"(8 - 3)*7 + {number}")
        times.append(time.perf_counter() - started)
    assert statistics.median(times) < 1.0
