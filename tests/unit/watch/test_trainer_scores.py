"""A group's tokens are scored again with the weights that drew them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from honest_groups import HonestRun, RoutedRun

from deltawire.errors import InputError
from deltawire.watch import trainer_scores
from deltawire.watch.group_view import GroupReader
from deltawire.watch.trainer_scores import TrainerScores
from deltawire.wire import keys
from deltawire.wire.rollouts import Thinking, encode_group


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return HonestRun(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scores(honest):
    return TrainerScores(honest.bucket, honest.run, honest.config)


def changed(group, **changes):
    first = replace(group.trajectories[0], **changes)
    return replace(group, trajectories=[first, *group.trajectories[1:]])


def test_only_the_token_with_a_false_log_probability_has_a_gap(honest, scores) -> None:
    group = honest.group(0)
    logprobs = group.trajectories[0].logprobs_T.copy()
    logprobs[1] -= 2
    false = changed(group, logprobs_T=logprobs)
    sequence = 7
    honest.bucket.put(keys.rollout("w0", sequence), encode_group(false))
    reader = GroupReader(honest.bucket, honest.run)
    tokens = reader.tokens("w0", sequence, 0, first=0)
    found = reader.trainer(scores, "w0", sequence, 0, first=0)
    gaps = np.array(found.logprobs) - np.array(tokens.logprobs)
    assert gaps[1] == pytest.approx(2, abs=0.05)
    assert np.abs(np.delete(gaps, 1)).max() < 0.05
    assert found.largest_gap == pytest.approx(2, abs=0.05)
    assert found.mean_gap == pytest.approx(np.abs(gaps).mean())
    assert found.versions == [honest.version]
    assert reader.trainer(scores, "w0", sequence, 0, first=1).logprobs == found.logprobs[1:]
    with pytest.raises(InputError, match="answers"):
        reader.trainer(scores, "w0", sequence, 99, first=0)


def test_each_token_is_scored_by_the_version_that_drew_it(honest, scores) -> None:
    old = honest.group(1)
    drew = honest.version
    honest.step(size=0.5)
    assert (scores.of(old, 0, first=0, limit=100).largest_gap or 9) < 0.05
    count = len(old.trajectories[0].tokens_T)
    versions = np.array([drew] + [honest.version] * (count - 1), np.int32)
    mixed = scores.of(changed(old, versions_T=versions), 0, first=0, limit=100)
    assert mixed.versions == [drew, honest.version]
    assert mixed.largest_gap > 0.05
    gone = scores.of(changed(old, versions_T=versions + 50), 0, first=0, limit=100)
    assert gone.versions == []
    assert gone.unread == [drew + 50, honest.version + 50]
    assert gone.mean_gap is None
    assert gone.logprobs == [None] * count


def test_what_cannot_be_scored_is_said(honest, scores, monkeypatch) -> None:
    group = honest.group(2)
    failed = changed(group, cause="the scorer failed")
    with pytest.raises(InputError, match="not one that is trained on"):
        scores.of(failed, 0, first=0, limit=100)
    with pytest.raises(InputError, match="no configuration"):
        TrainerScores(honest.bucket, honest.run, None).of(group, 0, first=0, limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_scores, "MAX_SCORED_TOKENS", 10)
        with pytest.raises(InputError, match="the page scores up to 10"):
            scores.of(group, 0, first=0, limit=100)
    monkeypatch.setattr(trainer_scores, "MAX_MEASURED_BYTES", 10)
    with pytest.raises(InputError, match="the page scores models up to"):
        scores.of(group, 0, first=0, limit=100)


def test_forced_tokens_differ_from_those_of_the_environment(honest) -> None:
    group = honest.group(3)
    one = group.trajectories[0]
    added = np.array([65, 66, 67], np.int32)
    longer = changed(
        group,
        tokens_T=np.r_[one.tokens_T, added],
        logprobs_T=np.r_[one.logprobs_T, np.zeros(3, np.float32)],
        versions_T=np.r_[one.versions_T, np.zeros(3, np.int32)],
        mask_T=np.r_[one.mask_T, np.zeros(3, np.uint8)],
        thinking=Thinking(
            budget=2,
            turns=((1, "forced"),),
            forced=((len(one.tokens_T), len(one.tokens_T) + 2),),
        ),
    )
    honest.bucket.put(keys.rollout("w0", 9), encode_group(longer))
    tokens = GroupReader(honest.bucket, honest.run).tokens("w0", 9, 0, first=0)
    assert tokens.forced[-3:] == [1, 1, 0]
    assert tokens.drawn[-3:] == [0, 0, 0]
    assert sum(tokens.forced) == 2


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_a_changed_expert_choice_is_a_flip_of_the_token_it_drew(tmp_path, mode) -> None:
    routed = RoutedRun.with_routes(tmp_path, mode)
    scores = TrainerScores(routed.bucket, routed.run, routed.config)
    group = routed.group(0)
    same = scores.of(group, 0, first=0, limit=100)
    count = len(group.trajectories[0].tokens_T)
    assert same.choices == 4
    assert same.flips == [0] * count
    assert same.flipped_share == 0
    other = routed.rerouted(group, token=2)
    found = scores.of(other, 0, first=0, limit=100)
    assert found.flips is not None
    assert found.flipped_layers[2] == [1]
    # The last layer's choice reaches the logits only, so no other token's router sees it.
    assert found.flips == [0, 0, 2] + [0] * (count - 3)
    assert found.flipped_share == 2 / (4 * count)
    gap = abs(found.logprobs[2] - same.logprobs[2])
    assert gap > 1e-6 if mode == "replay" else gap == 0
    assert scores.of(other, 0, first=2, limit=1).flips == [2]
    assert scores.of(changed(group, routes=b""), 0, first=0, limit=100).flips is None
