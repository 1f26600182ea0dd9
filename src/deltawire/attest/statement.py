"""Defines ``digests.json``: the dtype, shape and digest of each tensor of a model, sealed.

The file is a sealed object (`deltawire.wire.seal`), signed for the key ``digests.json`` wherever it
lies, so that it may be copied. It is read with limits, and its total must be the sum of its parts.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire import codec
from deltawire.attest.places import Counts
from deltawire.attest.requests import is_http, send
from deltawire.builds import MAX_BUILD
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.private_files import replace_private
from deltawire.store import Bucket, open_bucket
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Sum
from deltawire.wire.run import MAX_ELEMENTS, MAX_TENSORS, Name, TensorSpec
from deltawire.wire.seal import Signer, check_signature, seal, unseal
from deltawire.wire.signing import verify

FILE = "digests.json"
MAX_BYTES = 64 << 20
MAX_ANSWER_BYTES = 1 << 20
"""Bytes that a server may answer when it gets the file."""


class TensorDigest(msgspec.Struct, frozen=True):
    """One tensor, and the digest of its elements."""

    name: Name
    shape: Counts
    dtype: Annotated[str, Meta(max_length=16)]
    digest: Sum

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its digest."""
        return TensorSpec(self.name, self.shape, self.dtype)


class Digests(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    dict=True,
    tag_field="format",
    tag=FORMAT,
):
    """The tensors of a model in name order, and the digest of all of them together.

    ``aliases`` are further names of tied tensors. ``copies_disagree`` names tensors of which ranks
    hold copies with different bits; their digests are those of the copies that count.

    Example::

        found = digests({"a": np.zeros(4, np.uint16)})
        assert found.by_name["a"].shape == (4,)
    """

    digest: Sum
    tensors: Annotated[list[TensorDigest], Meta(max_length=MAX_TENSORS)]
    aliases: Annotated[dict[Name, Name], Meta(max_length=MAX_TENSORS)] = {}
    copies_disagree: Annotated[list[Name], Meta(max_length=MAX_TENSORS)] = []
    build: Annotated[str, Meta(max_length=MAX_BUILD)] = ""

    @cached_property
    def by_name(self) -> dict[str, TensorDigest]:
        """The tensors by name."""
        return {one.name: one for one in self.tensors}

    def encode(self, *, signer: Signer | None = None) -> bytes:
        """Encodes and seals the file, signed if there is a ``signer``."""
        return seal(self, key=FILE, signer=signer)

    def write(
        self,
        location: str | os.PathLike[str] | Bucket,
        *,
        signer: Signer | None = None,
        token: str = "",
    ) -> None:
        """Writes ``digests.json`` into a folder or a bucket, or to a path that ends in ``.json``.
        An address of HTTP gets the file as a PUT request, with ``token`` as a bearer token.

        Raises `InputError` if it cannot be written, `RetryError` for a server that does not answer.
        """
        data = self.encode(signer=signer)
        if isinstance(location, Bucket):
            location.put(FILE, data)
        elif is_http(location):
            send(location, limit=MAX_ANSWER_BYTES, token=token, body=data, method="PUT")
        elif is_url(location):
            open_bucket(location).put(FILE, data)
        else:
            path = Path(location)
            replace_private(path if path.suffix == ".json" else path / FILE, data)


def is_url(location: str | os.PathLike[str]) -> bool:
    """Returns whether a location is a URL and no path."""
    return "://" in os.fspath(location)


def decode_digests(data: bytes, *, where: str, public_key: str = "") -> Digests:
    """Decodes ``digests.json`` and checks it, and its signature if there is a ``public_key``.

    Raises `CorruptError` for a file that is damaged, has more than `MAX_ELEMENTS` elements, or has
    an alias of a missing tensor; `SignatureError` for one that the key's owner did not sign.
    """
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{FILE} has more than {MAX_BYTES} bytes", run=where, key=FILE)
    if public_key:
        check_signature(data, public_key=public_key, verify=verify, run=where, key=FILE)
    found = unseal(data, Digests, run=where, key=FILE, what=FILE)
    total = codec.ZERO
    names: set[str] = set()
    for one in found.tensors:
        if one.name in names:
            raise CorruptError(f"{FILE} names {one.name[:80]!r} twice", run=where, key=FILE)
        if one.dtype not in codec.ITEMSIZE:
            raise CorruptError(f"{FILE} has the dtype {one.dtype!r}", run=where, key=FILE)
        names.add(one.name)
        total += Digest.from_hex(one.digest)
    if sum(one.spec.count for one in found.tensors) > MAX_ELEMENTS:
        raise CorruptError(f"{FILE} has more than {MAX_ELEMENTS} elements", run=where, key=FILE)
    if not names.issuperset(found.aliases.values()):
        raise CorruptError(f"{FILE} has an alias of a missing tensor", run=where, key=FILE)
    if total.hex() != found.digest:
        raise CorruptError(f"{FILE}: its digest is not the sum of its parts", run=where, key=FILE)
    return found


def read_digests(
    location: str | os.PathLike[str] | Bucket, *, public_key: str = "", token: str = ""
) -> Digests:
    """Reads ``digests.json`` from a file, a folder, a bucket or an address of HTTP, with limits.
    ``token`` is a bearer token for HTTP.

    Raises `InputError` if there is none, as `decode_digests` does, and `RetryError` for a server
    that does not answer.
    """
    if is_http(location):
        data = send(location, limit=MAX_BYTES, token=token)
        return decode_digests(data, where=location, public_key=public_key)
    if isinstance(location, Bucket) or is_url(location):
        bucket = location if isinstance(location, Bucket) else open_bucket(location)
        held = bucket.get(FILE, limit=MAX_BYTES)
        if held is None:
            raise InputError(f"there is no {FILE} in the bucket", run=bucket.url)
        return decode_digests(held, where=bucket.url, public_key=public_key)
    path = Path(location)
    path = path / FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}",
            hint="deltawire.attest.digests(model).write(folder) makes one",
        ) from error
    return decode_digests(data, where=str(path), public_key=public_key)
