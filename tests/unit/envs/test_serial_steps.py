"""Parity and permutation tasks: their steps, their scores, and what is drawn."""

import asyncio
from itertools import product

import pytest

from deltawire.config import TaskConfig
from deltawire.envs import open_tasks
from deltawire.envs.base import Action, Task
from deltawire.errors import InputError


def tasks_of(dataset="parity", *, seed=0, heldout=20, prompt="{question}", **options):
    return open_tasks(
        TaskConfig(
            environment="serial_steps", dataset=dataset, heldout=heldout, prompt=prompt,
            options={"start": "(", "end": ")", **options},
        ),
        seed=seed,
    )  # fmt: skip


def score(tasks, task, text):
    async def one():
        episode = tasks.open(task)
        await episode.reset()
        return (await episode.step(Action(text, text))).reward

    return asyncio.run(one())


def test_the_steps_of_parity_are_those_of_all_prefixes():
    tasks = tasks_of()
    for bits in product("01", repeat=6):
        data = "".join(bits)
        steps = tasks.steps(Task("t", data))
        assert steps == "".join(str(data[: n + 1].count("1") % 2) for n in range(6))


def test_a_permutation_is_composed_step_by_step():
    """Naive twin: the items are moved as a list of names."""
    tasks = tasks_of("permutation")
    for swaps in product("abc", repeat=5):
        items = list("xyz")
        for swap in swaps:
            left, right = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}[swap]
            items[left], items[right] = items[right], items[left]
        steps = tasks.steps(Task("t", "".join(swaps)))
        orders = ["xyz", "xzy", "yxz", "yzx", "zxy", "zyx"]
        assert len(steps) == 5
        assert orders[int(steps[-1])] == "".join(items)


@pytest.mark.parametrize("dataset", ["parity", "permutation"])
def test_its_answers_are_right_and_others_are_not(dataset):
    tasks = tasks_of(dataset)
    shown = 0
    for index in range(60):
        task = tasks.draw("w0", index)
        answer = tasks.answer(task)
        shown += len(answer) > 3
        assert score(tasks, task, answer) == 1.0
        assert score(tasks, task, answer[-1]) == 1.0
        assert score(tasks, task, answer[:-1] + "x") == 0.0
        assert score(tasks, task, tasks.steps(task) + "x") == 0.0
        assert score(tasks, task, "") == 0.0
    assert 10 < shown < 35


def test_draws_repeat_and_leave_the_held_out_ones_alone():
    tasks, again = tasks_of(min_length=3, max_length=5), tasks_of(min_length=3, max_length=5)
    held = {task.data for task in tasks.heldout()}
    assert len(held) == 20
    drawn = [tasks.draw("w0", index) for index in range(200)]
    assert drawn == [again.draw("w0", index) for index in range(200)]
    assert held.isdisjoint(task.data for task in drawn)
    assert {len(task.data) for task in drawn} == {3, 4, 5}
    other = tasks_of(seed=1, min_length=3, max_length=5)
    assert other.heldout() == tasks.heldout()
    assert drawn != [other.draw("w0", index) for index in range(200)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": "sorting"}, "has no dataset 'sorting'"),
        ({"length": 3}, "task.options of serial_steps"),
        ({"min_length": 9, "max_length": 8}, "min_length exceeds max_length"),
        ({"min_length": 1, "max_length": 2, "heldout": 7}, "only 6 distinct tasks"),
    ],
)
def test_wrong_options_are_one_clear_error(arguments, words):
    with pytest.raises(InputError) as caught:
        tasks_of(**arguments)
    assert words in str(caught.value)
