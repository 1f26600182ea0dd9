"""``n_adaptive``: answers are drawn until a vote is decided or a verifier accepts one."""

import asyncio
from fractions import Fraction
from math import comb

import aiohttp
import msgspec
import pytest
from endpoint_policy import policy_of
from hypothesis import given
from hypothesis import strategies as st

from deltawire.chat.openai.adaptive import AdaptiveSampling, Ballot, certainty
from deltawire.chat.openai.endpoint import Endpoint, listening
from deltawire.chat.openai.recording import Recording
from deltawire.chat.text import Text
from deltawire.config import ThinkingConfig
from deltawire.engines.base import Completion

TOKEN, END = "a token", 256


class Says:
    """An engine that gives its answers in order."""

    version, slots, capacity, active = 7, 8, 4096, 0

    def __init__(self, *texts):
        self.texts, self.asked = texts, 0

    async def generate(self, prompt, sampling, *, on_token=None):
        if prompt[-1] == ord(")"):  # Its thinking is over.
            said = "yes"
        else:
            said = self.texts[self.asked % len(self.texts)]
            self.asked += 1
        tokens = [*said.encode(), END][: sampling.max_tokens]
        for token in tokens:
            await asyncio.sleep(0)
            if on_token is not None and on_token(token):
                break
        finish = "stop" if tokens[-1] == END else "length"
        return Completion(tokens, [-0.25] * len(tokens), [7] * len(tokens), finish)


def ask(byte_tokenizer, engine, body, *, recording=None, **policy):
    text = Text(byte_tokenizer)
    settings = {"max_tokens": 64, "capacity": 4096, **policy}
    recording = recording(text) if recording else None
    endpoint = Endpoint(engine, text, policy_of(**settings), token=TOKEN, recording=recording)
    body = {"messages": [{"role": "user", "content": "2+2?"}], **body}

    async def run():
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            listening(endpoint) as url,
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url}/chat/completions", json=body) as answer,
        ):
            if body.get("stream"):
                return answer.status, await answer.text()
            return answer.status, await answer.json()

    status, found = asyncio.run(run())
    return status, found, recording


def said(found):
    return found["choices"][0]["message"]["content"]


@given(st.integers(0, 12), st.integers(0, 12))
def test_certainty_is_the_integral_of_the_posterior(first, second):
    # The density of Beta(first + 1, second + 1), integrated over (1/2, 1] term by term, exactly.
    total = sum(
        (-1) ** j * comb(second, j) * (1 - Fraction(1, 2) ** (first + j + 1)) / (first + j + 1)
        for j in range(second + 1)
    )
    scale = comb(first + second, first) * (first + second + 1)
    assert certainty(first, second) == pytest.approx(float(total * scale))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 12))
def test_a_ballot_never_exceeds_its_bound_and_returns_the_leader(answers, most):
    ballot = Ballot(AdaptiveSampling(n_max=most, step=3))
    given_ = iter(answers * 12)
    while not ballot.ended:
        assert 1 <= ballot.wave <= 3
        for _ in range(ballot.wave):
            ballot.add(next(given_))
    drawn = (answers * 12)[: ballot.drawn]
    assert ballot.drawn <= most
    leader = drawn[ballot.winner]
    assert drawn.count(leader) == max(map(drawn.count, drawn))
    if ballot.ended == "confident":
        others = sorted((drawn.count(a) for a in set(drawn) - {leader}), reverse=True)
        assert certainty(drawn.count(leader), others[0] if others else 0) >= 0.95


def test_equal_answers_end_early_and_all_tokens_are_counted(byte_tokenizer):
    engine = Says("four")
    status, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": 16})
    assert status == 200
    assert said(found) == "four"
    assert len(found["choices"]) == 1
    assert engine.asked == 4  # 1 - 2^-5 is the first certainty above 0.95
    report = {"drawn": 4, "ended": "confident", "by": "vote", "votes": 4, "confidence": 1 - 2**-5}
    assert found["n_adaptive"] == report
    assert found["usage"]["completion_tokens"] == 4 * len("four.")


def test_disagreement_goes_on_to_the_bound(byte_tokenizer):
    engine = Says("a", "b", "c", "b", "d")
    status, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": {"n_max": 5, "step": 1}})
    assert (status, engine.asked, said(found)) == (200, 5, "b")
    assert found["n_adaptive"]["ended"] == "n_max"


