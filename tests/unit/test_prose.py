"""Docstrings and comments are plain technical English: a few phrases that never are."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Docstrings of subjects.py are problem statements, which name the tasks of recorded runs.
SOURCES = sorted(
    path
    for folder in ("src", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "subjects.py"
)
NEVER = re.compile(r"\b(?:beside|anew|whence|lest|by and by|mend|his|himself)\b", re.IGNORECASE)
OPENING = re.compile(r"(?:^|(?<=[.!?] ))(?:What|Whether|Who|Whom)\b[^.?]*(?:[.]|$)")
"""A sentence that begins like a question and does not end as one."""


def prose(source):
    """Docstrings and comments of a file, each as one line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                yield " ".join(str(one.value.value).split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_prose_has_no_phrase_that_reads_like_a_translation(path):
    texts = list(prose(path.read_text()))
    found = [match[0] for text in texts for match in NEVER.finditer(text)]
    found += [match[0] for text in texts for match in OPENING.finditer(text)]
    assert not found


def test_the_patterns_find_what_they_are_for():
    assert OPENING.search("Reads a run. What is older waits.")
    assert not OPENING.search("What is measured?")
    assert NEVER.search("Starts anew.")
