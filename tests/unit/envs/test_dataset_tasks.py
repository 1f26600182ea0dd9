"""Tasks from rows: prompts, rewards of one's own, held-out rows, and mixtures."""

import asyncio
import json

import pytest

from deltawire.chat.messages import Message
from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.config.machine import TRUSTED
from deltawire.engines.base import Completion
from deltawire.envs import open_tasks
from deltawire.envs.base import TasksWithAnswers
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.train.build import byte_tokenizer

ROWS = [
    {"question": f"{n} + 1?", "answer": n + 1, "kind": "odd" if n % 2 else "even"}
    for n in range(20)
]


class Parrot:
    """An engine that answers every prompt with one text."""

    version, slots, capacity, active = 0, 4, 4096, 0

    def __init__(self, text):
        self.answer = [*text.encode(), 256]
        self.prompts = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(bytes(token for token in prompt if token < 256).decode())
        count = len(self.answer)
        return Completion(list(self.answer), [-0.5] * count, [0] * count, "stop")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def tasks_of(path, *, seed=0, data=None, **changes):
    task = {
        "environment": "dataset",
        "prompt": "{question}\n",
        "heldout": 5,
        "data": {"path": str(path), "answer": "answer", **(data or {})},
        **changes,
    }
    config = parse_config({"name": "x", "task": task}, source="c")
    return open_tasks(config.task, seed=seed)


def play(tasks, task, said):
    engine = Parrot(said)
    limits = EpisodeLimits(16, 4, 512, step_s=60)
    episode = asyncio.run(
        run_episode(
            engine, tasks.open(task), Text(byte_tokenizer()), temperature=1.0, limits=limits
        )
    )
    return episode, engine


def test_rows_become_tasks_with_an_exact_reward(path):
    tasks = tasks_of(path, data={"family": "kind"})
    assert isinstance(tasks, TasksWithAnswers)
    held = {task.identity for task in tasks.heldout()}
    drawn = [tasks.draw("w", position) for position in range(30)]
    assert len(held) == 5
    assert tasks.epoch == 15
    for epoch in (drawn[:15], drawn[15:]):
        assert len({task.identity for task in epoch}) == 15
        assert not held & {task.identity for task in epoch}
    assert held == {task.identity for task in tasks_of(path, seed=9).heldout()}
    other = [tasks.draw("other", position).identity for position in range(15)]
    assert sorted(other) == sorted(task.identity for task in drawn[:15])
    assert other != [task.identity for task in drawn[:15]], "each stream has its own order"
    in_order = tasks_of(path, data={"shuffle": False})
    rows = [int(in_order.draw("w", n).identity.split("/")[1]) for n in range(15)]
    assert sorted(rows) == in_order._train.tolist()
    first = rows.index(min(rows))
    assert rows[first:] + rows[:first] == sorted(rows)
    task = drawn[0]
    assert task.family == task.data["kind"]
    assert tasks.answer(task) == str(task.data["answer"])
    right, engine = play(tasks, task, f" {task.data['answer']}\n")
    assert engine.prompts == [f"{task.data['question']}\n"]
    assert (right.cause, right.solved, right.trajectory.reward) == ("", True, 1.0)
    wrong, _ = play(tasks, task, "no")
    assert (wrong.cause, wrong.solved, wrong.trajectory.reward) == ("", False, 0.0)


def test_messages_of_the_configuration_and_of_a_column(path, tmp_path):
    said = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "{question} {not a column}"},
    ]
    tasks = tasks_of(path, messages=said)
    task = tasks.draw("w", 0)
    question = task.data["question"]
    assert tasks.prompt(task) == [
        Message("system", "Add."),
        Message("user", f"{question} {{not a column}}"),
    ]
    other = tmp_path / "chat.jsonl"
    rows = [{"m": [{"role": "user", "content": "Hi {x}"}], "answer": "a"}] * 3
    rows += [{"m": [{"role": "assistant", "content": "Hi"}], "answer": "a"}] * 3
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tasks_of(other, data={"messages": "m", "shuffle": False}, heldout=1)
    every = [tasks.draw("w", position) for position in range(tasks.epoch)]
    good = [task for task in every if task.data["m"][0]["role"] == "user"]
    assert {tuple(tasks.prompt(task)) for task in good} == {(Message("user", "Hi {x}"),)}
    bad = next(task for task in every if task not in good)
    with pytest.raises(InputError, match="is not a list of messages that ends before an answer"):
        tasks.prompt(bad)
    failed, _ = play(tasks, good[0], "a")
    assert failed.solved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "{query}"}, "has no column 'query'; its columns are answer, kind, question"),
        ({"data": {"answer": "solution"}}, "has no column 'solution'"),
        ({"data": {"split": "train"}}, "is a single file without a split"),
        ({"heldout": 20}, "has 20 rows, and 20 are held out"),
        ({"reward": "own_rewards:exact"}, "code of module own_rewards, which this machine"),
    ],
)
def test_wrong_data_is_named(path, changes, message):
    with pytest.raises(InputError, match=message):
        tasks_of(path, **changes)


