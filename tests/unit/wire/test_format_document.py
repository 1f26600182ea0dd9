"""The format's document: every test it names exists, and its limits are the code's."""

import ast
import re
from pathlib import Path

from deltawire.wire import manifest, payload, run

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "FORMAT.md").read_text()


def test_every_test_it_names_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT))
    assert len(named) > 35
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in found, f"{path}::{function}"


def test_every_rule_names_a_test_nearby():
    """A paragraph that says *must* has a test in it; the few that cannot are listed."""
    bare = [
        block
        for block in re.split(r"\n(?=\n|- |\d\. )", TEXT)
        if "*must" in block and "`tests/" not in block
    ]
    assert [block for block in bare if not block.strip().startswith("What lies in a bucket")] == []


def test_limits_are_those_of_the_code():
    assert run.MAX_RUN_BYTES == payload.MAX_TABLE_BYTES == 1 << 26
    assert run.MAX_TENSORS == payload.MAX_BLOBS == 1 << 18
    assert run.MAX_ELEMENTS == 1 << 48
    assert run.MAX_CHUNKS == payload.MAX_PIECES == 1 << 20
    assert run.MAX_CONFIG_BYTES == manifest.MAX_METADATA_BYTES == 1 << 20
    assert (manifest.MAX_MANIFEST_BYTES, payload.MAX_BLOB_BYTES) == (1 << 21, 1 << 36)
    for limit in ("2^26", "2^18", "2^48", "2^20", "2^21", "2^36"):
        assert limit in TEXT
