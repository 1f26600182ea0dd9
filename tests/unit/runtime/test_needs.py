"""A process joins a run of another build, or says in one sentence what it lacks."""

import json

import msgspec
import pytest

from deltawire.builds import build_name
from deltawire.config import parse_config
from deltawire.config.features import FEATURES, Feature, stored_settings
from deltawire.errors import InputError
from deltawire.runtime.needs import config_of, needs_of
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket
from deltawire.sync import create_run, read_run
from deltawire.wire.run import Need, Run, TensorSpec

NEEDED = "this run needs deltawire 0.10 for rollout.tempo"
VALUES = {"name": "newer", "rollout": {"scaffold": "plan_then_solve", "max_steps": 3}, "seed": 5}


def make_run(config, needs, **changes):
    fields = {"id": "ab" * 16, "name": "newer", "created_at": 0.0, "digest": "0" * 32}
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    return Run(**{**fields, "tensors": tensors, "config": config, "needs": needs, **changes})


@pytest.fixture
def newer():
    """A run whose creator has a setting that this build does not know, ``rollout.tempo``."""
    config = stored_settings(parse_config(VALUES, source="test"))
    config["rollout"]["tempo"] = 3
    config["train"]["optimizer"]["kind"] = "newest"
    needs = [
        Need(feature="rollout.tempo", since="0.2", roles=["worker"]),
        Need(feature="train.optimizer.kind=newest", since="0.10"),
    ]
    return make_run(config, needs, build="0.10.0")


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("worker", "this run needs deltawire 0.2 for rollout.tempo; this worker is "),
        ("trainer", f"{NEEDED}, train.optimizer.kind=newest; this trainer is "),
    ],
)
def test_a_role_that_lacks_a_feature_says_which_release_has_it(newer, role, words):
    with pytest.raises(InputError) as caught:
        config_of(newer, url="r", role=role)
    assert caught.value.message == words + build_name()
    assert caught.value.hint == "start it with that release or a later one (docs/UPGRADING.md)"


@pytest.mark.parametrize("role", ["evaluator", "reference", ""])
def test_other_roles_join_without_the_feature(newer, role):
    found = config_of(newer, url="r", role=role)
    assert found == parse_config(VALUES, source="test")
    assert newer.config["rollout"]["tempo"] == 3, "the run's own values stay"


def test_a_process_asks_for_its_role(newer):
    bucket = open_bucket("memory://")
    create_run(bucket, newer)
    assert read_run(bucket).needs == newer.needs
    assert open_run(bucket, role="evaluator")[1].seed == 5
    with pytest.raises(InputError, match=r"needs deltawire 0\.2 for rollout\.tempo"):
        open_run(bucket, role="worker")


def test_a_feature_without_a_setting_is_a_need_too(newer):
    run = msgspec.structs.replace(
        newer,
        config=stored_settings(parse_config(VALUES, source="test")),
        needs=[
            Need(feature=f"groups.{number}", since="0.2", roles=["worker"]) for number in "abcdef"
        ],
    )
    config_of(run, url="r", role="evaluator")
    with pytest.raises(InputError, match=r"groups\.a, groups\.b, groups\.c, groups\.d and 2 more"):
        config_of(run, url="r", role="worker")


def test_an_unknown_setting_that_is_no_need_is_refused(newer):
    run = msgspec.structs.replace(newer, needs=[])
    with pytest.raises(InputError, match=r"unknown key rollout\.tempo") as caught:
        config_of(run, url="r", role="evaluator")
    assert "created by 0.10.0" in caught.value.hint


def test_what_this_build_states_is_what_an_older_one_needs(monkeypatch):
    """The two sides together: this build's ``run.json``, and a build without its feature."""
    monkeypatch.setitem(FEATURES, "rollout.scaffold", Feature("0.2", ("worker",)))
    used, unused = parse_config(VALUES, source="test"), parse_config({"name": "n"}, source="test")
    assert needs_of(unused) == []
    assert "scaffold" not in stored_settings(unused)["rollout"]
    run = make_run(stored_settings(used), needs_of(used), build=build_name())
    assert config_of(run, url="r", role="worker") == used
    stored = json.loads(msgspec.json.encode(run))
    assert stored["needs"] == [{"feature": "rollout.scaffold", "since": "0.2", "roles": ["worker"]}]
    monkeypatch.delitem(FEATURES, "rollout.scaffold")
    with pytest.raises(InputError, match=r"needs deltawire 0\.2 for rollout\.scaffold"):
        config_of(run, url="r", role="worker")
    assert config_of(run, url="r", role="evaluator").rollout.scaffold == unused.rollout.scaffold


def test_a_deep_need_is_read():
    """Paths of a need may have as many parts as its characters admit."""
    need = Need(feature=".".join("a" * 64), since="0.2", roles=["worker"])
    run = make_run(stored_settings(parse_config({"name": "n"}, source="test")), [need])
    assert config_of(run, url="r").name == "n"


@pytest.mark.parametrize("role", ["trainer", "worker"])
def test_a_process_that_is_refused_does_not_take_the_name(newer, role):
    """The process of the newer release that has the name would end."""
    bucket = open_bucket("memory://")
    create_run(bucket, newer)
    process = Process(bucket, role, role, supervised=True)
    with pytest.raises(InputError, match="this run needs"), process.registered():
        pass
    assert bucket.list("leases/") == bucket.list("heartbeats/") == []
    with Process(bucket, "evaluator", "evaluator", supervised=True).registered():
        assert len(bucket.list("leases/")) == 1
