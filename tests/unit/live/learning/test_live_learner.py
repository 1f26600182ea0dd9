"""From stored answers and reports to groups that a trainer consumes."""

import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from documents import blocks
from granted_groups import SECRET, start_with_groups
from heartbeats import put_heartbeat
from live_answers import LIVE, NOW, answer, config_of, put_rows, report

from deltawire.config import parse_config, run_config
from deltawire.errors import InputError
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.learning.choosing import Turns, choose
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups, check_learnable
from deltawire.live.learning.pace import Pace
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket
from deltawire.sync import read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.train.loss import ADVANTAGES
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Challenge


@pytest.fixture
def bucket():
    return open_bucket("memory://")


KTO = {"surrogate": "kto", "advantage": "given", "aggregation": "seq_mean_token_mean"}


def kto_config(**live):
    """A learner's configuration for KTO, with these values in its section."""
    live = {**LIVE["live"], "baseline": "sign", **live}
    return parse_config({**LIVE, "train": {"loss": KTO}, "live": live}, source="test")


def maker_of(bucket, config):
    records = LiveRecords(bucket)
    records.poll()
    return GroupMaker(config, records)


def test_one_vote_of_each_kind_counts_and_the_newest():
    votes = [report(1, "thumbs", 1.0, after_s=1), report(1, "thumbs", -1.0, after_s=5)]
    assert values_of(votes) == values_of(reversed(votes)) == {"thumbs": -1.0}


def test_rewards_are_weights_terms_and_bounds():
    rules = RewardRules({"accept": 0.75, "reject": -0.25, "answer_broken_calls": -2.0})
    assert rules.reward({"accept": 1.0}, answer(1)) == 0.75
    assert rules.reward({"accept": 1.0, "reject": 1.0, "score": 9}, answer(1)) == 0.5
    assert rules.reward({"accept": 1.0}, answer(1, broken_calls=1)) == -1.0
    assert rules.reward({}, answer(1)) is None
    assert RewardRules(silent=0.1).reward({}, answer(1)) == 0.1
    assert RewardRules(silent=0.1).digest != RewardRules(silent=0.2).digest
    own = RewardRules(function="live_rewards_of_a_test:missing")
    with pytest.raises(InputError, match="does not trust"):
        own.load()
    with pytest.raises(InputError, match="the reward of an answer is nan"):
        rules.reward({}, answer(1), lambda values, capture: float("nan"))


def test_only_matured_usable_answers_are_chosen(bucket):
    put_rows(
        bucket,
        0,
        [
            answer(1),
            answer(2, unusable="redacted", tokens=0, spans=[]),
            answer(3, temperature=0.5),
            answer(4, truncated=True),
            answer(5, tokens=17),
            answer(6, at=NOW + 100),
            answer(7),
            answer(8, at=NOW - 1e6),
        ],
        [report(n) for n in (1, 2, 3, 4, 5)] + [report(6, at=NOW + 100), report(8, at=NOW - 1e6)],
    )
    maker = maker_of(bucket, config_of())
    assert [one.capture.answer for one in maker.matured(NOW + 105)] == [f"{1:032x}"]
    states = {"matured": 1, "unusable": 4, "waiting": 2, "expired": 1}
    assert maker.states == states
    maker.matured(NOW + 700)
    assert maker.states["censored"] == 1
    assert maker.prepare(NOW + 105, 4) is None


def test_silence_is_trained_on_only_where_it_has_a_reward(bucket):
    numbers = range(1, 31)
    put_rows(
        bucket, 0, [answer(n) for n in numbers], [report(n, after_s=5) for n in numbers if n % 2]
    )
    late = NOW + 600
    assert len(maker_of(bucket, config_of()).matured(late)) == 15
    early = maker_of(bucket, config_of(silent=0.0)).matured(NOW + 300)
    assert len(early) == 15, "nobody knows yet how late reports are"
    rewarded = maker_of(bucket, config_of(silent=0.0))
    found = rewarded.matured(late)
    assert sorted({one.reward for one in found}) == [0.0, 0.75]
    assert len(found) == 30
    assert rewarded.delays.waits == {"accept": 5.0}
    assert sum(one.silent for one in found) == 15
    assert rewarded.matured(NOW + 7) == []


