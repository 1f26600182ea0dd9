"""Opens what is compared: a folder, a version of a run, or digests without elements."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltawire import codec
from deltawire.attest.combining import described, total_of
from deltawire.attest.digesting import digest_lazy
from deltawire.attest.statement import FILE, Digests, read_digests
from deltawire.codec import Bits
from deltawire.errors import InputError
from deltawire.store import Bucket
from deltawire.sync import load_mirror
from deltawire.sync.publish.safetensors_files import safetensors_of
from deltawire.wire.run import Run


@dataclass(frozen=True)
class Side:
    """Weights by their digests, and their elements if there are any.

    ``name`` says in a report which weights these are. ``elements`` returns the flat bits of a
    tensor; None if only digests are known.
    """

    name: str
    digests: Digests
    elements: Callable[[str], Bits] | None = None

    def values(self, name: str) -> Bits | None:
        """Returns the bits of a tensor, also under an alias; None if they are not known."""
        stored = self.digests.aliases.get(name, name)
        if self.elements is None or stored not in self.digests.by_name:
            return None
        return self.elements(stored)


def folder_side(folder: Path) -> Side:
    """Opens a folder of safetensors files; raises `InputError` if there are none."""
    held = {one.spec.name: one for one in safetensors_of(folder)}
    found = total_of(digest_lazy(one) for one in held.values())
    return Side(str(folder), found, lambda name: held[name].read())


def version_side(bucket: Bucket, run: Run, version: int) -> Side:
    """Loads a version of a run into memory; raises as `load_mirror` does."""
    mirror = load_mirror(bucket, run, at=version)
    found = total_of(
        (described(s, codec.digest_bits(s.name, mirror.tensors[s.name])) for s in run.tensors),
        aliases=run.aliases,
    )
    return Side(f"version {version}", found, mirror.tensors.__getitem__)


def digests_side(location: str | os.PathLike[str], *, public_key: str = "") -> Side:
    """Opens ``digests.json``; raises as `read_digests` does."""
    return Side(os.fspath(location), read_digests(location, public_key=public_key))


def local_side(location: str, *, public_key: str = "") -> Side | None:
    """Opens a path that is a file, or a folder of files or digests; None for anything else, such as
    a run. Raises `InputError` for a folder with neither."""
    path = Path(location)
    if path.is_file():
        return digests_side(path, public_key=public_key)
    if not path.is_dir():
        return None
    if any(path.glob("*.safetensors")):
        return folder_side(path)
    if (path / FILE).is_file():
        return digests_side(path, public_key=public_key)
    return None


def require_one_model(sides: Sequence[Side]) -> None:
    """Raises `InputError` if two sides have no tensor in common: they are of other models."""
    first, second = (set(one.digests.by_name) | set(one.digests.aliases) for one in sides)
    if first.isdisjoint(second):
        some = [min(names, default="no tensor") for names in (first, second)]
        raise InputError(
            f"{sides[0].name} and {sides[1].name} are different models: one has {some[0][:80]!r}, "
            f"the other {some[1][:80]!r}",
            hint="are the names those of the checkpoint?",
        )
