"""Other ways to send a version, by the bytes that they publish for it.

Times of these are lower bounds: only the store and the links count, no encoding, decoding or
loading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltawire.plan.fleet.rates import FREE
from deltawire.plan.fleet.transfer import Amounts, Readers, Writer, follow, publish

FIREWORKS_FP8_SHARE = 20.3 / 1024
"""Published for a model of 1,024 GiB."""


@dataclass(frozen=True)
class OtherMethod:
    """A method that others use: what it sends, and whether a reader fetches only its shard.

    Example::

        for method in other_methods(amounts):
            print(method.name, method.bytes)
    """

    name: str
    bytes: float
    sharded: bool
    source: str

    def amounts(self, amounts: Amounts, ranks: int, share: float) -> Amounts:
        """Returns a version as this method sends it to readers of ``share`` of the model."""
        if self.sharded:
            return amounts.whole(ranks, share)
        return amounts.sending(self.bytes, ranks)


def other_methods(amounts: Amounts) -> list[OtherMethod]:
    """Returns the methods whose bytes are known for this precision."""
    found = [
        OtherMethod(
            "whole checkpoint", amounts.model_bytes, True, "each rank reads its shard of all bytes"
        )
    ]
    if amounts.width == 2:
        found += [
            OtherMethod(
                "sparse safetensors (TRL)", amounts.changes * 6, False,
                "int32 index and bf16 value, 48 bits a change; one file for every host",
            ),
            OtherMethod(
                "zstd of XOR (arc_v2, slime)", amounts.changes * 20 / 8, False,
                "19.3 to 22 bits a change, measured on real deltas; one file for every host",
            ),
            OtherMethod(
                "arc_v3", amounts.changes * 13 / 8, False,
                "11.7 to 15.7 bits a change, measured on real deltas; one file for every host",
            ),
        ]  # fmt: skip
    else:
        found += [
            OtherMethod(
                "sparse indices and codes", amounts.changes * 5, False,
                "int32 index and 8-bit code, 40 bits a change; one file for every host",
            ),
            OtherMethod(
                "Fireworks", amounts.model_bytes * FIREWORKS_FP8_SHARE, False,
                "20.3 of 1,024 GiB, published for another model; one file for every host",
            ),
        ]  # fmt: skip
    return found


def method_seconds(
    method: OtherMethod, amounts: Amounts, writer: Writer, readers: Readers
) -> float:
    """Returns the least seconds from the trainer's copy to the last reader's bytes."""
    sent = method.amounts(amounts, writer.ranks, readers.share)
    written = publish(sent, replace(writer, encode=FREE))
    held = replace(readers, decode=FREE, stage_change_s=0.0, swap_change_s=0.0, blob_cache=False)
    if not method.sharded:
        hosts = -(-readers.count // readers.per_host)
        held = replace(held, count=hosts, per_host=1, share=1.0)
    return written.seconds + follow(sent, held).seconds
