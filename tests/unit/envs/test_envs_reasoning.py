"""reasoning-gym as an environment: the same problems in every process, and fair scores."""

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from deltawire.config import TaskConfig
from deltawire.envs import Action, ReasoningTasks, Task, Turn, reasoning
from deltawire.errors import InputError

EXCLUDED = {
    "composite": "has no default: it must be told which datasets to mix",
    "isomorphic_strings": "follows the hash seed, so it is refused while that is random",
    "polynomial_multiplication": "follows the hash seed, so it is refused while that is random",
    "ransom_note": "follows the hash seed, so it is refused while that is random",
}

DRAWN_HERE_ONLY = {
    "arc_agi",
    "figlet_font",
    "futoshiki",
    "group_anagrams",
    "intermediate_integration",
    "knight_swap",
    "word_ladder",
    "zebra_puzzles",
}
"""Half of the time would go into drawing these eight in a second process too."""

GARBAGE = ["", "\x00\ufffd[[", "1/0", "nan", "{}", "[1, [2]]", "-1", "9" * 5000, "a,b\nc d", "None"]


def source(dataset="spell_backward", *, seed=0, heldout=20, **options):
    return ReasoningTasks(TaskConfig(dataset=dataset, heldout=heldout, options=options), seed=seed)


def questions(tasks):
    return [task.data["question"] for task in tasks]


def play(tasks, task, action):
    episode = tasks.open(task)
    turn = asyncio.run(episode.step(Action(action)))
    return turn, episode.solved(turn.reward)


def fingerprint(tasks):
    """A hash over the first held-out problem and the first one drawn."""
    found = [*tasks.heldout(), tasks.draw("w", 0)]
    return hashlib.sha256(json.dumps(questions(found)).encode()).hexdigest()


def fingerprints():
    names = json.loads(os.environ["DRAWN"])
    return {name: fingerprint(source(name, heldout=1)) for name in names}


@pytest.fixture(scope="module")
def elsewhere(request):
    """The fingerprint of each dataset of this session in another process and hash seed."""
    tested = {
        item.callspec.params.get("dataset")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    drawn = sorted((tested & DATASETS.keys()) - EXCLUDED.keys() - DRAWN_HERE_ONLY)
    program = (
        "import json, test_envs_reasoning\n"
        "found = json.dumps(test_envs_reasoning.fingerprints())\n"
        "print('\\n' + found)"  # some datasets print, and without a newline
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONHASHSEED": "12345",
            "PYTHONPATH": path,
            "DRAWN": json.dumps(drawn),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(name, marks=[] if place % 8 == 0 else [pytest.mark.drills, pytest.mark.long])
        for place, name in enumerate(sorted(DATASETS.keys() - EXCLUDED.keys()))
    ],
)
def test_every_dataset_can_be_drawn_and_scored(dataset, elsewhere):
    """With its defaults: the same problems in every process; whatever the model writes gets a
    reward, and the dataset's own answer the whole of it."""
    tasks = source(dataset, heldout=1)
    if dataset not in DRAWN_HERE_ONLY:
        assert fingerprint(tasks) == elsewhere[dataset]
    task = tasks.draw("w", 0)
    for text in GARBAGE:
        turn, _ = play(tasks, task, text)
        assert turn.done
        assert 0.0 <= turn.reward <= 1.0
    if task.data["answer"] is None:
        with pytest.raises(InputError, match="knows none"):
            tasks.answer(task)
    else:
        turn, solved = play(tasks, task, f" {tasks.answer(task)}\n")
        assert (turn.reward, solved) == (1.0, True)


def test_the_exclusions_are_still_needed():
    assert EXCLUDED.keys() <= DATASETS.keys()
    for dataset in EXCLUDED:
        with pytest.raises(InputError):
            source(dataset, heldout=1)


@pytest.mark.parametrize("dataset", sorted(reasoning._HASH_ORDERED))
def test_hash_ordered_datasets_work_under_a_fixed_hash_seed(dataset, monkeypatch):
    with pytest.raises(InputError, match="PYTHONHASHSEED=0"):
        source(dataset, heldout=1)
    monkeypatch.setattr(reasoning, "_hash_seed_varies", lambda: False)
    assert source(dataset, heldout=1).draw("w", 0).data["question"]


def test_composite_takes_its_options():
    mixed = [{"name": "chain_sum", "weight": 1}, {"name": "gcd", "weight": 2}]
    tasks = source("composite", datasets=mixed)
    drawn = [tasks.draw("w", index) for index in range(20)]
    assert 2 < sum("GCD" in question for question in questions(drawn)) < 20
    for task in drawn:
        assert play(tasks, task, tasks.answer(task)) == play(tasks, task, str(task.data["answer"]))
        assert play(tasks, task, tasks.answer(task))[1]


