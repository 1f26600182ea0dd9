"""Episodes of a group that share a finished beginning: what is drawn, reused, marked and read."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from deltawire.chat.text import Text
from deltawire.config import ThinkingConfig, parse_config
from deltawire.engines.base import Completion
from deltawire.envs import Environment, Turn
from deltawire.envs.base import AgentHarness, Task
from deltawire.errors import InputError
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of, with_budget
from deltawire.rl.rollout.reuse import play_group
from deltawire.wire.rollouts import Reuse, decode_group, encode_group

STOP = 256


class Sum(Environment):
    """Asks for 2+2; ``said`` collects what every environment of the test reads."""

    said: list

    def __init__(self, said, *, fails=False, answer="4"):
        self.said, self.fails, self.answer = said, fails, answer

    async def reset(self):
        return Turn("2+2?")

    async def step(self, action):
        if self.fails:
            raise RuntimeError("broken")
        self.said.append((action.thinking, action.text, action.finish))
        return Turn(reward=float(action.text == self.answer), done=True)


class Echoes(Environment):
    """Two turns; the second question may differ from episode to episode."""

    def __init__(self, question):
        self.question, self.turns = question, 0

    async def reset(self):
        return Turn("ask")

    async def step(self, action):
        self.turns += 1
        return Turn(self.question, reward=1.0, done=self.turns == 2)


class Numbered:
    """Draws texts in order of the requests, then 9, each with another log-probability and
    version."""

    slots, capacity, active = 8, 1 << 20, 0

    def __init__(self, *texts):
        self.version, self.texts, self.prompts = 3, list(texts), []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(bytes(token for token in prompt if token < 256).decode())
        tokens = self.texts.pop(0) if self.texts else "9"
        tokens = [*tokens.encode(), STOP] if isinstance(tokens, str) else list(tokens)
        tokens = tokens[: sampling.max_tokens]
        for number, token in enumerate(tokens, 1):
            if on_token is not None and on_token(token):
                tokens = tokens[:number]
                break
        number = len(self.prompts)
        finish = "stop" if tokens[-1] == STOP else "length"
        return Completion(tokens, [-0.1 * number] * len(tokens), [number] * len(tokens), finish)

    async def advance(self):
        return 0

    def cancel_all(self):
        return None


def rollout_of(**keys):
    raw = {"name": "run", "model": {"build": {}}}
    base = {"max_tokens": 16, "context": 4096, "group_size": 4}
    return parse_config({**raw, "rollout": {**base, **keys}}, source="s").rollout


PLANS = {"scaffold": "plan_then_solve", "reuse": {"episodes": 2}}
CUTS = {
    "thinking": {"start": "(", "end": ")", "budgets": [2, 4], "answer_tokens": 5, "per": "prefix"}
}


def played(engine, opened, text, rollout):
    limits = [
        with_budget(EpisodeLimits.of(rollout), version=0, group="n/t", episode=number)
        for number in range(rollout.group_size)
    ]
    ended: list[int] = []
    episodes = asyncio.run(
        play_group(engine, opened, text, rollout, limits, ended=lambda: ended.append(1))
    )
    assert len(ended) >= len(episodes) == rollout.group_size
    group = group_of("w0", "n", Task("t", None), rollout.temperature, episodes)
    return decode_group(encode_group(group), run="", key="")


@pytest.fixture
def text(byte_tokenizer):
    return Text(byte_tokenizer)


def test_a_plan_is_drawn_once_and_followed_by_two_answers(text):
    said = []
    engine = Numbered("add", "sum", "4", "5", "3", "4")
    group = played(engine, lambda: Sum(said), text, rollout_of(**PLANS))
    first, second, third, fourth = group.trajectories
    assert [t.reuse for t in group.trajectories] == [None, Reuse(0, 4), None, Reuse(2, 4)]
    assert len(engine.prompts) == 6  # Two plans and four answers, of eight turns.
    assert sorted(read for _, read, _ in said) == ["3", "4", "4", "5"]
    assert [t.turns for t in group.trajectories] == [2] * 4
    for one, other in ((first, second), (third, fourth)):
        shared = one.mask_T[:4].tolist()
        assert shared == [1, 1, 1, 1]
        assert other.mask_T[:4].tolist() == [0, 0, 0, 0]
        assert one.mask_T[4:].tolist() == other.mask_T[4:].tolist()
        for name in ("tokens_T", "logprobs_T", "versions_T"):
            assert np.array_equal(getattr(one, name)[:4], getattr(other, name)[:4])
        assert other.versions_T[other.mask_T == 1].min() > one.versions_T[0]
    assert group.tokens == 2 * 4 + 4 * 2
    assert group.whole(1).mask_T.tolist() == first.mask_T.tolist()
    assert group.whole(0) is group.trajectories[0]


def test_the_oldest_version_is_that_of_the_shared_tokens(text):
    """So the bound on staleness counts them, whoever continues from them."""
    engine = Numbered("add", "sum", "4", "5", "3", "4")
    group = played(engine, lambda: Sum([]), text, rollout_of(**PLANS))
    assert group.oldest_version == 1


def test_if_the_first_episode_fails_the_others_draw_everything(text):
    environments = iter([Sum([], fails=True), *(Sum([]) for _ in range(3))])
    engine = Numbered("add", "sum", "4", "4", *["plan", "4"] * 3)
    group = played(engine, lambda: next(environments), text, rollout_of(**PLANS))
    causes = [bool(t.cause) for t in group.trajectories]
    assert causes == [True, False, False, False]
    assert group.trajectories[1].reuse is None
    assert group.trajectories[1].mask_T[0] == 1


def test_an_environment_that_says_something_else_ends_the_reuse(text):
    questions = iter(["one", "two", "one", "one"])
    rollout = rollout_of(max_turns=2, reuse={"episodes": 4})
    engine = Numbered("a", "b", "c", "d", "e")
    group = played(engine, lambda: Echoes(next(questions)), text, rollout)
    assert [t.reuse for t in group.trajectories] == [None, *[Reuse(0, 2)] * 3]
    assert sorted(engine.prompts[1:]) == ["askaone", "askaone", "askaone", "askatwo"]


def test_an_episode_that_ends_with_its_first_turn_is_shared_with_nobody(text):
    rollout = rollout_of(max_turns=2, reuse={"episodes": 4})
    engine = Numbered("4", "5", "6", "7")
    group = played(engine, lambda: Sum([]), text, rollout)
    assert [t.reuse for t in group.trajectories] == [None] * 4
    assert len(engine.prompts) == 4


def test_a_thought_is_answered_with_each_budget(text):
    said = []
    engine = Numbered(b"(abcd", [*b"4", STOP], b"(efgh", [*b"4", STOP], "5", "6")
    rollout = rollout_of(**CUTS)
    group = played(engine, lambda: Sum(said), text, rollout)
    assert [t.thinking.budget for t in group.trajectories] == [4, 2, 4, 2]
    assert [t.reuse for t in group.trajectories] == [
        Reuse(0, 5), Reuse(0, 3), Reuse(2, 5), Reuse(2, 3),
    ]  # fmt: skip
    cut = group.trajectories[1]
    assert bytes(cut.tokens_T[:-1].tolist()) in (b"(ab)5", b"(ab)6")
    assert cut.mask_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert cut.thinking.turns == ((2, "forced"),)
    assert cut.thinking.forced == ((3, 4),)
    assert {thinking for thinking, _, _ in said} == {"(abcd)", "(ab)", "(efgh)", "(ef)"}


def test_a_thought_that_ends_before_a_budget_is_reused_whole(text):
    """Its own end mark is reused too, and the answer is drawn again."""
    engine = Numbered([*b"(a)4", STOP], [*b"(b)4", STOP], "5", "6")
    group = played(engine, lambda: Sum([]), text, rollout_of(**CUTS))
    assert [t.reuse for t in group.trajectories] == [
        Reuse(0, 3), Reuse(0, 3), Reuse(2, 3), Reuse(2, 3),
    ]  # fmt: skip
    again = group.trajectories[1]
    assert again.thinking.turns == ((1, "answered"),)
    assert again.mask_T.tolist() == [0, 0, 0, 1, 1]


def test_an_end_mark_drawn_at_the_budget_is_inserted_in_the_cut(text):
    """With that budget nothing more would have been drawn, so the mark is not the model's."""
    engine = Numbered([*b"(ab)", STOP], [*b"(ab)", STOP], "5", "6")
    group = played(engine, lambda: Sum([]), text, rollout_of(**CUTS))
    cut = group.trajectories[1]
    assert bytes(cut.tokens_T[:4].tolist()) == b"(ab)"
    assert (cut.reuse, cut.thinking.forced) == (Reuse(0, 3), ((3, 4),))