def test_each_kind_of_feedback_is_waited_for_by_its_own_delays(bucket):
    """Of all reports 2 % are rejections, and all of these are late."""
    numbers = range(1, 451)
    reports = [report(n, "accept", after_s=5) for n in numbers if n <= 400]
    reports += [report(n, "reject", after_s=200) for n in numbers if 400 < n <= 408]
    put_rows(bucket, 0, [answer(n) for n in numbers], reports)
    maker = maker_of(bucket, config_of(silent=0.0))
    maker.matured(NOW + 600)
    assert maker.delays.waits == {"accept": 5.0, "reject": 200.0}
    assert maker.delays.wait_s == 200.0


def test_late_reports_are_counted_and_old_answers_weigh_less(bucket):
    numbers = range(1, 9)
    put_rows(
        bucket, 0, [answer(n) for n in numbers], [report(n, value=float(n % 2)) for n in numbers]
    )
    maker = maker_of(bucket, config_of(half_life_s=100.0))
    assert maker.prepare(NOW + 300, 4) is None
    assert maker.states["faded"] == 8, "they would weigh an eighth"
    answers = maker.prepare(NOW + 100, 4)
    assert [one.weight for one in answers] == [0.5] * 4
    assert [one.age_s for one in answers] == [100.0] * 4
    put_rows(bucket, 1, [], [report(1, "reject", after_s=5000)])
    maker.records.poll()
    maker.matured(NOW + 6000)
    assert (maker.states["late"], maker.states["trained"]) == (1, 4)


def test_no_group_is_made_of_one_users_answers(bucket):
    rows = [answer(n, user="a" * 32) for n in range(1, 20)]
    put_rows(bucket, 0, rows, [report(n, user="a" * 32) for n in range(1, 20)])
    maker = maker_of(bucket, config_of())
    assert maker.prepare(NOW + 100, 4) is None
    assert "19 answers" not in maker.lacks
    assert maker.lacks.startswith("2 answers of 1 users can be trained on, a group takes 4")
    rest = [report(n, value=0.0) for n in (21, 22)]
    put_rows(bucket, 1, [answer(n) for n in (21, 22)], rest)
    maker.records.poll()
    answers = maker.prepare(NOW + 100, 4)
    assert sorted(one.user for one in answers)[2:] == ["a" * 32] * 2


@pytest.mark.parametrize("baseline", ["batch", "value_tracker", "learned"])
def test_a_group_holds_each_answer_with_its_prompt_and_advantage(bucket, baseline):
    values = {1: 1.0, 2: 0.0, 3: 1.0, 4: 0.0}
    put_rows(
        bucket, 0, [answer(n) for n in values], [report(n, value=v) for n, v in values.items()]
    )
    config = config_of(baseline=baseline)
    maker = maker_of(bucket, config)
    groups = LiveGroups(bucket, "live", maker, first=0)
    assert groups.store("n0", NOW + 100)
    assert not groups.store("n1", NOW + 100)
    group, _ = read_group(bucket, "live", 0, bounds=Bounds.of(config, 256))
    assert [t.reward for t in group.trajectories] == pytest.approx([1, -1, 1, -1], abs=0.01)
    for number, trajectory in enumerate(group.trajectories, 1):
        capture = answer(number)
        assert np.array_equal(group.prompt_of(trajectory), capture.prompt_ids)
        assert np.array_equal(trajectory.tokens_T, capture.token_ids)
        assert np.array_equal(trajectory.logprobs_T, capture.token_logprobs)
    (lineage,) = read_lineages(bucket)
    assert [one.reward for one in lineage.answers] == [0.75, 0.0, 0.75, 0.0]
    assert lineage.rules == maker.rules.digest
    given = ADVANTAGES["given"](torch.tensor([0.5, -1.0]), torch.tensor([0, 0]))
    assert given.tolist() == [0.5, -1.0]


