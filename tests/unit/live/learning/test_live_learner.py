"""From stored answers and reports to groups that a trainer consumes."""

import time
import tomllib
from pathlib import Path

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
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups, check_learnable
from deltawire.live.learning.records import LiveRecords
from deltawire.live.learning.rewards import RewardRules, values_of
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket
from deltawire.sync import read_manifest
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
    states = {"matured": 1, "unusable": 4, "waiting": 2, "expired": 1, "quarantined": 0}
    assert maker.states == states
    maker.matured(NOW + 700)
    assert maker.states["censored"] == 1
    assert maker.prepare(NOW + 105, 4) is None


def test_silence_is_trained_on_only_where_it_has_a_reward(bucket):
    numbers = range(1, 31)
    put_rows(
        bucket, 0, [answer(n) for n in numbers], [report(n, after_s=5) for n in numbers if n % 2]
    )
    late = NOW + 300
    assert len(maker_of(bucket, config_of()).matured(late)) == 15
    rewarded = maker_of(bucket, config_of(silent=0.0))
    found = rewarded.matured(late)
    assert sorted({one.reward for one in found}) == [0.0, 0.75]
    assert len(found) == 30
    assert rewarded.delays.share == pytest.approx(0.5, abs=0.01)
    assert rewarded.matured(NOW + 7) == []


def test_late_reports_are_counted_and_old_answers_weigh_less(bucket):
    put_rows(bucket, 0, [answer(n) for n in range(1, 9)], [report(n) for n in range(1, 9)])
    maker = maker_of(bucket, config_of(half_life_s=100.0))
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
    put_rows(bucket, 1, [answer(n) for n in (21, 22)], [report(n) for n in (21, 22)])
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


def test_answers_of_outlying_users_and_cohorts_wait(bucket):
    answers, reports = [], []
    for number in range(1, 241):
        user = number % 12
        bad = user == 3 or (user in (4, 5) and number > 120)
        answers.append(
            answer(number, user=f"{user:032x}", cohort="raid" if bad and user != 3 else f"c{user}")
        )
        reports.append(report(number, value=float(not bad and number % 7 != 0)))
    put_rows(bucket, 0, answers, reports)
    free = maker_of(bucket, config_of(outlier_limit=0.0))
    assert len(free.matured(NOW + 100)) == 240
    assert not free.quarantined.users
    maker = maker_of(bucket, config_of())
    kept = maker.matured(NOW + 100)
    assert f"{3:032x}" in maker.quarantined.users
    assert "raid" in maker.quarantined.cohorts
    assert not any(one.cohort == "raid" or one.capture.user == f"{3:032x}" for one in kept)
    assert maker.states["quarantined"] == 240 - len(kept) > 0
