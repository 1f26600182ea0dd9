"""Writes and reads snapshots in the layout that hosted providers hot-load.

The layout is Fireworks' (docs.fireworks.ai, "RL rollout delta checkpoints"): a full snapshot is a
directory of safetensors files and ``model.weight.spec.json``; an incremental one has the same
files, in which each tensor is the arc_v2 code (XOR, zstd) of its changes since another snapshot,
with an Adler-32 of the result. The provider's package encodes and decodes it. arc_v3 is not
supported: its envelope is a pickle.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync import Checkout
from deltawire.sync.huggingface.checkpoint_dir import read_checkpoint, weight_files
from deltawire.sync.huggingface.safetensors_layout import (
    FilePlan,
    SafetensorsLayout,
    plan_files,
)
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.wire.run import Run

FORMAT = "arc_v2"
SPEC = "model.weight.spec.json"


class Snapshot(msgspec.Struct, frozen=True):
    """The body of the provider's hot-load request for a snapshot."""

    identity: str
    incremental_snapshot_metadata: dict[str, str] | None = None


def export_snapshot(
    bucket: Bucket,
    run: Run,
    version: int,
    folder: Path,
    *,
    base: int | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Snapshot:
    """Writes ``version`` as a snapshot to ``folder``: whole, or as a delta to that of ``base``.

    Snapshots are named after the run and the version; ``log`` gets a line for each step. Raises
    `InputError` if the folder exists or the package is missing, `CorruptError` if a version cannot
    be read.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already", hint="name a new folder")
    library: Any = None if base is None else _library()
    work = folder.parent / f".{folder.name}.export"
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    work.mkdir(mode=0o700)
    try:
        target = _write(bucket, run, version, work / "target", log)
        if base is not None:
            source = _write(bucket, run, base, work / "base", log)
            if weight_files(source) != weight_files(target):
                raise InputError(
                    f"versions {base} and {version} have different files, unlike a delta",
                    hint="export the version whole",
                )
            for name in weight_files(target):
                log(f"coding {name}")
                library.delta_compress_files_to_file(
                    src=str(source / name),
                    dst=str(target / name),
                    diff_file=str(work / "delta.safetensors"),
                    compression_format=FORMAT,
                )
                (work / "delta.safetensors").replace(target / name)
        _write_spec(run, target)
        target.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if base is None:
        return Snapshot(snapshot_identity(run, version))
    metadata = {
        "previous_snapshot_identity": snapshot_identity(run, base),
        "compression_format": FORMAT,
        "checksum_format": "alder32",  # The provider's spelling.
    }
    return Snapshot(snapshot_identity(run, version), metadata)


def import_snapshot(snapshot: Path, base: Path, folder: Path) -> None:
    """Applies an incremental ``snapshot`` to its ``base`` directory and writes the whole result to
    ``folder``, in the base's file layout, ready to be published.

    Use it only for snapshots of a trusted provider: its package does not limit the size of the
    unpacked data. Raises `InputError` if snapshot and base do not fit, `CorruptError` if a checksum
    is wrong.
    """
    library = _library()
    if folder.exists():
        raise InputError(f"{folder} exists already", hint="name a new folder")
    old = read_checkpoint(base)
    layout = msgspec.json.decode(old.files[LAYOUT], type=SafetensorsLayout)
    table = Run(id="0" * 32, name="", created_at=0.0, tensors=old.specs, digest="0" * 32)
    work = folder.parent / f".{folder.name}.import"
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    work.mkdir(mode=0o700)
    try:
        for plan in plan_files(layout, table):
            if not (snapshot / plan.name).is_file():
                raise InputError(f"{snapshot} lacks {plan.name}, which the base has")
            _apply(library, plan, snapshot / plan.name, base / plan.name, work / plan.name)
        for name, data in old.files.items():
            if (snapshot / name).is_file():
                (work / name).write_bytes((snapshot / name).read_bytes())
            elif name != LAYOUT:
                (work / name).write_bytes(data)
        (work / SPEC).unlink(missing_ok=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _apply(library: Any, plan: FilePlan, diff: Path, base: Path, into: Path) -> None:
    import torch
    from safetensors.torch import load_file

    try:
        with warnings.catch_warnings():
            # The package wraps read-only bytes in a tensor, but does not write to it.
            warnings.simplefilter("ignore", UserWarning)
            new = library.delta_decompress_dict_from_file(
                src=load_file(base), diff_file=str(diff), compression_format=FORMAT
            )
    except Exception as error:  # the package raises any error of its dependencies
        raise CorruptError(f"{diff} does not fit {base}: {error}") from error
    with into.open("wb") as file:
        file.write(plan.prefix)
        for place in plan.spans:
            tensor = new[place.name].contiguous().reshape(-1)
            data = tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            if len(data) != place.end - place.begin:
                raise CorruptError(
                    f"{diff}: tensor {place.name[:80]!r} differs in size from the base's"
                )
            file.write(data)


def _write(
    bucket: Bucket, run: Run, version: int, folder: Path, log: Callable[[str], None]
) -> Path:
    """Writes a version's directory with files that are not shared."""
    log(f"reading version {version}")
    link = folder.with_suffix(".pulled")
    with Checkout(bucket, run, link) as checkout:
        checkout.bring_to(version)
    link.resolve().rename(folder)
    return folder


def _write_spec(run: Run, folder: Path) -> None:
    tensors = {spec.name: {"shape": spec.shape, "dtype": spec.dtype} for spec in run.tensors}
    (folder / SPEC).write_text(json.dumps({"tensor_map": tensors}), encoding="utf-8")


def snapshot_identity(run: Run, version: int) -> str:
    """Returns the name under which a version is exported and hot-loaded: one segment of a path."""
    name = "".join(letter if letter.isalnum() else "-" for letter in run.name) or "run"
    return f"{name}-{run.id[:8]}-{version:010d}"


def snapshot_version(run: Run, identity: str) -> int:
    """Returns the version that an identity names; a bare number names a version too.

    Raises `InputError` for any other identity.
    """
    prefix, _, digits = identity.rpartition("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 18:
        version = int(digits)
        if not prefix or identity == snapshot_identity(run, version):
            return version
    raise InputError(
        f"{identity[:256]!r} is not a snapshot of this run",
        hint=f"name a version as {snapshot_identity(run, 0)}, or by its number",
    )


def _library() -> Any:
    try:
        import fireworks_delta_compression
    except ImportError as error:
        raise InputError(
            "incremental snapshots need the package fireworks-delta-compression",
            hint="pip install 'deltawire[hosted]'",
        ) from error
    return fireworks_delta_compression