def test_a_group_for_kto_holds_the_sign_of_each_reward_and_no_neutral_answer(bucket):
    values = {1: ("accept", 1.0), 2: ("reject", 1.0), 3: ("score", 5.0), 4: ("accept", 0.4)}
    values |= {5: ("reject", 0.2), 6: ("accept", 0.0)}
    put_rows(bucket, 0, [answer(n) for n in values], [report(n, *one) for n, one in values.items()])
    config = kto_config()
    maker = maker_of(bucket, config)
    assert LiveGroups(bucket, "live", maker, first=0).store("n0", NOW + 100)
    group, _ = read_group(bucket, "live", 0, bounds=Bounds.of(config, 256))
    assert [t.reward for t in group.trajectories] == [1.0, -1.0, 1.0, -1.0]
    (lineage,) = read_lineages(bucket)
    assert [int(one.answer, 16) for one in lineage.answers] == [1, 2, 4, 5]
    assert [one.reward for one in lineage.answers] == pytest.approx([0.75, -0.25, 0.3, -0.05])


def test_a_long_answer_has_no_more_influence_in_a_group_for_kto(bucket):
    """The gradient of a whole answer's log-probability grows with its tokens."""
    lengths = {1: 16, 2: 4, 3: 4, 4: 4}
    put_rows(
        bucket, 0, [answer(n, tokens=count) for n, count in lengths.items()],
        [report(n) for n in lengths],
    )  # fmt: skip
    found = maker_of(bucket, kto_config()).prepare(NOW + 100, 4)
    shares = [one.weight * lengths[int(one.answer, 16)] for one in found]
    assert max(shares) == pytest.approx(sum(shares) / 2)
    assert found[0].weight == pytest.approx(12 / 16)


def test_kto_without_signs_is_refused():
    check_learnable(kto_config(), "url")
    with pytest.raises(InputError, match="kto needs good and bad answers, not advantages") as error:
        check_learnable(kto_config(baseline="batch"), "url")
    assert 'live.baseline = "sign"' in error.value.hint


@pytest.mark.parametrize(("group_size", "cap"), [(8, 0.05), (20, 0.05), (2, 0.9), (8, 0.14)])
def test_a_cap_that_no_group_satisfies_is_refused_when_it_is_read(group_size, cap):
    def read(**live):
        rollout = {"group_size": group_size}
        return parse_config({"name": "r", "rollout": rollout, "live": live}, source="test")

    with pytest.raises(InputError, match=f"live.user_cap {cap:g} needs answers of") as error:
        read(user_cap=cap)
    least = float(error.value.hint.split("live.user_cap to ")[1].split(" or more")[0])
    read(user_cap=least)
    assert read().live.largest_share(group_size) == min(1.0, 2 / group_size)
    stored = {"name": "r", "rollout": {"group_size": 8}, "live": {"user_cap": 0.05}}
    assert run_config(stored, url="r").live.largest_share(8) == 0.25, "a run of an earlier release"


def test_a_stated_cap_is_read_back_from_a_run():
    """0.05 was the default of earlier releases, whose runs it is left out of if nothing fits it."""
    config = parse_config(
        {"name": "r", "rollout": {"group_size": 24}, "live": {"user_cap": 0.05}}, source="test"
    )
    stored = msgspec.to_builtins(config)
    assert run_config(stored, url="r").live.user_cap == config.live.user_cap == 0.05


def learned_by(config, *, count):
    """The answers of the first group that a learner with this configuration makes."""
    bucket = open_bucket("memory://")
    numbers = range(1, count + 1)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, "accept" if n % 3 else "reject") for n in numbers],
    )  # fmt: skip
    return maker_of(bucket, config).prepare(NOW + 100, config.rollout.group_size)


def test_the_defaults_and_the_example_of_the_document_learn():
    check = {"train": LIVE["train"], "trust": LIVE["trust"]}
    plain = parse_config({"name": "live", **check}, source="test")
    assert all(one.weight > 0 for one in learned_by(plain, count=8))
    of_live = [one for one in blocks("toml") if one.path.name == "LIVE.md"]
    (block,) = [one for one in of_live if "[live]" in one.text]
    example = parse_config({"name": "live", **tomllib.loads(block.text)}, source="LIVE.md")
    check_learnable(example, "url")
    answers = learned_by(example, count=32)
    assert sum(one.weight for one in answers) > 16
    assert {one.reward for one in answers} == {0.75, -0.25}