def test_a_thought_that_ends_the_turn_is_continued(text):
    """The stop token is not shared: after a cut the model draws on."""
    engine = Numbered([*b"(", STOP], [*b"(b)4", STOP], [*b"c)9", STOP], "6")
    group = played(engine, lambda: Sum([]), text, rollout_of(**CUTS))
    assert group.trajectories[0].reuse == Reuse(0, 1)
    assert group.trajectories[1].reuse == Reuse(0, 1)
    assert group.trajectories[1].mask_T.tolist()[:2] == [0, 1]


def test_cost_is_bounded(text):
    """Each thought is drawn once: at most B tokens of thinking and A tokens for each answer."""
    thinking = {**CUTS["thinking"], "budgets": [1, 2, 3, 4], "answers": 2}
    rollout = rollout_of(thinking=thinking, group_size=16)
    engine = Numbered(*[b"(abcd", [*b"44444"]] * 2, *[[*b"55555"]] * 14)
    group = played(engine, lambda: Sum([]), text, rollout)
    assert len(engine.prompts) == 2 + 16
    assert group.tokens == 2 * 5 + 16 * 5
    assert [t.thinking.budget for t in group.trajectories] == [4, 4, 3, 3, 2, 2, 1, 1] * 2


class Drives(AgentHarness):
    async def drive(self, endpoint):
        return 1.0


