"""``deltawire tag``, and commands that take a tag in place of a number."""

import json

import msgspec
import pytest

from deltawire.cli.main import main
from deltawire.errors import InputError, SignatureError
from deltawire.launch.branches.version_names import VersionName, open_version
from deltawire.runtime.trusted import ANY
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.sync.chain.tags import add_tag, find_tag
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer


@pytest.fixture
def run_url(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with start_publisher(bucket) as publisher:
        for version in range(3):
            publisher.publish(weights(version))
            publisher.flush()
    return bucket.url


def test_a_tag_is_made_listed_followed_and_removed(run_url, tmp_path, capsys):
    assert main(["tag", f"{run_url}@1", "best", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], made["version"], made["removed"]) == ("best", 1, False)
    assert main(["tag", run_url, "last"]) == 0
    assert main(["tag", run_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["best: version 1", "last: version 2"]
    assert open_version(f"{run_url}@best", ANY)[2] == 1
    assert main(["pull", f"{run_url}@best", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model").readlink().name == "0000000001"
    assert main(["show", f"{run_url}@best", "--json"]) == 0
    assert main(["tag", run_url, "best", "--delete"]) == 0
    assert "removed from version 1" in capsys.readouterr().out
    assert main(["show", f"{run_url}@best"]) == 2
    assert "no tag best" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["RUN@1", "best", "--delete"], ["RUN@1"], ["RUN", "--delete"], ["RUN@1", "12"]]
)
def test_wrong_words(run_url, words, capsys):
    assert main(["tag", *[word.replace("RUN", run_url) for word in words]]) == 2
    assert "error" in capsys.readouterr().err.lower()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("runs/a@best", ("runs/a", None, "best")),
        ("s3://bucket/run@v1-final", ("s3://bucket/run", None, "v1-final")),
        ("s3://user@bucket/run", ("s3://user@bucket/run", None, None)),
        ("runs/a@b.c", ("runs/a@b.c", None, None)),
    ],
)
def test_a_word_after_the_last_sign_is_a_tag(text, found):
    assert VersionName.parse(text) == found


def test_a_folder_whose_name_ends_in_a_word_is_a_run(tmp_path):
    folder = tmp_path / "run@best"
    folder.mkdir()
    assert VersionName.parse(str(folder)) == (str(folder), None, None)


def test_tags_of_a_signed_run_are_signed():
    signer, bucket = Ed25519Signer(bytes(range(32))), open_bucket("memory://")
    run = msgspec.structs.replace(start_run(open_bucket("memory://")), public_key=signer.public_key)
    create_run(bucket, run, signer=signer)
    with start_publisher(bucket, signer=signer) as publisher:
        publisher.publish(weights(0))
    with pytest.raises(InputError, match="signed with another key"):
        add_tag(bucket, run, 0, "best")
    tag = add_tag(bucket, run, 0, "best", signer=signer)
    assert find_tag(bucket, run, "best") == tag
    # A signed tag is valid at its own key only, or a writer could point a name elsewhere.
    bucket.put(keys.tag("other"), bucket.get(keys.tag("best"), limit=1 << 12))
    with pytest.raises(SignatureError):
        find_tag(bucket, run, "other")