def test_a_run_that_would_misread_the_groups_is_refused():
    check_learnable(config_of(), "url")
    for section in ("train", "trust"):
        config = parse_config({**LIVE, section: {}}, source="test")
        with pytest.raises(InputError, match=r"given|rescore_share"):
            check_learnable(config, "url")


@pytest.mark.parametrize("loss", [{"advantage": "given"}, KTO], ids=["ppo", "kto"])
def test_a_trainer_consumes_what_a_learner_made(tmp_path, loss):
    train = {
        "versions": 2, "groups_per_step": 1, "max_staleness": 100,
        "optimizer": {"learning_rate": 1e-2}, "loss": loss,
    }  # fmt: skip
    live = {**LIVE["live"], "rewards": {"accept": 2.0, "score": -1.0}}
    live["baseline"] = "sign" if loss is KTO else "batch"
    sections = {"rollout": LIVE["rollout"], "live": live}
    bucket = start_with_groups(tmp_path, groups=0, train=train, **sections)
    bucket.put(keys.challenge("live"), encode_json(Challenge(worker="live", secret=SECRET)))
    put_rows(
        bucket, 0, [answer(n) for n in range(1, 10)],
        [report(n, "accept" if n % 2 else "score") for n in range(1, 10)],
    )  # fmt: skip
    run, config = open_run(bucket)
    groups = LiveGroups(bucket, "live", maker_of(bucket, config), first=0)
    assert all(groups.store(nonce_of(SECRET, 0, n), NOW + 100) for n in range(2))
    assert not groups.store(nonce_of(SECRET, 0, 2), NOW + 100)
    bucket.delete(keys.heartbeat("w0"))
    put_heartbeat(bucket, "live", stored=2, at=time.time())
    torch.set_num_threads(1)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    process = Process(bucket, "trainer", "trainer", supervised=False)
    Trainer(process, run, config, model).loop()
    for version in (1, 2):
        manifest = read_manifest(bucket, run, version)
        step = CommitMetadata.of(manifest.metadata, run="r", version=version)
        assert step.consumed == [("live", version - 1)]
        assert not step.dropped
    digests = {read_manifest(bucket, run, version).digest for version in range(3)}
    assert len(digests) == 3


def test_answers_that_would_be_dropped_are_not_claimed(bucket):
    rows = [answer(n, spans=[(n % 3, 1), (3, 3)]) for n in range(1, 13)]
    put_rows(bucket, 0, rows, [report(n, value=float(n > 6)) for n in range(1, 13)])
    maker = maker_of(bucket, config_of())
    found = maker.prepare(NOW + 100, 4, oldest=2)
    assert sorted(int(one.answer, 16) for one in found) == [2, 5, 8, 11]
    assert maker.states["stale"] == 8, "their first token is of version 0 or 1"
    assert maker.prepare(NOW + 100, 4, oldest=2) is None
    assert "8 stale" in maker.lacks


def test_equal_rewards_make_no_group_and_others_come_first_then(bucket):
    numbers = range(1, 9)
    reports = [report(n, value=float(n < 8)) for n in numbers]
    put_rows(bucket, 0, [answer(n) for n in numbers], reports)
    maker = maker_of(bucket, config_of())
    assert maker.prepare(NOW + 100, 4) is None
    assert "differ too little" in maker.lacks
    assert {int(one.answer, 16) for one in maker.prepare(NOW + 100, 4)} == {5, 6, 7, 8}


