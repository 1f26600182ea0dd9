"""The script of a user's first hour skips documented commands only, and parses them."""

import runpy
import shlex

import pytest
from documents import ROOT, blocks, commands

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "first_hour.py"))


def test_every_skipped_command_is_in_the_documents():
    shown = {
        shlex.join(command)
        for block in blocks("sh")
        if block.path in [ROOT / name for name in SCRIPT["DOCUMENTS"]]
        for command in commands(block.text)
    }
    assert SCRIPT["SKIPPED"].keys() <= shown


def test_a_mistake_in_a_skipped_command_is_noticed(monkeypatch):
    for line in SCRIPT["SKIPPED"]:
        assert SCRIPT["run_command"](None, shlex.split(line)).startswith("skipped: ")
    wrong = "deltawire show runs/spoiled/bucket@87 --answer"
    monkeypatch.setitem(SCRIPT["SKIPPED"], wrong, "as an example")
    with pytest.raises(SCRIPT["FirstHourError"], match="--answer"):
        SCRIPT["run_command"](None, shlex.split(wrong))