def test_the_interpreters_generators_are_not_changed():
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    source("list_functions", heldout=2).draw("w", 0)
    assert (random.random(), np.random.rand()) == expected


def test_the_same_seed_draws_the_same_tasks():
    first, again = source("chain_sum"), source("chain_sum")
    drawn = [first.draw("w", index) for index in range(40)]
    assert [again.draw("w", index) for index in reversed(range(40))] == drawn[::-1]
    assert len(set(questions(drawn))) > 30


@pytest.mark.parametrize("index", [0, reasoning.BLOCK - 1, reasoning.BLOCK, 1507])
def test_each_position_of_a_stream_can_be_drawn_independently(index):
    tasks = source("chain_sum")
    for other in range(12):  # more datasets than are kept at hand
        tasks.draw(f"other-{other}", index)
    assert tasks.draw("w", index) == source("chain_sum").draw("w", index)


def test_streams_and_seeds_differ():
    tasks, other = source("chain_sum"), source("chain_sum", seed=1)
    mine = questions(tasks.draw("a", index) for index in range(20))
    assert mine != questions(tasks.draw("b", index) for index in range(20))
    assert mine != questions(other.draw("a", index) for index in range(20))
    assert mine != questions(tasks.draw("a", index + reasoning.BLOCK) for index in range(20))


def test_heldout_problems_do_not_depend_on_the_runs_seed():
    first, other = source("chain_sum"), source("chain_sum", seed=1)
    assert questions(first.heldout()) == questions(other.heldout())
    assert len(set(questions(first.heldout()))) == 20


def test_heldout_problems_are_never_drawn():
    """A dataset of so few problems that nearly half are held out: one-digit sums."""
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = source("chain_sum", heldout=60, **small)
    reserved = set(questions(tasks.heldout()))
    assert len(reserved) == 60
    drawn = questions(tasks.draw("w", index) for index in range(1500))
    assert not reserved & set(drawn)
    without = ReasoningTasks(TaskConfig(dataset="chain_sum", heldout=1, options=small), seed=0)
    unguarded = questions(without.draw("w", index) for index in range(200))
    assert reserved & set(unguarded), "the problems are too many for this to test anything"


def test_too_small_a_dataset_is_an_input_error(monkeypatch):
    monkeypatch.setattr(reasoning, "_SEARCH_PER_HELDOUT", 4)
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(InputError, match="distinct problems") as caught:
        source("chain_sum", heldout=300, **small)
    assert "lower task.heldout" in caught.value.hint


@pytest.mark.parametrize(
    ("dataset", "nearest"),
    [("spell_backwards", "spell_backward"), ("chainsum", "chain_sum"), ("SUDOKU", "see the")],
)
def test_an_unknown_dataset_names_the_nearest(dataset, nearest):
    with pytest.raises(InputError, match=repr(dataset)) as caught:
        source(dataset)
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [{"min_terms": 9, "max_terms": 2}, {"no_such_option": 1}, {"min_terms": "many"}, {"seed": 3}],
)
def test_bad_options_are_input_errors(options):
    with pytest.raises(InputError, match=r"task\.options"):
        ReasoningTasks(TaskConfig(dataset="chain_sum", options=options), seed=0)


def test_the_prompt_is_the_template_with_the_question():
    config = TaskConfig(dataset="chain_sum", heldout=1, prompt="Q {question} {x}\nA ")
    tasks = ReasoningTasks(config, seed=0)
    task = Task("t", {"question": "1 {question} 2", "answer": 3})
    assert tasks.prompt(task) == "Q 1 {question} 2 {x}\nA "
    assert asyncio.run(tasks.open(task).reset()) == Turn(tasks.prompt(task))
    assert tasks.answer(task) == "3"


def test_a_wrong_answer_may_be_tried_again():
    config = TaskConfig(dataset="chain_sum", heldout=1, attempts=3, retry="again")
    tasks = ReasoningTasks(config, seed=0)
    task = tasks.draw("w", 0)
    right = Action(tasks.answer(task))
    for wrong in range(4):
        episode = tasks.open(task)
        for _ in range(min(wrong, 2)):
            assert asyncio.run(episode.step(Action("x"))) == Turn("again")
        last = asyncio.run(episode.step(right if wrong < 3 else Action("x")))
        assert last.done
        assert (last.reward == 1.0) == (wrong < 3)


def test_part_of_a_score_is_not_solved():
    tasks = source("chain_sum", heldout=1)
    task = tasks.draw("w", 0)
    answer = tasks.answer(task)
    assert play(tasks, task, answer) == play(tasks, task, f"  {answer} ")
    turn, solved = play(tasks, task, f"{answer}0")
    assert turn.reward < 1
    assert not solved
