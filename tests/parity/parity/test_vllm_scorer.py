"""Requests to vLLM and its answers, with a stand-in that answers as vLLM does."""

import sys
from types import SimpleNamespace

import pytest

from deltawire.errors import InputError
from deltawire.parity.scores import DrawnSequence
from deltawire.parity.vllm_scorer import VllmScorer


class Engine:
    """Gives token t at place n the log-probability −(t + n / 100), and draws 7, 8, 9, …"""

    def __init__(self, **settings):
        self.settings = settings
        if settings["model"].endswith("broken"):
            raise RuntimeError("no such architecture\nand a long trace")

    def generate(self, asked, sampling, **_settings):
        return [self.answer(prompt["prompt_token_ids"], sampling) for prompt in asked]

    def answer(self, ids, sampling):
        told = [None]
        for place, token in enumerate(ids[1:], start=1):
            # The best token is returned in addition to the given one.
            entry = {token: SimpleNamespace(logprob=-(token + place / 100))}
            told.append({99: SimpleNamespace(logprob=-0.5), **entry})
        drawn = list(range(7, 7 + sampling.max_tokens))
        return SimpleNamespace(prompt_logprobs=told, outputs=[SimpleNamespace(token_ids=drawn)])


@pytest.fixture
def vllm(monkeypatch):
    module = SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("vllm")
def test_the_tokens_after_the_prompt_are_scored(tmp_path):
    scorer = VllmScorer("vllm:bf16", tmp_path, "bfloat16")
    assert scorer._llm.settings["dtype"] == "bfloat16"
    first, second = scorer.score([DrawnSequence((1, 2), (3, 4, 5)), DrawnSequence((6,), (0,))])
    assert first.logprobs_T.tolist() == [-3.02, -4.03, -5.04]
    assert second.logprobs_T.tolist() == [-0.01]


@pytest.mark.usefixtures("vllm")
def test_it_draws_as_many_as_requested(tmp_path):
    scorer = VllmScorer("vllm", tmp_path, "float32")
    assert scorer.draw([(1,), (2, 3)], count=2, seed=0) == [
        DrawnSequence((1,), (7, 8)),
        DrawnSequence((2, 3), (7, 8)),
    ]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("more", [{"layers": True}, {"feed": []}, {"replay": []}])
def test_unsupported_requests_are_refused(tmp_path, more):
    scorer = VllmScorer("vllm", tmp_path, "float32")
    with pytest.raises(InputError, match="log-probabilities only"):
        scorer.score([], **more)


@pytest.mark.usefixtures("vllm")
def test_a_model_that_it_does_not_serve_is_one_error(tmp_path):
    with pytest.raises(InputError, match="no such architecture") as caught:
        VllmScorer("vllm", tmp_path / "broken", "float32")
    assert len(str(caught.value).splitlines()) == 1
