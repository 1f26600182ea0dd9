"""Registers exporters: what a trainer publishes of its weights, and facts that need no torch.

A new exporter is one module in `deltawire.export` and one line in `EXPORTERS`. The configuration's
checks, the exporters themselves and readers of a run all ask this table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from deltawire.errors import InputError

StoredLayout = Literal["compressed-tensors", "deepseek"]
"""The projects whose tensor names and shapes a quantized checkpoint has."""


class Scheme(NamedTuple):
    """A format of codes, the layout of its tensors in checkpoints, and how fp8 scales are chosen.

    ``form_name`` is a key of `deltawire.packed_formats.PACKED`. ``power_of_two``: the scales
    of fp8 blocks are powers of two, else any float32.

    Example::

        EXPORTERS["fp8-block"].scheme.form_name  # "fp8-block"
    """

    form_name: str
    layout: StoredLayout = "compressed-tensors"
    power_of_two: bool = False


class Exporter(NamedTuple):
    """A registered exporter: ``place`` is ``module:callable``, which takes the model and returns
    its `deltawire.export.source.WeightSource`.

    ``exact`` says that the published values are those that the trainer computes with. ``scheme`` is
    that of an exporter that quantizes, whose callable takes it too.

    Example::

        EXPORTERS["bf16"].exact  # True
    """

    place: str
    exact: bool = False
    scheme: Scheme | None = None


_QUANTIZED = "deltawire.export.quantized:QuantizedWeights"

EXPORTERS = {
    "bf16": Exporter("deltawire.export.cast:bf16", exact=True),
    "f16": Exporter("deltawire.export.cast:f16", exact=True),
    "f32": Exporter("deltawire.export.cast:f32", exact=True),
    "merged": Exporter("deltawire.export.merged:merged"),
    "fp8-block": Exporter(_QUANTIZED, scheme=Scheme("fp8-block", "deepseek", power_of_two=True)),
    "fp8-block-f32": Exporter(_QUANTIZED, scheme=Scheme("fp8-block", "deepseek")),
    "fp8-block-ct": Exporter(_QUANTIZED, scheme=Scheme("fp8-block", power_of_two=True)),
    "fp8-block-f32-ct": Exporter(_QUANTIZED, scheme=Scheme("fp8-block")),
    "int4-g32": Exporter(_QUANTIZED, scheme=Scheme("int4-g32")),
    "mxfp4": Exporter(_QUANTIZED, scheme=Scheme("mxfp4")),
}
"""Exporters by the name that ``train.exporter`` gives. ``f32``: the scales of fp8 blocks are any
float32. ``ct``: fp8 blocks are stored as compressed-tensors does, else as DeepSeek does."""


def require_exporter(exporter: str) -> Exporter:
    """Returns the exporter of that name; raises `InputError` for an unknown one.

    A configuration that is read from a bucket is not asked: a newer release may know more.
    """
    if exporter not in EXPORTERS:
        raise InputError(
            f"there is no exporter {exporter[:80]!r}",
            hint=f"set train.exporter to one of {', '.join(sorted(EXPORTERS))}",
        )
    return EXPORTERS[exporter]


def is_exact(exporter: str) -> bool:
    """Returns whether an exporter publishes the values that the trainer computes with."""
    return exporter in EXPORTERS and EXPORTERS[exporter].exact


def scheme_of(exporter: str) -> Scheme | None:
    """Returns the scheme of an exporter that quantizes; None for any other."""
    return EXPORTERS[exporter].scheme if exporter in EXPORTERS else None


def quantizing() -> list[str]:
    """Returns the names of the exporters that quantize, in the order of the table."""
    return [name for name, one in EXPORTERS.items() if one.scheme is not None]