def test_the_newest_come_first_and_users_take_turns():
    def one(user, matured_at, served_at=0.0):
        return SimpleNamespace(user=user, matured_at=matured_at, served_at=served_at)

    turns = Turns(ratio=1.5)
    answers = [one("late", 9.0, 0.0), one("soon", 5.0, 4.0), one("old", 1.0, 0.0)]
    found = choose(answers, 2, most=1, turns=turns)
    assert [a.user for a in found] == ["late", "soon"], "by when they matured, not when served"
    flood = [one("liar", 10.0 + n) for n in range(40)]
    people = [one(f"u{n}", 1.0) for n in range(8)]
    assert [a.user for a in choose(flood + people, 6, most=2, turns=turns)].count("liar") == 1
    for group in range(4):
        turns.add(["liar", f"u{2 * group}", f"u{2 * group + 1}"], at=float(group))
    assert turns.left("liar") == 0, "four times as many as the median user"
    assert (turns.left("u1"), turns.left("new")) == (1, 2), "everyone may have a second one"
    assert not any(a.user == "liar" for a in choose(flood + people, 6, most=2, turns=turns))
    free = Turns(ratio=0.0)
    free.add(["liar"] * 4, at=0.0)
    assert choose(flood, 3, most=3, turns=free) == flood[:-4:-1]


@pytest.mark.parametrize("staleness", [0, 4])
def test_a_learner_keeps_few_groups_ahead_of_the_trainer(bucket, staleness):
    run, publisher = start_run(bucket), start_publisher(bucket)
    train = {"groups_per_step": 2, "max_staleness": staleness}
    train = parse_config({"name": "r", "train": train}, source="test").train
    pace = Pace(bucket, run, "live", train, first=5)
    pace.poll(0, 0.0)
    assert [pace.may_store(n, now=0.0) for n in (5, 6)] == [True, True]
    assert pace.may_store(7, now=0.0) == (staleness > 0), "no step is known yet"
    try:
        for version in range(3):
            step = CommitMetadata(step=version, consumed=[("live", 5)] if version == 2 else [])
            publisher.publish(weights(version), metadata=step.to_dict())
        publisher.flush()
    finally:
        publisher.close()
    pace.poll(1, 10.0)
    pace.poll(2, 20.0)
    assert pace.waiting(7) == 1
    assert pace.may_store(7, now=20.0)
    assert not pace.may_store(8, now=27.0)
    assert pace.may_store(8, now=28.0) == (staleness > 0), "in the last quarter of a step"
    assert not pace.may_store(10, now=29.0)
    assert not pace.may_store(7, now=20.0, learners=2)
    ages = {0: (2, 3), 4: (-1, 0)}[staleness]
    assert (pace.oldest_version(7), pace.oldest_version(8)) == ages


def test_a_correction_that_comes_late_is_counted_and_named_by_the_next_lineage(bucket):
    numbers = range(1, 9)
    reports = [report(n, value=float(n % 2)) for n in numbers]
    put_rows(bucket, 0, [answer(n) for n in numbers], reports)
    groups = LiveGroups(bucket, "live", maker := maker_of(bucket, config_of()), first=0)
    assert groups.store("n0", NOW + 100)
    put_rows(bucket, 1, [], [report(3, "reject", after_s=200), report(1, "score", after_s=200)])
    maker.records.poll()
    assert groups.store("n1", NOW + 300)
    assert maker.states["corrected"] == 1, "a score counts nothing"
    first, second = read_lineages(bucket)
    assert first.corrections == []
    (found,) = second.corrections
    assert (int(found.answer, 16), found.reward, found.at) == (3, 0.5, NOW + 300)
    again = LiveGroups(bucket, "live", restarted := maker_of(bucket, config_of()), first=2)
    assert not again.store("n2", NOW + 400)
    assert restarted.states["corrected"] == 1
    assert restarted.corrections.take() == [], "it is recorded already"
    put_rows(bucket, 2, [], [report(4, "reject", after_s=400)])
    restarted.records.poll()
    other = LiveGroups(bucket, "other", theirs := maker_of(bucket, config_of()), first=0)
    for one, makes in ((again, restarted), (other, theirs)):
        assert not one.store("n3", NOW + 500)
        assert makes.states["corrected"] == 2
        assert len(makes.corrections.take()) == (makes is restarted), "each names its own"
