"""``RUN@V``: a run and one of its versions."""

import json
import sys

import pytest

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.launch.branches.version_names import VersionName, open_version
from deltawire.runtime.trusted import ANY
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, start_run, weights

CHECK = "import os, sys; sys.exit(int(os.environ['DELTAWIRE_VERSION']) >= 2)"


@pytest.mark.parametrize(
    ("text", "location", "version"),
    [
        ("runs/a@12", "runs/a", 12),
        ("s3://bucket/run@0", "s3://bucket/run", 0),
        ("s3://bucket/run", "s3://bucket/run", None),
        ("runs/a@b@7", "runs/a@b", 7),
        ("runs/a@7/lines/x", "runs/a@7/lines/x", None),
        ("@7", "@7", None),
        ("a@", "a@", None),
    ],
)
def test_the_last_number_is_the_version(text, location, version):
    assert VersionName.parse(text) == (location, version, None)


def test_a_folder_whose_name_ends_in_a_number_is_a_run(tmp_path):
    folder = tmp_path / "run@3"
    folder.mkdir()
    assert VersionName.parse(str(folder)) == (str(folder), None, None)
    assert VersionName.parse(f"{folder}@4") == (str(folder), 4, None)


def test_without_a_number_the_newest_version_is_meant(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    start_run(bucket)
    with pytest.raises(InputError, match="no version yet"):
        open_version(bucket.url, ANY)
    with start_publisher(bucket) as publisher:
        publisher.publish(weights(0))
        publisher.publish(weights(1))
    assert open_version(bucket.url, ANY)[2] == 1
    assert open_version(f"{bucket.url}@0", ANY)[2] == 0


def test_a_version_is_given_once(tmp_path, capsys):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with start_publisher(bucket) as publisher:
        for version in range(3):
            publisher.publish(weights(version))
            publisher.flush()
    assert main(["pull", f"{bucket.url}@1", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model").readlink().name == "0000000001"
    assert main(["pull", f"{bucket.url}@1", str(tmp_path / "model"), "--version", "1"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_a_tag_is_taken_where_a_version_is(tmp_path, capsys):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with start_publisher(bucket) as publisher:
        for version in range(4):
            publisher.publish(weights(version))
            publisher.flush()
    for version, name in ((0, "good"), (3, "bad")):
        assert main(["tag", f"{bucket.url}@{version}", name]) == 0
    state = ["--state", str(tmp_path / "state"), "--json", "--", sys.executable, "-c", CHECK]
    capsys.readouterr()
    assert main(["bisect", bucket.url, "--good", "good", "--bad", "bad", *state]) == 0
    assert json.loads(capsys.readouterr().out)["culprit"] == 2
    assert main(["bisect", bucket.url, "--good", "bad", "--bad", "good", *state]) == 2
    assert "--good 3 is not below --bad 0" in capsys.readouterr().err
    assert main(["bisect", bucket.url, "--good", "-", "--bad", "bad", *state]) == 2
    assert "neither a version nor a tag" in capsys.readouterr().err
    for command in (["rollouts"], ["parity"], ["live", "promote"], ["live", "canary"]):
        words = ["--share", "0.1"] if "canary" in command else []
        assert main([*command, f"{bucket.url}@bad", "--version", "3", *words]) == 2
        assert "exclude each other" in capsys.readouterr().err
        assert main([*command, f"{bucket.url}@missing", *words]) == 2
        assert "missing" in capsys.readouterr().err
