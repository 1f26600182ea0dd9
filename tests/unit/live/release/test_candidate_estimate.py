"""The evaluator estimates a version from logged answers before users see it."""

import copy
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from granted_groups import start_with_groups
from live_answers import answer, put_rows, report

from deltawire.config import BuildConfig, parse_config
from deltawire.estimates import OffPolicyEstimate
from deltawire.events import Evaluated, decode_lines, encode_lines
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.release.candidate_estimate import CandidateEstimator, RecentAnswers, log_ratios
from deltawire.rl.evaluate.evaluator import run_evaluator
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket
from deltawire.train.build import build_model

AGE_S = 100.0


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_model(BuildConfig(hidden_size=32, layers=1, feed_forward_size=64), seed=1).eval()


@pytest.fixture
def bucket():
    return open_bucket("memory://", create=True)


def config_of(**release):
    return parse_config(
        {
            "name": "live",
            "rollout": {"temperature": 1.3, **release.pop("rollout", {})},
            "live": {"release": {"outcome_after_s": 50.0, "metric": "accept", **release}},
        },
        source="a test",
    )


def slow_logprobs(model, one):
    """Log-probabilities of an answer's tokens, one token at a time and without padding."""
    ids, found = list(one.prompt_ids), []
    with torch.no_grad():
        for token in one.token_ids:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
            found.append(float((logits / one.temperature).log_softmax(0)[int(token)]))
            ids.append(int(token))
    return np.array(found)


def logged(model, count, *, off=0.0, **changes):
    """Answers whose logged log-probabilities are the model's, but for ``off`` nats a token."""
    at, found = time.time() - AGE_S, []
    for number in range(count):
        one = answer(number, at=at, tokens=2 + number % 5, temperature=1.3, **changes)
        logprobs = (slow_logprobs(model, one) - off).astype("<f4")
        found.append(msgspec.structs.replace(one, logprobs=logprobs.tobytes()))
    reports = [report(n, value=1.0, at=at) for n in range(0, count, 4)]
    return found, reports


def estimated(bucket, model, config):
    process = SimpleNamespace(bucket=bucket)
    beats = []
    served = SimpleNamespace(engine=SimpleNamespace(model=model))
    found = CandidateEstimator(process, config)(served, beats.append)
    return found, beats


def test_ratios_are_those_of_whole_answers_scored_token_by_token(model):
    answers, _ = logged(model, 12, off=0.1)
    expected = [0.1 * len(one.token_ids) for one in answers]
    np.testing.assert_allclose(log_ratios(model, answers), expected, atol=1e-5)


def test_the_version_that_answered_is_estimated_as_it_was(model, bucket):
    answers, reports = logged(model, 40)
    put_rows(bucket, 0, answers, reports)
    found, beats = estimated(bucket, model, config_of())
    assert found.refused == ""
    assert beats
    assert (found.answers, found.users) == (40, 40)
    assert found.effective == pytest.approx(40, abs=1e-3)
    assert found.mean_ratio == pytest.approx(1, abs=1e-4)
    assert found.logged == 0.25
    assert found.snips == pytest.approx(0.25, abs=1e-4)
    assert found.doubly_robust == pytest.approx(0.25, abs=1e-3)
    assert 0.04 < found.snips_error < 0.1
    assert 0.04 < found.doubly_robust_error < 0.1
    assert found.tokens == sum(len(a.prompt_ids) + len(a.token_ids) for a in answers)


def test_a_version_too_far_away_is_refused_with_the_reason(model, bucket):
    answers, reports = logged(model, 40)
    far = [
        msgspec.structs.replace(
            one, logprobs=(one.token_logprobs + np.float32(number % 9 - 8)).astype("<f4").tobytes()
        )
        for number, one in enumerate(answers)
    ]
    put_rows(bucket, 0, [one for one in far if one.token_logprobs.max() <= 0], reports)
    found, _ = estimated(bucket, model, config_of(estimate_clip=0.0))
    assert "effective sample size" in found.refused
    assert (found.snips, found.doubly_robust) == (None, None)
    assert 0 < found.effective < 30


def test_a_version_whose_answers_are_mostly_clipped_is_refused(model, bucket):
    put_rows(bucket, 0, *logged(model, 40, off=-0.2))
    found, _ = estimated(bucket, model, config_of())
    assert found.clipped_mass > 0.25
    assert "own answers are clipped" in found.refused
    assert found.low is None
    known, _ = estimated(bucket, model, config_of(estimate_mass=0.9))
    assert known.low <= known.snips <= known.high
    assert known.high - known.low >= known.clipped_mass


