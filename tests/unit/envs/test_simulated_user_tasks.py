"""The requests of simulated users as tasks: answers to learn from, and rewards that are true."""

import asyncio

import pytest

from deltawire.config import TaskConfig
from deltawire.envs import Action, open_tasks
from deltawire.errors import InputError
from deltawire.testing.users import ANSWERS


def tasks_of(heldout=20, **options):
    config = TaskConfig(environment="simulated_users", heldout=heldout, options=options)
    return open_tasks(config, seed=3)


def test_rewards_are_true_satisfaction_over_the_best():
    tasks = tasks_of(kinds=2)
    task = tasks.draw("w0", 0)
    tastes = tasks.population.tastes()[task.data[0]]

    async def score(text):
        episode = tasks.open(task)
        (said,) = (await episode.reset()).messages
        assert said.content == tasks.question(task) + "\n"
        return (await episode.step(Action(text))).reward

    for place, text in enumerate(ANSWERS.values()):
        assert asyncio.run(score(text)) == pytest.approx(tastes[place] / tastes.max())
    assert asyncio.run(score("nonsense")) == 0.0


def test_a_warm_start_shows_all_styles_alike_and_no_held_out_request():
    tasks = tasks_of()
    drawn = [tasks.draw("w0", n) for n in range(1500)]
    assert not {t.identity for t in drawn} & {t.identity for t in tasks.heldout()}
    said = [tasks.answer(task) for task in {t.identity: t for t in drawn}.values()]
    assert set(said) == set(ANSWERS.values())
    assert max(said.count(text) for text in ANSWERS.values()) < 0.3 * len(said)
    assert [tasks.draw("w0", n) for n in range(9)] == drawn[:9]


def test_wrong_options_are_refused():
    with pytest.raises(InputError, match=r"task\.options of simulated_users"):
        tasks_of(people=3)
    with pytest.raises(InputError, match="held out"):
        tasks_of(heldout=100_000)
