"""Digests live tensors where they lie, without a run and without a mirror.

Each region of a placement is digested by itself, so a reader can compare each copy on each rank
with its own reference, and name the rank that holds something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from deltawire import codec
from deltawire.codec import Digest
from deltawire.placement.elements import CARRIER, array_of, chunks, decode_bits, digest_part
from deltawire.placement.layout import describe_live
from deltawire.placement.placement import Placement, Region


@torch.no_grad()
def read_regions(
    placement: Placement, live: Mapping[str, Tensor]
) -> Iterator[tuple[Region, Digest | None]]:
    """Yields each region with the digest of the published bits that its live elements give.

    The digest is None if no published value gives them, and for a region that is not
    `Region.exact`, whose published bits cannot be read back. Raises `InputError` if ``live`` is not
    laid out as when it was probed.
    """
    placement.check(live)
    flats = [flat.view(CARRIER[flat.element_size()]) for flat in describe_live(live)[2]]
    for region in placement.regions:
        yield region, _digest(placement, region, flats[region.storage]) if region.exact else None


def _digest(placement: Placement, region: Region, flat: Tensor) -> Digest | None:
    name = placement.tensors[region.tensor].name
    total = codec.ZERO
    for part in chunks(region.map):
        held = flat.as_strided(part.shape, part.target_strides, part.target)
        bits = decode_bits(array_of(held.cpu().contiguous().view(-1)), region.dtypes)
        if bits is None:
            return None
        total += digest_part(name, part, bits)
    return total
