"""slime's hook, called as its source calls it: on every rank, with a directory that is removed."""

import logging
import shutil
from types import SimpleNamespace

import pytest
from checkpoint_dirs import contents, write_directory

import deltawire.slime
from deltawire.errors import InputError
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.sync import load_mirror, newest_version, read_run
from deltawire.testing.faulty import FaultyBucket


@pytest.fixture(autouse=True)
def _closed():
    yield
    deltawire.slime.close()


def test_each_version_is_committed_before_the_hook_returns(tmp_path, monkeypatch):
    url = str(tmp_path / "run")
    monkeypatch.setenv("DELTAWIRE_RUN", url)
    for number in range(1, 4):
        path = write_directory(tmp_path / f"weight_v{number:06d}", number, sharded=True)
        done = deltawire.slime.publish(SimpleNamespace(), str(path), [object()])
        assert (done.version, done.state) == (number - 1, "published")
        shutil.rmtree(path)  # slime does, once the engines have loaded it.
        mirror = load_mirror(open_bare_bucket(url), read_run(open_bare_bucket(url)), at=number - 1)
        assert {n: bits.tobytes() for n, bits in mirror.tensors.items()} == contents(number)
    # A restarted trainer goes on.
    deltawire.slime.close()
    path = write_directory(tmp_path / "weight_v000004", 4)
    assert deltawire.slime.publish(SimpleNamespace(), str(path), []).version == 3


def test_other_ranks_publish_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_RUN", str(tmp_path / "run"))
    monkeypatch.setattr(deltawire.slime, "_rank", lambda: 1)
    path = write_directory(tmp_path / "weight_v000001", 1)
    assert deltawire.slime.publish(None, str(path), None) is None
    assert not (tmp_path / "run").exists()


def test_without_a_run_it_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("DELTAWIRE_RUN", raising=False)
    path = write_directory(tmp_path / "weight_v000001", 1)
    with pytest.raises(InputError, match="DELTAWIRE_RUN is not set"):
        deltawire.slime.publish(None, str(path), None)


def newest(url):
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=newest_version(bucket))
    return mirror.version, {n: bits.tobytes() for n, bits in mirror.tensors.items()}


def test_a_restarted_slime_that_counts_from_1_again_loses_no_update(tmp_path, monkeypatch, caplog):
    url = str(tmp_path / "run")
    monkeypatch.setenv("DELTAWIRE_RUN", url)
    for seed in (1, 2, 3):
        deltawire.slime.publish(None, write_directory(tmp_path / f"weight_v{seed:06d}", seed), [])
    deltawire.slime.close()
    # The checkpoint was of update 1: its weights come again, then others.
    with caplog.at_level(logging.WARNING):
        for number, seed in enumerate((1, 8, 9), 1):
            path = write_directory(tmp_path / f"again/weight_v{number:06d}", seed)
            done = deltawire.slime.publish(None, path, [])
            assert (done.version, done.state) == (2 + number, "published")
            assert newest(url) == (2 + number, contents(seed))
    assert sum("counts from an earlier number" in one.message for one in caplog.records) == 1
    assert deltawire.slime.publish(None, path, []).state == "there"


def test_training_goes_on_without_the_store(tmp_path, monkeypatch, caplog):
    url = str(tmp_path / "run")
    monkeypatch.setenv("DELTAWIRE_RUN", url)
    buckets = []

    def opened(location, **options):
        quick = RetryPolicy(retries=0)
        buckets.append(FaultyBucket(open_bare_bucket(location, **options)))
        return RetryingBucket(buckets[-1], quick)

    monkeypatch.setattr("deltawire.slime.open_bucket", opened)
    for number in range(1, 6):
        path = write_directory(tmp_path / f"weight_v{number:06d}", number)
        if number == 2:
            buckets[0].fail(times=None)
        if number == 4:
            buckets[0].heal()
        if number == 5:
            buckets[0].fail(times=None)
        with caplog.at_level(logging.WARNING):
            done = deltawire.slime.publish(None, path, [])
        shutil.rmtree(path)
        assert (done is None) == (number in (2, 3, 5))
    assert newest(url) == (1, contents(4))
    assert "not committed yet" in caplog.text
    buckets[0].heal()
    deltawire.slime.close()
    assert newest(url) == (2, contents(5))
    assert not (tmp_path / deltawire.slime.KEPT).exists()


def test_what_a_killed_process_kept_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DELTAWIRE_RUN", str(tmp_path / "run"))
    write_directory(tmp_path / deltawire.slime.KEPT / "weight_v000004", 4)
    path = write_directory(tmp_path / "weight_v000001", 1)
    with caplog.at_level(logging.WARNING):
        assert deltawire.slime.publish(None, path, []).version == 0
    assert "weight_v000004 was not committed" in caplog.text
    assert not (tmp_path / deltawire.slime.KEPT).exists()
