"""The screens before and after the demo: they fit, and name commands that exist."""

import re
import shlex

import pytest
from documents import ROOT

from deltawire.cli.main import build_parser


@pytest.mark.parametrize("name", ["opening", "ending"])
def test_a_screen_fits_a_terminal(name):
    lines = (ROOT / "examples" / f"demo-{name}.txt").read_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_ending_names_three_commands_that_exist():
    text = (ROOT / "examples" / "demo-ending.txt").read_text()
    commands = re.findall(r"^ +\.venv/bin/deltawire (.+)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        build_parser().parse_args(shlex.split(command))


def test_make_shows_both():
    makefile = (ROOT / "Makefile").read_text()
    opening, ending = (makefile.index(f"demo-{name}.txt") for name in ("opening", "ending"))
    assert opening < makefile.index("run examples/demo.toml") < ending
