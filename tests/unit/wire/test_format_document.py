"""The format's documents: numbered rules with tests that exist, tables and vectors of the code."""

import ast
import json
import re
from pathlib import Path

import format_schema
import msgspec
import numpy as np
import pytest

from deltawire import codec
from deltawire.testing import reader
from deltawire.wire import manifest, payload, piece_table, run
from deltawire.wire.coordination import DeletionIntent, Part, RetentionFloor
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import PayloadRef, TableRef
from deltawire.wire.run import Run
from deltawire.wire.seal import seal_json
from deltawire.wire.signing import Ed25519Signer

ROOT = Path(__file__).parents[3]
TEXTS = {name: (ROOT / "docs" / name).read_text() for name in ("FORMAT.md", "FORMAT-PROTOCOL.md")}
TEXT = TEXTS["FORMAT.md"]


def split(name):
    """A document's text, and its appendix by rule."""
    body, _, appendix = TEXTS[name].partition("## Appendix: rules and tests")
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", appendix, re.MULTILINE)
    return body, {rule: re.findall(r"`([^`]+)`", tests) for rule, tests in rows}


@pytest.mark.parametrize("name", TEXTS)
def test_every_rule_has_a_number_and_tests_that_exist(name):
    body, tests = split(name)
    rules = re.findall(r"^- \*\*([A-Z])(\d+)\*\* ", body, re.MULTILINE)
    for letter in {letter for letter, _ in rules}:
        numbers = [int(number) for which, number in rules if which == letter]
        assert numbers == list(range(1, len(numbers) + 1)), f"the rules {letter} in order"
    assert {letter + number for letter, number in rules} == tests.keys()
    assert len(rules) > 30
    for rule, named in tests.items():
        assert named, rule
        for each in named:
            path, _, function = each.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not function or function in found, each


@pytest.mark.parametrize("name", TEXTS)
def test_what_must_be_is_a_numbered_rule(name):
    body, _ = split(name)
    bare = [
        block
        for block in re.split(r"\n(?=\n|- )", body)
        if "*must" in block and not re.match(r"\n?- \*\*[A-Z]\d+\*\* ", block)
    ]
    assert [block for block in bare if "*Must* and *must not* are rules" not in block] == []


def test_limits_are_those_of_the_code():
    assert run.MAX_RUN_BYTES == payload.MAX_TABLE_BYTES == 1 << 26
    assert run.MAX_TENSORS == payload.MAX_BLOBS == 1 << 18
    assert run.MAX_ELEMENTS == 1 << 48
    assert run.MAX_CHUNKS == payload.MAX_PIECES == 1 << 20
    assert run.MAX_CONFIG_BYTES == manifest.MAX_METADATA_BYTES == 1 << 20
    assert (manifest.MAX_MANIFEST_BYTES, payload.MAX_BLOB_BYTES) == (1 << 21, 1 << 36)
    assert payload.INLINE_BYTES == 12_288
    table = (piece_table.SEGMENT_PIECES, piece_table.PAGE_SEGMENTS, piece_table.SEGMENT_BLOBS)
    assert table == (32, 16, 8)
    for limit in ("2^26", "2^18", "2^48", "2^20", "2^21", "2^36", "12,288", "⌈n / 32⌉ / 16⌉"):
        assert limit in TEXT
    assert "32 pieces each" in TEXT
    assert "8 blobs each" in TEXT


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        (Run, "## run.json"),
        (Manifest, "## Manifests"),
        (CompactedDelta, "## Compacted deltas"),
        (PayloadRef, "## Payloads"),
        (TableRef, "| member of `table`"),
    ],
)
def test_member_tables_are_those_of_the_code(kind, section):
    """Every member has a row, and a default if and only if it has one in the code."""
    table = TEXT[TEXT.index(section) :]
    rows = re.findall(r"^\| (`[^|]+`) \|[^|]+\|([^|]*)\|", table, re.MULTILINE)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    defaults = {}
    for names, default in rows:
        for name in re.findall(r"`(\w+)`", names):
            defaults.setdefault(name, default.strip())
    assert fields.keys() <= defaults.keys()
    if kind is CompactedDelta:
        return  # Its row of common members refers to the manifest's.
    for name, field in fields.items():
        drawn = name == "id"  # Drawn at random by the writer, required of what is read.
        assert (defaults[name] != "") == (not field.required and not drawn), name


def test_dtypes_are_those_of_the_code():
    section = TEXT[TEXT.index("| dtype | bits |") : TEXT.index("Names are those of safetensors")]
    rows = re.findall(r"^\| ([A-Z][^|]+) \| (\d+) \| ([^|]+) \|$", section, re.MULTILINE)
    found = {name: int(bits) for names, bits, _ in rows for name in names.split(", ")}
    assert found == {name: 8 * size for name, size in codec.ITEMSIZE.items()} == reader.WIDTHS
    floats = {name for names, _, how in rows for name in names.split(", ") if "float" in how}
    assert floats == set(codec.delta.LAYOUTS)


def test_the_schema_is_that_of_the_code():
    text = format_schema.PATH.read_text()
    assert text == format_schema.schema(), "run tests/support/format_schema.py"
    for kind in (Part, RetentionFloor, DeletionIntent):
        assert kind.__name__ in json.loads(text)["$defs"]


def test_the_vectors_are_those_of_the_code():
    bits = np.array([0x3F80, 0, 0xBF80], "u2")
    digests = [codec.digest_bits("w", bits[i : i + 1], i).hex() for i in range(3)]
    for digest in (*digests, codec.digest_bits("w", bits).hex()):
        assert f"`{digest}`" in TEXT
    assert hex(codec.tensor_key("w")) in TEXT
    signer = Ed25519Signer(bytes(range(32)))
    key = "weights/retention-floors/0000000003.json"
    body = b'{"format":1,"run":"%s","version":3}' % (b"ab" * 16)
    assert seal_json(body, key=key, signer=signer).decode() in TEXT
    assert f"`{signer.public_key}`" in TEXT
    assert f"`{key}`" in TEXT
    base = (0x3C00 + np.arange(40)).astype("u2")
    target = base.copy()
    target[3] += 1
    target[17] -= 5
    delta = codec.encode(base, target, dtype="BF16", columns=8)
    hexed = "".join(re.findall(r"```\n(44574431[0-9a-f \n]+)```", TEXT)).split()
    assert "".join(hexed) == delta.hex()
