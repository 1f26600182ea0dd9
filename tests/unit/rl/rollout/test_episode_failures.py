"""Whatever an environment does to an episode, the episode ends, with a cause, and others go on."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.chat.messages import shorten
from deltawire.chat.text import Text
from deltawire.config import RolloutConfig
from deltawire.engines.base import Completion
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Environment, Message, Task, Turn
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import play_all, run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.rl.rollout.failure_budget import WINDOW, FailureBudget
from deltawire.runtime.orphans import VARIABLE, track_orphans
from deltawire.wire.rollouts import decode_group, encode_group


class Plain(Environment):
    """One turn, one point."""

    closed = 0

    async def reset(self):
        return Turn("go")

    async def step(self, action):
        return Turn(reward=1.0, done=True)

    async def close(self):
        self.closed += 1


class Talker:
    """An engine that never ends a sequence by itself."""

    def __init__(self):
        self.asked = 0

    async def generate(self, prompt, sampling, *, on_token=None):
        self.asked += 1
        count = sampling.max_tokens
        return Completion([65] * count, [-1.0] * count, [2] * count, "length")


@pytest.fixture
def text(byte_tokenizer):
    return Text(byte_tokenizer)


def play(environment, text, *, engine=None, **limits):
    settings = {"max_tokens": 4, "max_turns": 3, "context": 64, "step_s": 0.2, **limits}
    return asyncio.run(
        run_episode(
            engine or Talker(), environment, text, temperature=1.0, limits=EpisodeLimits(**settings)
        )
    )


def failing(**methods):
    return type("Failing", (Plain,), methods)()


async def raises(self, *_):
    raise KeyError("reward")


async def raises_half_a_character(self, *_):
    raise KeyError("\ud800")


async def never(self, *_):
    await asyncio.sleep(3600)


async def refuses_to_end(self, *_):
    for _ in range(2):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def raises_a_timeout(self, *_):
    raise TimeoutError("the tool's own")


def gives(value):
    async def step(self, *_):
        return value

    return step


async def exits(self, *arguments):
    sys.exit(7)


async def exits_in_a_task(self, *arguments):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(exits(self))


CAUSES = {
    "reward raises": ({"step": raises}, "step raised KeyError: 'reward'"),
    "reward raises what is no text": ({"step": raises_half_a_character}, "step raised KeyError"),
    "half a character": ({"step": gives(Turn(reward="\ud800"))}, "an invalid turn"),
    "reward is NaN": ({"step": gives(Turn(reward=float("nan")))}, "step gave the reward nan"),
    "reward is huge": ({"step": gives(Turn(reward=-1e308))}, "step gave the reward -1e+308"),
    "reward is a text": ({"step": gives(Turn(reward="1.0"))}, "an invalid turn"),
    "reward is infinite": ({"step": gives(Turn(reward=float("inf")))}, "the reward inf"),
    "reward is a word": ({"step": gives(Turn(reward="much"))}, "an invalid turn"),
    "reward never returns": ({"step": never}, "step took longer than 0.2 s"),
    "reward ignores its end": ({"step": refuses_to_end}, "step took longer than 0.2 s"),
    "a timeout raised by the tool": (
        {"step": raises_a_timeout},
        "step raised TimeoutError: the tool's",
    ),
    "no turn": ({"step": gives(None)}, "step returned NoneType"),
    "many messages": ({"step": gives(Turn([Message("user", "x")] * 5000))}, "5000 messages"),
    "reset raises": ({"reset": raises}, "reset raised KeyError"),
    "reset never returns": ({"reset": never}, "reset took longer"),
    "close raises": ({"close": raises}, "close raised KeyError"),
    "close never returns": ({"close": never}, "close took longer"),
    "probes raise": ({"probes": raises}, "probes raised KeyError"),
    "probes are words": ({"probes": gives({"a": "b"})}, "no numbers by name"),
    "a probe is NaN": ({"probes": gives({"a": float("nan")})}, "probe a gave nan"),
    "too many probes": ({"probes": gives(dict.fromkeys(map(str, range(99)), 0.0))}, "99 values"),
    "tools raise": ({"tools": property(lambda self: 1 // 0)}, "tools raised ZeroDivisionError"),
    "step exits": ({"step": exits}, "step raised SystemExit"),
    "a task of the step exits": ({"step": exits_in_a_task}, "step raised ExceptionGroup"),
    "tools exit": ({"tools": property(lambda self: sys.exit(3))}, "tools raised SystemExit: 3"),
    "solved exits": ({"solved": lambda self, reward: sys.exit()}, "solved raised SystemExit"),
    "solved raises": ({"solved": lambda self, reward: 1 // 0}, "solved raised ZeroDivision"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_failure_has_a_cause_and_can_be_stored(name, text):
    methods, cause = CAUSES[name]
    episode = play(failing(**methods), text)
    assert cause in episode.cause
    assert not episode.solved
    sound = play(Plain(), text)
    group = group_of("w", "n", Task("t", None, "kind"), 1.0, [episode, sound])
    again = decode_group(encode_group(group), run="", key="")
    assert [(t.cause, t.reward) for t in again.trajectories] == [(episode.cause, 0.0), ("", 1.0)]
    assert again.prompt.tolist() == list(b"go")
    assert again.family == "kind"


def test_a_group_with_only_failures_can_be_stored(text):
    episodes = [play(failing(reset=raises), text) for _ in range(2)]
    group = group_of("w", "n", Task("t", None), 1.0, episodes)
    again = decode_group(encode_group(group), run="", key="")
    assert again.tokens == 0
    assert all(t.cause for t in again.trajectories)


def test_a_long_cause_is_cut_and_one_line(text):
    async def step(self, action):
        raise RuntimeError("x\n" * 10_000)

    cause = play(failing(step=step), text).cause
    assert len(cause) <= 400
    assert "\n" not in cause


@pytest.mark.parametrize("method", ["reset", "step", "probes"])
def test_the_environment_is_closed_exactly_once(method, text):
    environment = failing(**{method: raises})
    play(environment, text)
    assert environment.closed == 1


def test_an_episode_ends_within_its_time(text):
    class Endless(Plain):
        async def step(self, action):
            await asyncio.sleep(0.01)
            return Turn("more")

    episode = play(Endless(), text, episode_s=1.0, max_turns=10**6, context=10**6)
    assert "longer than 1 s" in episode.cause
    assert episode.trajectory.turns > 1


def test_a_model_that_never_ends_is_bounded(text):
    class More(Plain):
        async def step(self, action):
            assert action.finish == "length"
            return Turn("more")

    engine = Talker()
    episode = play(More(), text, engine=engine, max_turns=5)
    assert engine.asked == 5
    assert (episode.cause, episode.trajectory.finish) == ("", "turns")


def test_half_a_character_is_read_as_one_that_is_unknown(text):
    """JSON can spell it, so a model can have a tool repeat it."""

    class Echo(Plain):
        async def step(self, action):
            return Turn([Message("tool", "a\ud800b")])

    episode = play(Echo(), text, max_turns=2)
    said = bytes(t for t in episode.trajectory.tokens_T[4:-4].tolist() if t < 256).decode()
    assert (episode.cause, said) == ("", "a\ufffdb")


def test_names_that_are_too_long_or_no_text_are_stored_all_the_same(text):
    async def probes(self):
        return {"p" * 100 + "\ud800": 1.0, "\ud800": 0.0}

    episodes = [play(failing(probes=probes), text) for _ in range(2)]
    task = Task("t" * 300, None, "\ud800" * 100)
    group = decode_group(encode_group(group_of("w", "n", task, 1.0, episodes)), run="", key="")
    assert (group.task, group.family) == ("t" * 256, "?" * 64)
    assert dict(group.trajectories[0].probes) == {"p" * 64: 1.0, "?": 0.0}


def test_a_hundred_megabytes_are_cut_before_they_are_tokens(text):
    class Loud(Plain):
        async def step(self, action):
            return Turn([Message("tool", "a" + "x" * 100_000_000 + "z")])

    episode = play(Loud(), text, max_turns=2, context=400, max_characters=100)
    said = bytes(t for t in episode.trajectory.tokens_T[4:-4].tolist() if t < 256).decode()
    assert said.startswith("axx")
    assert said.endswith("xxz")
    assert "99999902 characters left out" in said
    assert len(said) < 200


@pytest.mark.parametrize("limit", range(1, 9))
def test_short_messages_are_unchanged_and_long_ones_keep_both_ends(limit):
    for length in range(12):
        cut = shorten(Message("user", "abcdefghijkl"[:length]), limit).content
        kept = "".join(part for part in cut.split("\n") if "left out" not in part)
        assert len(kept) == min(length, limit)
        assert "abcdefghijkl"[:length].startswith(kept[: (limit + 1) // 2])


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
DAEMON = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "time.sleep(0.3)\n"
)


@needs_proc
@pytest.mark.parametrize("env", [None, {"PATH": os.defpath}], ids=["inherited", "its own"])
def test_leftover_processes_are_killed_and_reported(text, env):
    class Messy(Plain):
        async def step(self, action):
            daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", DAEMON, env=env)
            self.child = await asyncio.create_subprocess_exec("sleep", "600", env=env)
            await daemon.wait()
            return Turn(reward=1.0, done=True)

    async def run():
        environment = Messy()
        others = subprocess.Popen(["sleep", "600"])
        try:
            limits = EpisodeLimits(4, 1, 64, step_s=30)
            episode = await run_episode(Talker(), environment, text, temperature=1.0, limits=limits)
            await environment.child.wait()
            return episode, others.poll()
        finally:
            others.kill()
            others.wait()

    episode, others = asyncio.run(run())
    assert episode.cause == "it left 2 processes running"
    assert others is None, "a process of somebody else was killed"


@needs_proc
def test_processes_that_end_by_themselves_are_no_failure(text):
    class Tidy(Plain):
        async def step(self, action):
            done = await asyncio.to_thread(subprocess.run, ["true"], check=True)
            return Turn(reward=float(done.returncode == 0), done=True)

    assert play(Tidy(), text, step_s=30).cause == ""


@needs_proc
def test_marks_do_not_leak_into_unrelated_processes(text):
    with track_orphans() as mine:
        subprocess.run(["true"], check=True)
        assert os.environ[VARIABLE] == mine.mark
    found = subprocess.run(["env"], check=True, capture_output=True, text=True).stdout
    assert VARIABLE not in found


def test_a_cancelled_episode_frees_its_slot_and_closes(tiny, text):
    class Waiting(Plain):
        pass

    async def run():
        engine = TransformersEngine(tiny, stop_tokens=[], slots=1, capacity=64)
        environments = [Waiting() for _ in range(3)]
        limits = EpisodeLimits(40, 1, 64)
        tasks = [
            asyncio.ensure_future(run_episode(engine, e, text, temperature=1.0, limits=limits))
            for e in environments
        ]
        while not engine.step():
            await asyncio.sleep(0)
        assert engine.active == 3
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.sleep(0.01)
        assert engine.active == 1
        while not tasks[1].done():
            await engine.advance()
        return environments, tasks[1].result()

    environments, survivor = asyncio.run(run())
    assert [environment.closed for environment in environments] == [1, 1, 1]
    assert len(survivor.trajectory.tokens_T) == 40


def test_two_hundred_episodes_of_fifty_turns_at_once(tiny, text):
    """All of them are open together, and the engine's few slots serve them all."""
    turns, count = 50, 200
    open_now, most = 0, 0

    class Long(Plain):
        def __init__(self, number):
            self.number = number

        async def reset(self):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            return Turn(f"{self.number:03}")

        async def step(self, action):
            await asyncio.sleep(0)
            return Turn("?")

        async def close(self):
            nonlocal open_now
            open_now -= 1

    async def run():
        engine = TransformersEngine(tiny, stop_tokens=[], slots=64, capacity=160)
        limits = EpisodeLimits(1, turns, 160)

        def one(number):
            return lambda: run_episode(engine, Long(number), text, temperature=1.0, limits=limits)

        return await play_all(engine, [one(n) for n in range(count)], concurrent=count)

    episodes = asyncio.run(run())
    assert most == count
    assert open_now == 0
    for number, episode in enumerate(episodes):
        t = episode.trajectory
        assert not episode.cause
        assert (t.turns, t.mask_T.sum()) == (turns, turns)
        assert bytes(episode.prompt) == f"{number:03}".encode()
        assert (t.tokens_T[t.mask_T == 0] == ord("?")).all()


