"""``bisect --serve``: the command gets the URL of an engine that swaps between versions."""

import json
import sys

import pytest

from deltawire.cli.main import main
from deltawire.errors import CorruptError
from deltawire.launch.branches import version_server
from deltawire.launch.branches.version_server import VersionServer
from deltawire.sync import load_mirror, read_manifest, read_run

CULPRIT = 3
COMMAND = """
import json, os, sys, urllib.request

url, version = sys.argv[1], int(os.environ["DELTAWIRE_VERSION"])
assert url == os.environ["OPENAI_BASE_URL"]
body = json.dumps({"model": "planted", "prompt": "ab", "max_tokens": 3, "temperature": 0}).encode()
headers = {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"
}
request = urllib.request.Request(url + "/completions", body, headers)
answer = json.load(urllib.request.urlopen(request, timeout=120))
with open(sys.argv[2], "a") as file:
    print(json.dumps([version, answer]), file=file)
sys.exit(version >= CULPRIT)
"""


def test_the_command_asks_each_version_by_its_url(planted, tmp_path, capsys):
    script, answers = tmp_path / "ask.py", tmp_path / "answers.jsonl"
    script.write_text(COMMAND.replace("CULPRIT", str(CULPRIT)))
    words = ["--good", "0", "--bad", "4", "--serve", "--state", str(tmp_path / "state"), "--json"]
    command = ["--", sys.executable, str(script), "{}", str(answers)]
    assert main(["bisect", planted.bucket.url, *words, *command]) == 0
    assert json.loads(capsys.readouterr().out)["culprit"] == CULPRIT
    asked = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [version for version, _ in asked] == [2, 3]
    assert not (tmp_path / "state" / "version").exists()  # Nothing is written to a directory.


def test_weights_are_those_of_each_version_forward_and_back(planted):
    run = read_run(planted.bucket)
    with VersionServer(planted.bucket, base=1) as server:
        for version in (3, 4, 2, 1, 4):
            server.bring_to(version)
            manifest = read_manifest(planted.bucket, run, version)
            assert server._weights.attest().hex() == manifest.digest
            assert server._engine.version == version


def test_a_version_that_cannot_be_read_leaves_the_one_that_is_served(planted):
    with VersionServer(planted.bucket, base=1) as server:
        server.bring_to(2)
        with pytest.raises(CorruptError):
            server.bring_to(99)
        assert server._weights.version == 2


class Broken:
    """An engine whose first use raises."""

    @property
    def active(self):
        raise ValueError("the engine failed")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before", "before the swap"])
def test_an_engine_that_ended_by_an_error_raises_it(planted, when, monkeypatch):
    with VersionServer(planted.bucket, base=1) as server:

        def end_by_an_error():
            server._engine = Broken()
            server._thread.join()

        def load_and_end(*given, **named):
            target = load_mirror(*given, **named)
            end_by_an_error()
            return target

        if when == "before":
            end_by_an_error()
        else:
            monkeypatch.setattr(version_server, "load_mirror", load_and_end)
        for version in (3, 1):
            with pytest.raises(ValueError, match="the engine failed"):
                server.bring_to(version)
