"""New rewards on stored answers: the same rewards make the parent's bits, others do not."""

from dataclasses import replace

import pytest
from forgotten_users import train
from granted_groups import copied, made_up_group, start_with_groups

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.launch.branches import rescoring
from deltawire.launch.branches.rescoring import load_reward, rescore_run
from deltawire.rl.control.rollout_reader import read_group
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.train.checkpoint_folders import checkpoint_versions

TRAIN = {"groups_per_step": 2, "max_staleness": 99, "versions": 2, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    bucket = start_with_groups(tmp_path_factory.mktemp("trained"), groups=4, train=TRAIN)
    train(bucket, to=2)
    return bucket


@pytest.fixture
def parent(trained, tmp_path):
    return copied(trained, str(tmp_path / "run"))


def digests(bucket, *versions):
    run = read_run(bucket)
    return [read_manifest(bucket, run, version).digest for version in versions]


def same(_completion, row):
    return row["reward"]


def test_the_same_rewards_make_the_same_bits_and_others_do_not(parent, tmp_path, capsys):
    steps = []
    made = rescore_run(parent, read_run(parent), "same", same, first=1, last=2, report=steps.append)
    fork = open_bucket(made.url)
    assert digests(fork, 0, 1, 2) == digests(parent, 0, 1, 2)
    assert [(one.version, one.origin) for one in steps] == [(1, 1), (2, 2)]
    assert all(one.before == one.after for one in steps)
    assert checkpoint_versions(fork) == [0, 2]
    assert main(["replay", made.url]) == 0
    capsys.readouterr()
    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(completion, row):\n"
        "    assert isinstance(completion, str) and row['prompt'] is not None\n"
        "    return 1.0 - row['reward']\n"
    )
    words = [parent.url, "--reward", str(file), "--from", "1", "--to", "2", "--to-run", "other"]
    assert main(["rescore", *words]) == 0
    assert "mean reward" in capsys.readouterr().out
    other = open_bucket(f"{parent.url}/forks/other")
    assert digests(other, 1) != digests(parent, 1)
    assert read_group(other, "rescored", 3) is not None
    assert main(["rescore", *words]) == 0  # It continues: nothing is left to do.


def test_a_stopped_call_goes_on(parent):
    def stop(_step):
        raise KeyboardInterrupt

    run = read_run(parent)
    with pytest.raises(KeyboardInterrupt):
        rescore_run(parent, run, "same", same, first=1, last=2, report=stop)
    made = rescore_run(parent, run, "same", same, first=1, last=2)
    assert digests(open_bucket(made.url), 1, 2) == digests(parent, 1, 2)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 3), (2, 1)])
def test_versions_that_are_not_there(parent, first, last):
    with pytest.raises(InputError, match="does not have all versions"):
        rescore_run(parent, read_run(parent), "same", same, first=first, last=last)


def test_an_episode_whose_grader_failed_gets_a_reward():
    buffered = rescoring.BufferedGroup(0, made_up_group(0, failed=(0, 1)))
    seen = []

    def reward(_completion, row):
        seen.append((row["cause"], row["reward"]))
        return 0.5

    scored = rescoring._Scorer(reward, str).score(buffered)
    assert [one.reward for one in scored.trajectories] == [0.5] * 4
    assert not any(one.cause for one in scored.trajectories)
    failed = buffered.group.trajectories[1]
    assert failed.cause
    assert seen[1] == (failed.cause, None)
    kept = rescoring._Scorer(lambda _, row: row["reward"], str).score(buffered)
    assert kept.trajectories[1].cause == failed.cause


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_reward(value):
    scorer = rescoring._Scorer(lambda *_: value, str)
    with pytest.raises(InputError, match="the reward of an answer"):
        scorer._value(made_up_group(0), made_up_group(0).trajectories[:1])


def test_answers_of_users_are_not_copied():
    buffered = rescoring.BufferedGroup(0, replace(made_up_group(0), task="live"))
    with pytest.raises(InputError, match="answers of users"):
        rescoring._Scorer(same, str).score(buffered)


@pytest.mark.parametrize("text", [None, "rewards = 3\n"])
def test_a_file_without_a_reward(tmp_path, text):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError):
        load_reward(file)
