"""Commands start on every installation that the README and the tutorial prescribe."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from documents import ROOT

from deltawire.cli.exit_codes import UNFIT
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher

PROGRAM = Path(__file__).parents[1] / "support/installation.py"


def command(extras, *words):
    return [sys.executable, str(PROGRAM), extras, *words]


def test_the_documents_prescribe_what_is_tested_here():
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/TUTORIAL.md")]
    found = re.findall(r"pip install '?deltawire(?:\[([\w,]+)\])?", "\n".join(texts))
    assert {*found} <= {"", "rl"}


@pytest.mark.parametrize("extras", ["", "rl"])
def test_doctor_starts(extras):
    done = subprocess.run(
        command(extras, "doctor", "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, UNFIT), done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    missing = "lacks" in found["[rl]"]["found"]
    assert missing == (not extras)
    assert found["vLLM"]["status"] in ("ok", "note")


def test_watch_serves_its_page_with_the_extra_of_the_tutorial(tmp_path):
    start_publisher(open_bucket(tmp_path)).close()
    words = command("rl", "watch", str(tmp_path), "--no-browser", "--cache", f"{tmp_path}/cache")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as served:
        try:
            link = served.stdout.readline()
            with urllib.request.urlopen(link.partition("#")[0]) as page:
                assert b"deltawire" in page.read()
        finally:
            served.terminate()
    assert served.returncode == 0


def test_without_aiohttp_watch_names_the_extra():
    done = subprocess.run(
        command("", "watch", "runs/none"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: this command needs aiohttp; install deltawire[serve]\n"
