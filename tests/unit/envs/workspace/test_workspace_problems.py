"""Generated packages: the same for the same seed, really faulty, really solvable."""

import random

import pytest

from deltawire.config import TaskConfig
from deltawire.envs.workspace import WorkspaceTasks, problem
from deltawire.envs.workspace.problems import _function, fault_count, outcome
from deltawire.envs.workspace.subjects import FAMILIES, SUBJECTS
from deltawire.errors import InputError


def test_a_seed_always_gives_the_same_problem_and_another_another():
    assert problem("a/1") == problem("a/1")
    contents = {str(problem(f"a/{n}").files) for n in range(50)}
    assert len(contents) == 50


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.function.__name__)
def test_every_fault_shows_in_every_name_and_the_right_source_is_right(subject):
    rng = random.Random(5)
    arguments = [subject.arguments(rng) for _ in range(300)]
    expected = [outcome(subject.function, given) for given in arguments]
    for name in subject.names:
        right = _function(subject.source(name), name)
        assert [outcome(right, given) for given in arguments] == expected
        for fault in subject.faults:
            wrong = _function(subject.source(name, fault), name)
            failing = sum(
                outcome(wrong, given) != answer
                for given, answer in zip(arguments, expected, strict=True)
            )
            assert failing >= 6, fault
            assert failing < 300, fault


def test_all_families_are_drawn_and_there_are_many_faults():
    drawn = {problem(f"b/{n}").family for n in range(60)}
    assert drawn == set(FAMILIES) == {"boundary", "guard", "order", "slip", "state"}
    assert fault_count() == 37


def test_every_set_of_cases_tells_the_wrong_package_from_the_right_one():
    for seed in range(100):
        task = problem(f"c/{seed}")
        path, wrong, _ = task.repair
        name = path.split("/")[1].removesuffix(".py")
        function = _function(wrong, name)
        for cases in (task.visible, task.hidden, task.heldout):
            own = [case for case in cases if case.function == name]
            failing = [c for c in own if outcome(function, c.arguments) != c.expected]
            assert failing, task.repair
            assert len(failing) < len(own), task.repair


def test_what_decides_the_reward_is_nowhere_in_the_workspace():
    """The agent's files hold no hidden case but by chance the same one as a visible test."""
    for seed in range(30):
        task = problem(f"d/{seed}")
        text = b"\n".join(task.files.values()).decode()
        visible = {repr(case.arguments) for case in task.visible}
        own = [c for c in task.hidden if repr(c.arguments) not in visible]
        assert len(own) >= 6
        for case in own:
            assert f"arguments = {case.arguments!r}\n" not in text


def test_tasks_are_drawn_by_stream_and_never_held_out():
    tasks = WorkspaceTasks(TaskConfig(environment="workspace", heldout=30), seed=3)
    again = WorkspaceTasks(TaskConfig(environment="workspace", heldout=30), seed=3)
    other = WorkspaceTasks(TaskConfig(environment="workspace", heldout=30), seed=4)
    assert tasks.draw("w", 5) == again.draw("w", 5) != tasks.draw("w", 6)
    assert tasks.draw("w", 5) != other.draw("w", 5)
    assert tasks.heldout() == other.heldout()
    held = {task.identity for task in tasks.heldout()}
    assert len(held) == 30
    assert not held & {tasks.draw("w", n).identity for n in range(100)}
    assert tasks.draw("w", 5).family in FAMILIES


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"turn": 5}, "turn"),
        ({"memory_mib": 1}, "memory_mib"),
        ({"isolation": "none"}, "isolation"),
        ({"loophole": "big"}, "loophole"),
    ],
)
def test_wrong_options_are_refused_by_name(options, said):
    with pytest.raises(InputError, match=said):
        WorkspaceTasks(TaskConfig(environment="workspace", options=options), seed=0)
