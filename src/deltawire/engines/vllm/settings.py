"""What a vLLM is told: which run to follow, and what a swap does to sequences in flight."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.errors import InputError

InFlight = Literal["keep", "recompute", "drain"]

SECTION = "deltawire"
"""The member of vLLM's ``additional_config`` that holds the settings."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``run`` is a bucket's location; the rest has defaults.

    ``in_flight`` says what becomes of running sequences at a swap: **keep** them on the keys and
    values they have, **recompute** these under the new weights, or **drain**: let them finish
    first, while new ones wait.
    """

    run: Annotated[str, Meta(min_length=1, max_length=4096)]
    public_key: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    in_flight: InFlight = "keep"
    follow: bool = True
    """Take up every new version without being told."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    """To decode with, on each rank, beside the model's own."""
    attest_every_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Digest all live bits this often, and mend what was found; 0 is never."""


def parse(values: Any, *, where: str) -> Settings:
    """Settings from a JSON object; raises `InputError` that says what is wrong ``where``."""
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{where}: {error}",
            hint=f"the members are {', '.join(Settings.__struct_fields__)}",
        ) from None


def settings_of(vllm_config: Any) -> Settings | None:
    """What ``--additional-config '{"deltawire": {…}}'`` says, None if it says nothing: then the
    run comes later, over a call."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or not additional.get(SECTION):
        return None
    return parse(additional[SECTION], where=f"additional_config.{SECTION}")


def in_use(vllm_config: Any) -> bool:
    """Whether this engine's weights are deltawire's to change."""
    if vllm_config is None:
        return False
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    extension = getattr(vllm_config.parallel_config, "worker_extension_cls", "") or ""
    additional = getattr(vllm_config, "additional_config", None)
    return (
        (transfer is not None and transfer.backend == "deltawire")
        or extension.startswith("deltawire.")
        or (isinstance(additional, dict) and SECTION in additional)
    )


def in_use_here() -> bool:
    """Whether that holds of the engine that this process is at work on."""
    from vllm.config import get_current_vllm_config_or_none

    return in_use(get_current_vllm_config_or_none())
