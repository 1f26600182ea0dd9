"""A training client makes and continues signed runs, and refuses those that it has no key of."""

import pytest
from signed_run import OWNER, STRANGER

from deltawire.config import BuildConfig
from deltawire.errors import CorruptError, InputError, SignatureError
from deltawire.export.models import save_model
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train import AdamParams, Datum, ModelInput, TrainingClient
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.wire import keys
from deltawire.wire.roles import Pin

SIZES = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
DATA = [Datum(ModelInput.from_ints([97, 98]), {"target_tokens": [98, 99], "weights": [1.0, 1.0]})]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    save_model(build_model(SIZES, seed=1), byte_tokenizer(), tmp_path / "model")
    OWNER.write(tmp_path / "owner.key")
    STRANGER.write(tmp_path / "stranger.key")
    return tmp_path


def step(client):
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-2))
    client.save_state().result()


def test_a_signed_run_is_made_continued_and_read(files):
    url = str(files / "bucket")
    with TrainingClient.create(url, files / "model", key=files / "owner.key") as client:
        step(client)
        pin = client.pin
    with TrainingClient.load(url, key=files / "owner.key", public_key=pin) as client:
        step(client)
        assert client.version == 2
    reader = open_trusted(url, ReaderTrust(Pin.parse(pin)))
    assert load_mirror(reader, read_run(reader, public_key=pin)).version == 2
    assert max(checkpoint_versions(reader)) == 2
    commit = keys.checkpoint_commit(2)
    open_bucket(url).put(commit, reader.get(commit, limit=1 << 20))
    with pytest.raises(SignatureError):
        reader.get(commit, limit=1 << 20)


def test_a_signed_run_is_refused_without_its_key(files):
    url = str(files / "bucket")
    TrainingClient.create(url, files / "model", key=files / "owner.key").close()
    with pytest.raises(InputError, match="the run is signed, and the trainer has no key"):
        TrainingClient.load(url)
    with pytest.raises(CorruptError, match="signed by another key"):
        TrainingClient.load(url, key=files / "stranger.key")
    with pytest.raises(InputError, match="a run exists here already"):
        TrainingClient.create(url, files / "model", key=files / "owner.key")


def test_a_key_is_refused_for_an_unsigned_run(files):
    url = str(files / "bucket")
    with TrainingClient.create(url, files / "model") as client:
        assert client.pin == ""
    with pytest.raises(CorruptError, match="the run is not signed"):
        TrainingClient.load(url, key=files / "owner.key")
