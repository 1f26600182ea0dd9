"""Object stores as data: latency, request limits and prices, each with its source and date."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from deltawire.errors import InputError

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None
"""Dollars; null if no source was found."""


class StoreKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One store. Rates hold for each prefix, or for each bucket where the store says so.

    Example::

        store_named("s3").price("other_region_gb")
    """

    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,31}$")]
    as_of: str
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    verified: bool
    get_ms: Rate
    put_ms: Rate
    connection_mb_s: Rate
    reads_per_s: Rate
    writes_per_s: Rate
    put_per_million: Price
    get_per_million: Price
    gb_month: Price
    same_region_gb: Price
    other_region_gb: Price
    internet_gb: Price

    def price(self, what: str) -> float:
        """Returns a price by the name of its field; raises `InputError` if the table has none."""
        found: float | None = getattr(self, what)
        if found is None:
            raise InputError(
                f"the store {self.name} has no price for {what} (as of {self.as_of})",
                hint=f"give it in the plan: [prices.{self.name}] {what} = DOLLARS",
            )
        return found


@lru_cache(maxsize=1)
def shipped_stores() -> dict[str, StoreKind]:
    """Returns the stores that deltawire ships figures of, by name."""
    raw = Path(__file__).with_name("stores.json").read_bytes()
    return {one.name: one for one in msgspec.json.decode(raw, type=list[StoreKind])}


def store_named(name: str, prices: dict[str, dict[str, float]] | None = None) -> StoreKind:
    """Returns a store with the figures that ``prices`` gives by its name and field.

    Raises `InputError` for an unknown store, field or value.
    """
    found = shipped_stores().get(name)
    if found is None:
        raise InputError(
            f"no store is called {name!r}", hint=f"known: {', '.join(sorted(shipped_stores()))}"
        )
    given = (prices or {}).get(name, {})
    try:
        return msgspec.convert({**msgspec.structs.asdict(found), **given}, StoreKind)
    except msgspec.ValidationError as failure:
        raise InputError(
            f"[prices.{name}]: {failure}", hint="the fields are those of plan/fleet/stores.json"
        ) from None