def test_only_the_text_after_the_mark_is_voted_on(byte_tokenizer):
    engine = Says("so #### 4", "thus ####  4 ", "well #### 4", "hence #### 4")
    adaptive = {"n_max": 9, "after": "####"}
    _, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": adaptive})
    assert found["n_adaptive"]["votes"] == 4
    assert said(found) == "so #### 4"


def test_thinking_is_not_voted_on(byte_tokenizer):
    thinking = msgspec.convert({"end": ")", "budgets": [8], "answer_tokens": 8}, ThinkingConfig)
    engine = Says("one thought", "two thoughts", "three thoughts", "four thoughts")
    _, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": 8}, thinking=thinking, budget=8)
    assert (found["n_adaptive"]["drawn"], said(found)) == (4, "one thou)yes")


def test_a_verifier_ends_at_the_first_accepted_answer(byte_tokenizer):
    seen = []

    def verify(messages, answer):
        seen.append((messages[0].content, answer))
        return {"bad": 0.1, "fair": 0.6, "good": 1.0}[answer]

    engine = Says("bad", "fair", "good", "bad")
    adaptive = {"n_max": 9, "by": "verifier", "step": 1}
    _, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": adaptive}, verifier=verify)
    assert said(found) == "good"
    assert found["n_adaptive"] == {"drawn": 3, "ended": "accepted", "by": "verifier", "score": 1.0}
    assert seen == [("2+2?", "bad"), ("2+2?", "fair"), ("2+2?", "good")]
    engine = Says("bad", "fair")
    adaptive["n_max"] = 4
    _, found, _ = ask(byte_tokenizer, engine, {"n_adaptive": adaptive}, verifier=verify)
    assert (said(found), found["n_adaptive"]["ended"]) == ("fair", "n_max")


def test_a_stream_says_only_the_chosen_answer(byte_tokenizer):
    body = {"n_adaptive": 4, "stream": True, "stream_options": {"include_usage": True}}
    status, found, _ = ask(byte_tokenizer, Says("no", "yes", "yes", "yes"), body)
    assert status == 200
    assert '"content": "yes"' in found
    assert '"no"' not in found
    assert '"drawn": 4' in found
    assert found.rstrip().endswith("data: [DONE]")


def test_all_answers_are_recorded(byte_tokenizer):
    _, _, recording = ask(
        byte_tokenizer, Says("a", "b"), {"n_adaptive": 4}, recording=Recording, temperature=1.0
    )
    assert recording.turns == 4
    assert len(recording.segments()) == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n_adaptive": 0}, "n_adaptive"),
        ({"n_adaptive": 129}, "n_adaptive"),
        ({"n_adaptive": {"n_max": 4, "confidence": 0.5}}, "confidence"),
        ({"n_adaptive": {"n_max": 4, "by": "luck"}}, "luck"),
        ({"n_adaptive": {"n_max": 4, "steps": 1}}, "steps"),
        ({"n_adaptive": {}}, "n_max"),
        ({"n_adaptive": 4, "n": 2}, "n above 1"),
        ({"n_adaptive": {"n_max": 4, "by": "verifier"}}, "no verifier"),
    ],
)
def test_wrong_options_are_refused(byte_tokenizer, body, words):
    engine = Says("a")
    status, found, _ = ask(byte_tokenizer, engine, body)
    assert (status, engine.asked) == (400, 0)
    assert words in found["error"]["message"]


def test_the_turns_of_an_episode_bound_the_answers(byte_tokenizer):
    status, found, _ = ask(byte_tokenizer, Says("a"), {"n_adaptive": 4}, turns=3)
    assert (status, found["error"]["code"]) == (400, "turn_limit_exceeded")


@pytest.mark.parametrize("score", [float("nan"), "high", None])
def test_a_verifier_that_fails_is_named(byte_tokenizer, score):
    body = {"n_adaptive": {"n_max": 4, "by": "verifier"}}
    status, found, _ = ask(byte_tokenizer, Says("a"), body, verifier=lambda *_: score)
    assert status == 500
    assert "the verifier" in found["error"]["message"]
