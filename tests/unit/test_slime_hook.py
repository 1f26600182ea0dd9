"""slime's hook, called as its source calls it: on every rank, with a directory that is removed."""

import shutil
from types import SimpleNamespace

import pytest
from checkpoint_dirs import contents, write_directory

import deltawire.slime
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run


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
        mirror = load_mirror(open_bucket(url), read_run(open_bucket(url)), at=number - 1)
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