def test_a_row_without_the_column_is_named(tmp_path):
    file = tmp_path / "odd.jsonl"
    rows = [{"question": "a", "answer": 1}, {"question": "b"}, {"question": "c", "answer": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def every():
        tasks = tasks_of(file, heldout=1)
        return [tasks.draw("w", position) for position in range(tasks.epoch)]

    with pytest.raises(InputError, match=r"row 1 of .* has no column 'answer'"):
        every()


def test_a_reward_of_ones_own(path, monkeypatch):
    monkeypatch.setenv(TRUSTED, "own_rewards")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    tasks = tasks_of(path, reward="own_rewards:exact", data={"answer": ""})
    task = tasks.draw("w", 0)
    assert play(tasks, task, str(task.data["answer"]))[0].trajectory.reward == 1.0
    assert play(tasks, task, "no")[0].trajectory.reward == 0.0
    blind = tasks_of(path, reward="own_rewards:sees_credentials")
    assert play(blind, task, "a")[0].trajectory.reward == 0.0


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "task.reward own_rewards:raises: KeyError: 'no such column'"),
        ("slow", "task.reward own_rewards:slow: scoring took longer than 0.5 s"),
        ("dies", "task.reward own_rewards:dies: the scoring process died"),
        ("not_a_number", "gave the reward nan"),
    ],
)
def test_a_reward_that_breaks_fails_its_episode_and_no_other(path, monkeypatch, function, cause):
    monkeypatch.setenv(TRUSTED, "own_rewards")
    limit_s = 0.5 if function == "slow" else 100.0
    tasks = tasks_of(path, reward=f"own_rewards:{function}", reward_limit_s=limit_s)
    episode, _ = play(tasks, tasks.draw("w", 0), "7")
    assert cause in episode.cause
    assert not episode.solved
    assert len(episode.trajectory.tokens_T) == 2, "what was drawn is kept"
    good = tasks_of(path, reward="own_rewards:exact")
    assert play(good, good.draw("w", 0), "7")[0].cause == ""


def test_a_reward_that_is_not_there_is_refused_at_the_start(path, monkeypatch):
    monkeypatch.setenv(TRUSTED, "own_rewards,no_such_module")
    for place in ("own_rewards:missing", "no_such_module:f"):
        with pytest.raises(InputError, match=f"cannot load task.reward {place}"):
            tasks_of(path, reward=place)


def test_a_reward_of_ones_own_replaces_a_datasets_score(monkeypatch):
    monkeypatch.setenv(TRUSTED, "own_rewards")
    raw = {"dataset": "spell_backward", "heldout": 2, "reward": "own_rewards:exact"}
    config = parse_config({"name": "x", "task": raw}, source="c")
    tasks = open_tasks(config.task, seed=0)
    task = tasks.draw("w", 0)
    assert play(tasks, task, task.data["answer"])[0].trajectory.reward == 1.0


def test_a_mixture_draws_from_all_by_weight(path):
    entries = [
        {
            "name": "sums",
            "weight": 3,
            "task": {
                "environment": "dataset",
                "heldout": 5,
                "data": {"path": str(path), "answer": "answer"},
            },
        },
        {"name": "words", "task": {"dataset": "spell_backward", "heldout": 3}},
    ]
    config = parse_config({"name": "x", "task": {"mixture": entries}}, source="c")
    tasks = open_tasks(config.task, seed=0)
    families = [tasks.draw("w", position).family for position in range(1000)]
    assert families.count("sums") == 750
    assert families.count("words/spell_backward") == 250
    assert {task.identity.split("/")[0] for task in tasks.heldout()} == {"sums", "words"}
    assert len(tasks.heldout()) == 8
    assert list(tasks.parts) == ["sums", "words"]
    sums = [tasks.draw("w", p) for p in range(1000) if tasks.draw("w", p).family == "sums"][:15]
    assert len({task.identity for task in sums}) == 15
    episode, _ = play(tasks, sums[0], tasks.answer(sums[0]))
    assert episode.solved
    assert not {t.identity for t in tasks.heldout()} & {t.identity for t in sums}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"environment": "dataset"}, "task.data belongs to the environment dataset"),
        ({"environment": "dataset", "data": {"path": "x"}}, "task has no reward"),
        ({"prompt": "no question"}, r"task.prompt must contain \{question\}"),
        ({"messages": [{"role": "user", "content": "?"}]}, "task.messages must contain"),
        ({"environment": "workspace", "reward": "a:b"}, "are for dataset and reasoning_gym"),
        (
            {"mixture": [{"name": "a", "task": {}}, {"name": "a", "task": {}}]},
            "task.mixture names a task twice",
        ),
        ({"mixture": [{"name": "a", "task": {"prompt": "x"}}]}, r"task.mixture\[0\].task.prompt"),
    ],
)
def test_contradictions_are_named(task, message):
    with pytest.raises(InputError, match=message):
        parse_config({"name": "x", "task": task}, source="c")
