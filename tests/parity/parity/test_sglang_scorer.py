"""Requests to SGLang and its answers, with a stand-in that answers as SGLang does."""

import sys
from types import ModuleType

import pytest

from deltawire.errors import InputError
from deltawire.parity.scorers import parse_spec
from deltawire.parity.scores import DrawnSequence
from deltawire.parity.sglang_scorer import SglangScorer


class Engine:
    """Gives token t at place n the log-probability −(t + n / 100), and draws 7, 8, 9, …"""

    skipped = 0

    def __init__(self, *, server_args):
        self.arguments = server_args
        if any(one.endswith("broken") for one in server_args):
            raise RuntimeError("no such architecture\nand a long trace")

    def generate(self, *, input_ids, sampling_params, return_logprob=False, logprob_start_len=()):
        assert logprob_start_len == ([0] * len(input_ids) if return_logprob else ())
        return [self.answer(ids, sampling_params["max_new_tokens"]) for ids in input_ids]

    def answer(self, ids, count):
        entries = [(-(token + n / 100) if n else None, token, None) for n, token in enumerate(ids)]
        about = {"input_token_logprobs": entries[self.skipped :]}
        return {"output_ids": list(range(7, 7 + count)), "meta_info": about}


@pytest.fixture
def sglang(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang"].Engine = Engine
    sys.modules["sglang.srt.server_args"].prepare_server_args = list
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "")


@pytest.mark.usefixtures("sglang")
def test_the_tokens_after_the_prompt_are_scored(tmp_path, monkeypatch):
    scorer = SglangScorer("sglang:bf16", tmp_path, "bfloat16")
    assert "bfloat16" in scorer._engine.arguments
    sequences = [DrawnSequence((1, 2), (3, 4, 5)), DrawnSequence((6,), (0,))]
    first, second = scorer.score(sequences)
    assert first.logprobs_T.tolist() == [-3.02, -4.03, -5.04]
    assert second.logprobs_T.tolist() == [-0.01]
    monkeypatch.setattr(Engine, "skipped", 1)
    with pytest.raises(InputError, match="every token"):
        scorer.score(sequences)


@pytest.mark.usefixtures("sglang")
def test_it_draws_as_many_as_requested(tmp_path):
    scorer = SglangScorer("sglang", tmp_path, "float32")
    assert scorer.draw([(1,), (2, 3)], count=2, seed=0) == [
        DrawnSequence((1,), (7, 8)),
        DrawnSequence((2, 3), (7, 8)),
    ]
    with pytest.raises(InputError, match="log-probabilities only"):
        scorer.score([], layers=True)


def test_without_sglang_the_error_names_the_way_to_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "")
    with pytest.raises(InputError, match="SGLang is not installed here"):
        SglangScorer("sglang", tmp_path, "float32")
    assert parse_spec("sglang:bf16").reads_folder


@pytest.mark.usefixtures("sglang")
def test_a_model_that_sglang_does_not_serve_is_named(tmp_path):
    with pytest.raises(InputError, match="no such architecture"):
        SglangScorer("sglang", tmp_path / "broken", "float32")
