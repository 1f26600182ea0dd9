"""The shipped catalogue: configurations of published models and published shapes, with sources.

It holds no weights. Configurations hold only the fields that decide sizes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from deltawire.errors import InputError
from deltawire.plan.architecture import Model
from deltawire.plan.configuration import ArchitectureConfig, read_config
from deltawire.plan.families import describe
from deltawire.plan.layout import Mode, Packing
from deltawire.plan.profile import Profile


class CatalogueModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published model."""

    name: str
    repository: str
    published_parameters: float
    native_packing: Packing
    """How the published checkpoint holds its routed experts; none is bf16."""
    source: str
    """Where the configuration's numbers come from."""
    verified: bool
    """The numbers were seen in a copy of the published config.json or in transformers."""
    note: str
    config: ArchitectureConfig

    def describe(self) -> Model:
        """Describes the model."""
        return describe(self.config, name=self.name)


class PublishedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training shape that someone publishes: a model on a number of accelerators."""

    shape: str
    model: str
    mode: Mode
    accelerators: int
    accelerator: str
    context: int
    source: str


@lru_cache(maxsize=1)
def catalogue() -> dict[str, CatalogueModel]:
    """Returns the shipped models by name."""
    raw = Path(__file__).with_name("models.json").read_bytes()
    return {model.name: model for model in msgspec.json.decode(raw, type=list[CatalogueModel])}


@lru_cache(maxsize=1)
def published_shapes() -> list[PublishedShape]:
    """Returns the published shapes that the documentation compares with."""
    raw = Path(__file__).with_name("published.json").read_bytes()
    return msgspec.json.decode(raw, type=list[PublishedShape])


def find_model(name: str) -> tuple[Model, Packing]:
    """Describes a model of the catalogue, a config.json or a model directory.

    Also returns how its checkpoint packs experts. Raises `InputError` if it does not exist.
    """
    if (known := catalogue().get(name.lower())) is not None:
        return known.describe(), known.native_packing
    path = Path(name)
    if not path.exists():
        raise InputError(
            f"{name!r} is neither a model of the catalogue nor a file",
            hint=f"the catalogue has {', '.join(sorted(catalogue()))}",
        )
    label = path.name if path.is_dir() else path.resolve().parent.name or path.name
    return describe(read_config(path), name=label), "none"


@lru_cache(maxsize=1)
def shipped_profiles() -> tuple[Profile, ...]:
    """Returns the pinned profiles: every model in every mode on the fewest of one accelerator."""
    raw = Path(__file__).with_name("profiles.json").read_bytes()
    return tuple(msgspec.json.decode(raw, type=list[Profile]))
