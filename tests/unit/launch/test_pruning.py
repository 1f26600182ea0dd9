"""``deltawire prune`` deletes old versions, and so does a publisher with ``retain``."""

import json

import numpy as np
import pytest

import deltawire
from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import committed_versions, load_mirror, read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run


def weights(version):
    return {"w": np.full(1000, version, np.float32)}


def publish(url, count, **options):
    with deltawire.open_publisher(url, weights(0), anchor_every=2, **options) as publisher:
        for version in range(1, count):
            publisher.publish(weights(version), wait=True)
            publisher.wait_for_anchor()


def pruned(url):
    bucket = open_bucket(url)
    run = read_run(bucket)
    return [read_manifest(bucket, run, v).pruned for v in committed_versions(bucket)]


def test_prune_keeps_the_newest_versions(tmp_path, capsys):
    url = str(tmp_path / "run")
    publish(url, 8)
    options = [url, "--retain", "3", "--grace", "0"]
    assert main(["prune", *options, "--json", "--dry-run"]) == 0
    assert pruned(url) == [False] * 8
    capsys.readouterr()
    assert main(["prune", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["newest"], found["floor"], found["pruned_below"]) == (7, 4, 4)
    assert found["bytes"] > 0
    assert main(["prune", *options]) == 0
    assert "versions from 4 on are readable" in capsys.readouterr().out
    bucket = open_bucket(url)
    assert pruned(url) == [True] * 4 + [False] * 4
    assert load_mirror(bucket, read_run(bucket), at=5).tensors["w"].view(np.float32)[0] == 5
    assert check_run(bucket).faults == []
    assert main(["prune", str(tmp_path), "--retain", "3"]) == 2


def test_a_publisher_retains_what_it_is_told(tmp_path):
    url = str(tmp_path / "run")
    publish(url, 9, retain=2, grace_s=0.0)
    kept = pruned(url)
    assert kept[0]
    assert not any(kept[-2:])
    assert check_run(open_bucket(url)).faults == []
    with pytest.raises(InputError, match="retain=-1"):
        publish(str(tmp_path / "other"), 1, retain=-1)


def test_an_unknown_option_is_refused_before_a_run_is_made(tmp_path):
    with pytest.raises(InputError, match="no option 'bogus'"):
        publish(str(tmp_path / "run"), 1, bogus=1)
    assert not (tmp_path / "run").exists()
