"""Reads the Hugging Face directories to publish: weights, their layout, and the other files.

`deltawire.sync.publish.model_files` says which other files are carried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import get_blob, put_blob
from deltawire.sync.follow.fetch import threads_of
from deltawire.sync.huggingface.safetensors_layout import (
    SUFFIX,
    FilePlan,
    SafetensorsLayout,
    WeightFile,
    decode_layout,
    default_layout,
    encode_layout,
    plan_files,
)
from deltawire.sync.publish.model_files import (
    INDEX,
    LAYOUT,
    MAX_FILE_BYTES,
    may_be_carried,
    other_files,
    portable_name,
)
from deltawire.sync.publish.safetensors_files import (
    MAX_HEADER_BYTES,
    CheckpointDirError,
    StoredTensor,
    safetensors_in,
)
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import MAX_MODEL_FILES, ModelFile, Run, TensorSpec

NO_FILES: Mapping[str, bytes] = MappingProxyType({})

MARKER = "STABLE"
"""An empty file that some trainers create last, to mark a directory as complete."""

DIGEST_ELEMENTS = 1 << 23
"""The number of elements that a thread reads and digests at a time."""

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors\Z")


@dataclass(frozen=True)
class Checkpoint:
    """A directory's tensors, by name, left in their files, and its other files.

    ``files`` includes the layout; ``left_out`` names the files that are not carried.

    Example::

        checkpoint = read_checkpoint(Path("outputs/checkpoint-100"))
        print(len(checkpoint.specs), checkpoint.digest().hex())
    """

    path: Path
    specs: list[TensorSpec]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, bytes]
    left_out: list[str]

    @property
    def bytes(self) -> int:
        """Return how many bytes its tensors hold."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def model_files(self) -> list[ModelFile]:
        """Lists the files as a run or a manifest does."""
        return [
            ModelFile(name, blake3(data).hexdigest(), len(data))
            for name, data in sorted(self.files.items())
        ]

    def digest(
        self, *, threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Digest:
        """Computes the digest of its weights in one pass; ``progress`` gets each number of bytes.

        Raises `CheckpointDirError` if a file is truncated meanwhile.
        """

        def one(part: tuple[str, int]) -> tuple[Digest, int]:
            name, at = part
            tensor = self.tensors[name]
            bits = tensor.read(at, min(DIGEST_ELEMENTS, tensor.size - at))
            return codec.digest_bits(name, bits, at), bits.nbytes

        parts = [
            (name, at)
            for name, tensor in self.tensors.items()
            for at in range(0, tensor.size, DIGEST_ELEMENTS)
        ]
        total = codec.ZERO
        with WorkerThreads(threads_of(threads), thread_name_prefix="digester") as pool:
            for digest, size in pool.map(one, parts):
                total += digest
                if progress is not None:
                    progress(size)
        return total


def read_checkpoint(path: Path, *, lent: Mapping[str, bytes] = NO_FILES) -> Checkpoint:
    """Reads a directory's headers and other files; ``lent`` are files that it may lack.

    Raises `CheckpointDirError` if it is not a complete Hugging Face directory, or could not be
    reproduced byte for byte.
    """
    try:
        return _read_checkpoint(path, lent)
    except CheckpointDirError:
        raise
    except InputError as error:
        raise CheckpointDirError(error.message, hint=error.hint) from error
    except OSError as error:
        raise CheckpointDirError(
            f"cannot read {path}: {error.strerror or error}", hint="is it still being written?"
        ) from error


def lent_files(folder: Path) -> dict[str, bytes]:
    """Reads the files of a model directory that others may lack: all that is carried but weights.

    Raises `InputError` if it has no config.json.
    """
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json", hint="--files takes a Hugging Face model directory"
        )
    weights = {file.name for file in folder.glob(f"*{SUFFIX}")}
    return other_files(folder, weights | {INDEX})[0]


def _read_checkpoint(path: Path, lent: Mapping[str, bytes]) -> Checkpoint:
    if not path.is_dir():
        raise InputError(f"there is no directory {path}", hint="is the path right?")
    names = weight_files(path)
    headers = [WeightFile(name, _header(path / name)) for name in names]
    found = safetensors_in([path / name for name in names])
    specs = sorted((tensor.spec for tensor in found), key=lambda spec: spec.name)
    layout = SafetensorsLayout(files=headers)
    try:
        plans = plan_files(
            layout, Run(id="0" * 32, name="", created_at=0.0, tensors=specs, digest="0" * 32)
        )
    except CorruptError as error:
        raise InputError(f"{path}: {error.message}") from error
    for plan in plans:
        if (path / plan.name).stat().st_size != plan.bytes:
            raise InputError(
                f"{path / plan.name} is not as long as its header says",
                hint="is it still being written?",
            )
    files, left_out = other_files(path, set(names))
    own = {name.casefold() for name in files}
    files |= {name: data for name, data in lent.items() if name.casefold() not in own}
    files[LAYOUT] = encode_layout(layout)
    if len(files) > MAX_MODEL_FILES:
        raise InputError(f"{path} has {len(files)} files; the limit is {MAX_MODEL_FILES}")
    left_out = [name for name in left_out if name != MARKER]
    return Checkpoint(path, specs, {tensor.spec.name: tensor for tensor in found}, files, left_out)