def failures(**settings):
    return FailureBudget(RolloutConfig(group_size=2, **settings), "w")


def test_failures_are_counted_and_few_are_borne(text):
    bad, good = play(failing(step=raises), text), play(Plain(), text)
    seen = failures(max_failed=0.25)
    for number in range(WINDOW):
        seen.add(Task(str(number), None), [bad if number % 4 == 0 else good, good])
    assert seen.count == WINDOW // 4


def test_too_many_failures_stop_the_worker(text):
    bad, good = play(failing(step=raises), text), play(Plain(), text)
    seen = failures(max_failed=0.25)
    for number in range(WINDOW // 2 - 1):
        seen.add(Task(str(number), None), [bad, good])
    with pytest.raises(InputError, match=r"50% of the last 64 .* task 31: step raised KeyError"):
        seen.add(Task("31", None), [bad, good])


def test_the_first_failure_may_stop_the_worker(text):
    seen = failures(on_failure="stop")
    seen.add(Task("0", None), [play(Plain(), text)])
    with pytest.raises(InputError, match="an episode failed, at task 1: step raised KeyError"):
        seen.add(Task("1", None), [play(failing(step=raises), text)])


def test_an_engine_that_breaks_is_not_the_environments_fault(text):
    class Broken:
        async def generate(self, *_, **__):
            raise RuntimeError("the engine is gone")

    environment = Plain()
    with pytest.raises(RuntimeError, match="engine is gone"):
        play(environment, text, engine=Broken())
    assert environment.closed == 1
