"""Describes how a published directory lays its tensors out in safetensors files.

A layout holds the files' headers unchanged, so that followers can write files that equal the
published ones byte for byte. It is stored as one more model file. Because it comes from an
untrusted bucket, file names must be single path components, and the headers are compared with the
run's table before any file is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.codec import ITEMSIZE
from deltawire.errors import CorruptError
from deltawire.sync.publish.model_files import portable_name
from deltawire.sync.publish.safetensors_files import MAX_HEADER_BYTES
from deltawire.wire.objects import FORMAT, decode_json, prepared
from deltawire.wire.run import Run, TensorSpec

MAX_WEIGHT_FILES = 1 << 14
SUFFIX = ".safetensors"
METADATA = "__metadata__"

_OBJECT = re.compile(rb'(?<!\\)"\s*:\s*\{')
"""A member of a header whose value is an object; in a string the quotation mark is escaped."""


class WeightFile(msgspec.Struct, frozen=True):
    """One safetensors file: its name and the text of its header, trailing blanks included."""

    name: Annotated[str, Meta(max_length=128)]
    header: Annotated[str, Meta(max_length=MAX_HEADER_BYTES)]


class SafetensorsLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All safetensors files of a directory."""

    format: int = FORMAT
    files: Annotated[list[WeightFile], Meta(max_length=MAX_WEIGHT_FILES)]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a header; without any of these, it is the metadata."""

    dtype: str = ""
    shape: Annotated[tuple[int, ...], Meta(max_length=16)] = ()
    data_offsets: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The bytes of a tensor in its file.

    ``name`` is its name in the file, ``stored`` its name in the run: the two differ if the run
    stores it under the name of a tied tensor.
    """

    name: str
    stored: str
    begin: int
    end: int


@dataclass(frozen=True)
class FilePlan:
    """A file to write: ``prefix``, then the tensors, ``bytes`` in all."""

    name: str
    prefix: bytes
    spans: tuple[TensorSpan, ...]
    bytes: int


def encode_layout(layout: SafetensorsLayout) -> bytes:
    """Encodes the content of the model file."""
    return msgspec.json.encode(layout) + b"\n"


def plan_files(layout: SafetensorsLayout, table: Run) -> list[FilePlan]:
    """Plans the files that a layout describes.

    Raises `CorruptError` unless together they hold every tensor of the run once (under its own name
    or that of one tied to it, or both), in its shape and dtype, without a gap.
    """
    names = [file.name.casefold() for file in layout.files]
    if len(set(names)) != len(names):
        raise CorruptError("layout: two file names differ at most in case")
    specs = {spec.name: spec for spec in table.tensors}
    plans = [_plan(file, specs, table.aliases) for file in layout.files]
    written = [span.name for plan in plans for span in plan.spans]
    if len(set(written)) != len(written):
        raise CorruptError("layout: a tensor occurs twice")
    stored = {span.stored for plan in plans for span in plan.spans}
    if absent := sorted(specs.keys() - stored):
        raise CorruptError(f"layout: tensor {absent[0][:80]!r} is missing")
    return plans


def decode_layout(data: bytes, *, table: Run, run: str, key: str) -> list[FilePlan]:
    """Parses a layout and compares it with the run's table; raises `CorruptError`."""
    layout = decode_json(data, SafetensorsLayout, run=run, key=key)
    if layout.format != FORMAT:
        raise CorruptError(f"layout: format {layout.format}", run=run, key=key)
    try:
        return plan_files(layout, table)
    except CorruptError as error:
        raise CorruptError(error.message, run=run, key=key) from error


def default_layout(table: Run) -> SafetensorsLayout:
    """Lays out all tensors in one file, in the order of the table, for a run without directories.

    Tied tensors are written under each of their names, because loaders differ in which one they
    need.
    """
    specs = {spec.name: spec for spec in table.tensors}
    tied = {name: specs[table.aliases[name]] for name in sorted(table.aliases)}
    return SafetensorsLayout(files=[weight_file("model" + SUFFIX, {**specs, **tied})])


def weight_file(name: str, tensors: Mapping[str, TensorSpec]) -> WeightFile:
    """Lays out tensors in one file, in this order, under the names that they are given here."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for written, spec in tensors.items():
        end = at + spec.count * ITEMSIZE[spec.dtype]
        entries[written] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    return WeightFile(name, text + " " * (-len(text.encode()) % 8))


def _plan(file: WeightFile, specs: dict[str, TensorSpec], aliases: dict[str, str]) -> FilePlan:
    if not portable_name(file.name) or not file.name.endswith(SUFFIX):
        raise CorruptError(f"layout: {file.name[:80]!r} is not a valid name of a safetensors file")
    header = file.header.encode()
    prefix = len(header).to_bytes(8, "little") + header
    # Counted before any is decoded: a few bytes of JSON become a hundred bytes of objects.
    if sum(1 for _ in _OBJECT.finditer(header)) > len(specs) + len(aliases) + 1:
        raise CorruptError(f"layout: {file.name} has more tensors than the run")
    try:
        entries = msgspec.json.decode(header, type=prepared(dict[str, _Entry]))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"layout: {file.name} has a damaged header") from error
    del header
    entries.pop(METADATA, None)
    spans, at = [], 0
    for name in sorted(entries, key=lambda name: (entries[name].data_offsets or (0, 0), name)):
        entry = entries[name]
        stored = name if name in specs else aliases.get(name, "")
        spec = specs.get(stored)
        if spec is None:
            raise CorruptError(f"layout: the run has no tensor {name[:80]!r}")
        if entry.dtype != spec.dtype or entry.shape != spec.shape:
            raise CorruptError(f"layout: tensor {name[:80]!r} differs from the run's")
        if entry.data_offsets is None:
            raise CorruptError(f"layout: tensor {name[:80]!r} states no bytes")
        begin, end = entry.data_offsets
        if begin != at or end - begin != spec.count * ITEMSIZE[spec.dtype]:
            raise CorruptError(f"layout: tensor {name[:80]!r} leaves a gap or overlaps another")
        spans.append(TensorSpan(name, stored, len(prefix) + begin, len(prefix) + end))
        at = end
    return FilePlan(file.name, prefix, tuple(spans), len(prefix) + at)