def weight_files(path: Path) -> list[str]:
    """Lists a directory's safetensors files in order: those of its index if it has one.

    Raises `InputError` if there are none, one is missing, a name is invalid, or numbered shards
    (``-00001-of-00004``) come without an index that names all of them.
    """
    index = path / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is not an index: {error}") from error
    else:
        names = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if not names:
        raise InputError(f"there are no safetensors files in {path}")
    if all(str(name).startswith("adapter_") for name in names):
        raise InputError(
            f"{path} holds an adapter but no base model",
            hint="merge it into its base, or publish from Python: deltawire.tensors_of(peft_model)",
        )
    for name in names:
        if not isinstance(name, str) or not portable_name(name) or not name.endswith(SUFFIX):
            raise InputError(
                f"{path}: {str(name)[:80]!r} is not a valid name of a safetensors file"
            )
        if not (path / name).is_file():
            where = "which its index names" if index.is_file() else "which is a file"
            raise InputError(f"{path} has no {name}, {where}")
    if len({name.casefold() for name in names}) != len(names):
        raise InputError(
            f"{path}: two names differ only in case, which not every system distinguishes"
        )
    _check_shards(path, names, indexed=index.is_file())
    return names


def _check_shards(path: Path, names: list[str], *, indexed: bool) -> None:
    """Raises `InputError` unless all numbered shards exist and an index names them."""
    numbers = [(int(found[1]), int(found[2])) for n in names if (found := _SHARD.search(n))]
    if not numbers:
        return
    counts = {count for _, count in numbers}
    if not indexed:
        raise InputError(
            f"{path} has {len(numbers)} of {max(counts)} shards and no {INDEX}",
            hint="is it still being written?",
        )
    if len(counts) == 1 and {number for number, _ in numbers} != set(range(1, max(counts) + 1)):
        raise InputError(
            f"{path}: {INDEX} names {len(numbers)} of {max(counts)} shards",
            hint="is it still being written?",
        )


def check_alike(checkpoint: Checkpoint, run: Run, *, url: str = "") -> None:
    """Raises `CheckpointDirError`, naming the first tensor that does not match the run."""
    there = {spec.name: spec for spec in checkpoint.specs}
    wanted = {spec.name: spec for spec in run.tensors}
    for name in sorted(there.keys() | wanted.keys()):
        new, old = there.get(name), wanted.get(name)
        if new == old:
            continue
        if new is None:
            fault = "is missing"
        elif old is None:
            fault = "is not one of the run's"
        elif new.shape != old.shape:
            fault = f"has shape {list(new.shape)}, the run's has {list(old.shape)}"
        else:
            fault = f"has dtype {new.dtype}, the run's has {old.dtype}"
        raise CheckpointDirError(
            f"{checkpoint.path} holds another model: tensor {name[:80]!r} {fault}",
            hint="a run holds one model; start another run for this one",
            run=url,
        )


def put_files(bucket: Bucket, files: Mapping[str, bytes]) -> None:
    """Stores a directory's other files as blobs."""
    for data in files.values():
        put_blob(bucket, data)


def read_files(bucket: Bucket, files: list[ModelFile], *, version: int) -> dict[str, bytes]:
    """Fetches and checks a version's other files.

    Raises `CorruptError` for a name that is invalid or not carried, before anything is fetched.
    """
    if len({file.name.casefold() for file in files}) != len(files):
        raise CorruptError("two files have the same name", run=bucket.url, version=version)
    for file in files:
        if not may_be_carried(file.name) and file.name != LAYOUT:
            raise CorruptError(
                f"{file.name[:80]!r} is not a file that a run may carry",
                run=bucket.url,
                version=version,
            )
        if file.bytes > MAX_FILE_BYTES:
            raise CorruptError(
                f"{file.name} has {file.bytes} bytes; the limit is {MAX_FILE_BYTES}",
                run=bucket.url,
                version=version,
            )
    return {
        file.name: bytes(get_blob(bucket, BlobRef(file.blob, file.bytes), version=version))
        for file in files
    }


def plans_of(run: Run, files: Mapping[str, bytes], *, url: str) -> list[FilePlan]:
    """Plans the safetensors files that a version's directory has; raises `CorruptError`."""
    if LAYOUT in files:
        return decode_layout(files[LAYOUT], table=run, run=url, key=LAYOUT)
    return plan_files(default_layout(run), run)


def _header(path: Path) -> str:
    """Reads the text of a safetensors header; it is checked when the tensors are located."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise InputError(
                f"{path} is not a safetensors file, or is incomplete",
                hint="is it still being written?",
            )
        try:
            return file.read(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from error


def same_files(left: list[ModelFile], right: list[ModelFile]) -> bool:
    """Returns whether two lists hold the same files, in any order."""
    return {(file.name, file.blob) for file in left} == {(file.name, file.blob) for file in right}
