"""Each `except CorruptError` where something may be deleted says why going on is safe."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import deltawire

PLACES = ("sync/maintain", "sync/chain/retention.py", "runtime", "live", "train")
DAMAGE = {"CorruptError", "SignatureError", "ResyncError"}
SOURCES = [
    path
    for place in (Path(deltawire.__file__).parent / name for name in PLACES)
    for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
]


def names_of(node):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node else set()


def unexplained(source):
    """The lines at which damage is caught without a comment directly within the block."""
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "noqa" not in token.string
    }
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = names_of(node.type)
        elif isinstance(node, ast.With):
            calls = [one.context_expr for one in node.items]
            caught = set().union(*(names_of(c) for c in calls if "suppress" in ast.unparse(c)))
        else:
            continue
        first = node.body[0]
        within = range(node.lineno, (first.end_lineno or first.lineno) + 1)
        raises = isinstance(node.body[-1], ast.Raise) and len(node.body) == 1
        if caught & DAMAGE and not raises and not comments & set(within):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path)[-40:])
def test_each_place_that_goes_on_after_damage_says_why(path):
    lines = unexplained(path.read_text())
    assert not lines, f"{path}: say in a comment why going on is safe, at lines {lines}"


def test_the_check_notices():
    bare = "try:\n    f()\nexcept {}:\n    {}\n"
    assert unexplained(bare.format("CorruptError", "pass")) == [3]
    assert unexplained(bare.format("(OSError, CorruptError) as error", "x = 1")) == [3]
    assert unexplained("with contextlib.suppress(CorruptError):\n    f()\n") == [1]
    assert unexplained(bare.format("CorruptError", "pass  # A view only.")) == []
    assert unexplained(bare.format("CorruptError", "# A view only.\n    pass")) == []
    assert unexplained(bare.format("CorruptError as e", "raise InputError() from e")) == []
    assert unexplained(bare.format("OSError", "pass")) == []
    assert len(SOURCES) > 60
