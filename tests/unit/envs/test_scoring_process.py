"""A score from a child process: right, in time, and without harm to this one."""

import asyncio

import pytest
from judged import devour, double, fail, hang, power, secret, vanish, word

from deltawire.chat.text import Text
from deltawire.config import TaskConfig
from deltawire.engines.base import Completion
from deltawire.envs import Action, ReasoningTasks, reasoning
from deltawire.envs.scoring_process import ScoringError, ScoringProcess, ScoringTimeoutError
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits

HERE = "judged:"


@pytest.fixture
def scorer_of():
    made = []

    def make(function, **settings):
        made.append(ScoringProcess(HERE + function.__name__, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_number_comes_back_and_prints_do_not_disturb(scorer_of):
    scorer = scorer_of(double)
    assert [scorer.call(n) for n in range(5)] == [0, 2, 4, 6, 8]


def test_an_error_is_reported_and_the_child_continues(scorer_of):
    scorer = scorer_of(fail)
    with pytest.raises(ScoringError, match="ValueError: no 3"):
        scorer.call(3)
    child = scorer._child
    with pytest.raises(ScoringError, match="ValueError: no 4"):
        scorer.call(4)
    assert scorer._child is child


@pytest.mark.parametrize("function", [hang, power])
def test_what_never_returns_is_killed(scorer_of, function):
    scorer = scorer_of(function, limit_s=0.3)
    with pytest.raises(ScoringTimeoutError, match=r"longer than 0\.3 s"):
        scorer.call(0)
    assert scorer._child is None


@pytest.mark.parametrize("function", [vanish, devour, word])
def test_a_child_that_dies_or_answers_nonsense_is_an_error(scorer_of, function):
    with pytest.raises(ScoringError):
        scorer_of(function).call(0)


def test_after_a_death_the_next_call_works(scorer_of):
    scorer = scorer_of(double)
    assert scorer.call(1) == 2
    scorer._child.kill()
    scorer._child.wait()
    with pytest.raises(ScoringError):
        scorer.call(1)
    assert scorer.call(2) == 4


def test_credentials_stay_here(scorer_of, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert scorer_of(secret).call(0) == 0.0


def test_a_missing_function_is_reported():
    with pytest.raises(ScoringError, match="cannot score with no_such_module:f: ModuleNotFound"):
        ScoringProcess("no_such_module:f").call(0)


def test_waiting_for_a_score_does_not_hold_others_up(scorer_of):
    async def run():
        scorer = scorer_of(double)
        await scorer(0)
        waiting = asyncio.ensure_future(scorer_of(hang, limit_s=1.0)(0))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert isinstance(waiting.exception(), ScoringTimeoutError)
        return turns

    assert asyncio.run(run()) > 20


def test_an_answer_that_takes_for_ever_earns_nothing(monkeypatch):
    """countdown evaluates the answer; a tower of powers would keep it busy for good."""
    monkeypatch.setattr(reasoning._scoring, "_limit_s", 2.0)
    reasoning._scoring.close()
    tasks = ReasoningTasks(TaskConfig(dataset="countdown", heldout=1), seed=0)
    task = tasks.draw("w", 0)
    turn = asyncio.run(tasks.open(task).step(Action("9**9**9**9")))
    assert (turn.reward, turn.done) == (0.0, True)
    monkeypatch.setattr(reasoning._scoring, "_limit_s", 60.0)  # A new child has to start.
    right = asyncio.run(tasks.open(task).step(Action(tasks.answer(task))))
    assert right.reward == 1.0
    reasoning._scoring.close()


def test_an_episode_does_not_take_the_child_that_it_started_with_it(byte_tokenizer):
    """Processes that an episode leaves are killed; all episodes share the scoring child."""
    tasks = ReasoningTasks(TaskConfig(dataset="countdown", heldout=1), seed=0)
    text, limits = Text(byte_tokenizer), EpisodeLimits(8, 1, 2000)

    class Digit:
        async def generate(self, prompt, sampling, *, on_token=None):
            return Completion([ord("1")], [-1.0], [0], "stop")

    async def run():
        reasoning._scoring.close()
        causes = []
        for number in range(3):
            episode = tasks.open(tasks.draw("w", number))
            done = await run_episode(Digit(), episode, text, temperature=1.0, limits=limits)
            causes.append(done.cause)
        return causes

    assert asyncio.run(run()) == ["", "", ""]
    reasoning._scoring.close()


def test_drawing_prints_nothing(capfd):
    for dataset in ("rearc", "knight_swap", "zebra_puzzles", "rush_hour"):
        tasks = ReasoningTasks(TaskConfig(dataset=dataset, heldout=1), seed=0)
        task = tasks.draw("w", 0)
        asyncio.run(tasks.open(task).step(Action("x")))
    assert capfd.readouterr().out == ""
