"""``pull --follow`` warns of a manifest that it passes over: once, until another one comes."""

import time
from types import SimpleNamespace

import pytest
import torch

from deltawire.launch import pull
from deltawire.store import open_bucket
from deltawire.sync import open_publisher
from deltawire.wire import keys


def test_a_manifest_that_cannot_be_read_is_reported_once(tmp_path, monkeypatch, capsys):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    publisher = open_publisher(bucket, {"a": torch.zeros(64, dtype=torch.bfloat16)})
    publisher.publish({"a": torch.ones(64, dtype=torch.bfloat16)})
    publisher.close()
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            bucket.put(keys.manifest(2), b"junk")
        if len(pauses) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(pull, "time", SimpleNamespace(**vars(time) | {"sleep": pause}))
    with pytest.raises(KeyboardInterrupt):
        pull.pull_directory(bucket.url, tmp_path / "out", follow=True)
    written = capsys.readouterr().err
    assert written.count("warning: passed over a manifest") == 1
    assert keys.manifest(2) in written