def test_a_version_that_computes_no_numbers_is_refused_and_its_evaluation_is_kept(model, bucket):
    put_rows(bucket, 0, *logged(model, 40))
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    found, _ = estimated(bucket, broken, config_of())
    assert "no numbers" in found.refused
    event = Evaluated(
        process="evaluator", at=1.0, version=1, accuracy=0.0, problems=1, seconds=1.0,
        off_policy=found,
    )  # fmt: skip
    assert decode_lines(encode_lines([event])) == [event]


CHANGES = {
    "unusable": ({"unusable": "no tokens"}, "10 without tokens"),
    "truncated": ({"truncated": True}, "10 sampled by other settings than the run's"),
    "another temperature": ({"temperature": 1.0}, "10 sampled by other settings than the run's"),
    "young": ({"at": time.time() + 1e6}, "10 without an outcome yet"),
    "foreign tokens": (
        {"prompt": np.full(3, 1 << 20, "<i4").tobytes()},
        "10 with tokens that the model does not have",
    ),
    "long": (
        {"prompt": np.zeros(5000, "<i4").tobytes()},
        "10 longer than the context",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_answers_that_say_nothing_are_left_out_and_counted(model, bucket, name):
    changes, reason = CHANGES[name]
    answers, reports = logged(model, 10)
    put_rows(bucket, 0, [msgspec.structs.replace(one, **changes) for one in answers], reports)
    found, _ = estimated(bucket, model, config_of())
    assert found.refused == f"too few logged answers: {reason}"


def test_what_cannot_be_estimated_says_so_and_stops_nothing(model, bucket):
    assert estimated(bucket, model, config_of())[0] is None, "nobody was ever served"
    put_rows(bucket, 0, *logged(model, 4))
    assert estimated(bucket, model, config_of(estimate_answers=0))[0] is None
    restricted = config_of(rollout={"temperature": 1.0, "top_p": 0.9})
    assert "likely tokens only" in estimated(bucket, model, restricted)[0].refused
    assert "another process" in estimated(bucket, None, config_of())[0].refused
    broken = SimpleNamespace(get_input_embeddings=model.get_input_embeddings, device="cpu")
    assert estimated(bucket, broken, config_of())[0].refused.startswith("AttributeError")
    one_user = [msgspec.structs.replace(a, user="1" * 32) for a in logged(model, 40)[0]]
    other = open_bucket("memory://", create=True)
    put_rows(other, 0, one_user)
    assert estimated(other, model, config_of())[0].refused == "all answers are of one user"


def test_the_cost_is_bounded_by_the_newest_answers(model, bucket, monkeypatch):
    from deltawire.live.release import candidate_estimate

    answers, reports = logged(model, 20)
    for number, one in enumerate(answers):
        later = msgspec.structs.replace(one, at=one.at + number / 100)
        put_rows(bucket, number, [later], reports[number : number + 1])
    assert estimated(bucket, model, config_of(estimate_answers=7))[0].answers == 7
    size = len(answers[-1].prompt_ids) + len(answers[-1].token_ids)
    monkeypatch.setattr(candidate_estimate, "MAX_TOKENS", size)
    assert "too few" in estimated(bucket, model, config_of())[0].refused
    monkeypatch.setattr(candidate_estimate, "FIRST_SEGMENTS", 3)
    monkeypatch.setattr(candidate_estimate, "MAX_KEPT", 2)
    records = RecentAnswers(bucket)
    records.poll()
    assert records.counts["answers"] == 3
    assert sorted(records.answers) == [f"{n:032x}" for n in (18, 19)]
    assert set(records.reports) <= set(records.answers)


@pytest.mark.drills
def test_an_evaluator_records_the_estimate_of_each_version_with_its_accuracy(tmp_path):
    store = start_with_groups(
        tmp_path, groups=1, train={"versions": 1, "groups_per_step": 1, "max_staleness": 100}
    )
    run, config = open_run(store)
    with fetch_model_files(store, run) as folder:
        policy = empty_model(Path(folder))
    trainer = Process(store, "trainer", "trainer", supervised=False)
    Trainer(trainer, run, config, policy).loop()
    seen = []

    def estimator(process, config):
        assert isinstance(CandidateEstimator(process, config), CandidateEstimator)

        def estimate(served, progress):
            progress("estimate")
            seen.append(served.live.version)
            return OffPolicyEstimate(answers=10 + served.live.version)

        return estimate

    process = Process(store, "evaluator", "evaluator", supervised=False)
    run_evaluator(process, estimator)
    process.events.flush()
    found = [e for e in events_of(store, "evaluator") if isinstance(e, Evaluated)]
    assert seen == [one.version for one in found]
    assert seen[-1] == 1
    assert [one.off_policy.answers for one in found] == [10 + version for version in seen]