def test_a_harness_is_refused(text):
    with pytest.raises(InputError, match="cannot share a beginning"):
        played(Numbered(), Drives, text, rollout_of(**PLANS))


def thinking_of(**keys):
    return {"thinking": {**CUTS["thinking"], **keys}}


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"reuse": {"episodes": 2}}, "no turn follows the 1 that are shared"),
        ({"max_turns": 3, "reuse": {"episodes": 5}}, "5 episodes cannot share a beginning"),
        ({"max_turns": 2, "reuse": {"episodes": 2, "turns": 2}}, "no turn follows the 2"),
        (thinking_of(budgets=[4]), "needs two or more different budgets"),
        (thinking_of(budgets=[4, 4]), "needs two or more different budgets"),
        (thinking_of(tell="{budget}"), "cannot be told different budgets"),
        (thinking_of(answers=2), "not two or more thoughts"),
        (thinking_of() | {"group_size": 5}, "rollout.group_size = 5 is not two or more thoughts"),
        (thinking_of() | {"max_turns": 2}, "is for episodes of one turn"),
        (thinking_of() | {"allocation": {"policy": "pilot"}}, "needs groups of one size"),
        (
            thinking_of(schedule=[{"from_version": 2, "budgets": [1, 2]}]),
            "has one set of budgets",
        ),
        (thinking_of(per="group", answers=2), "rollout.thinking.answers has no effect"),
    ],
)
def test_wrong_settings_are_one_clear_error(rollout, words):
    with pytest.raises(InputError) as caught:
        rollout_of(**rollout)
    assert words in str(caught.value)
    assert caught.value.hint


def test_budget_relative_advantages_need_prefixes():
    raw = {
        "name": "run",
        "model": {"build": {}},
        "train": {"loss": {"advantage": "budget_relative"}},
    }
    with pytest.raises(InputError, match="parts of a thought") as caught:
        parse_config(raw, source="s")
    assert 'rollout.thinking.per = "prefix"' in str(caught.value)


def test_the_budgets_of_a_thought_come_in_order():
    config = msgspec.convert({"end": ")", "budgets": [2, 8, 4], "per": "prefix"}, ThinkingConfig)
    limits = EpisodeLimits(64, 1, 200, thinking=config)
    found = [with_budget(limits, version=9, group="n/t", episode=n).budget for n in range(6)]
    assert found == [8, 4, 2, 8, 4, 2]
    assert replace(limits, budget=8) == with_budget(limits, version=0, group="x", episode=3)
