"""PLAN.toml: the model, the trainer, the rollouts and the regions that a plan is made for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from deltawire.errors import InputError
from deltawire.plan.accelerators import Accelerator, accelerator_named, shipped_accelerators
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import find_model
from deltawire.plan.fleet.learning import learn_share
from deltawire.plan.fleet.rates import Precision, Rates, Share
from deltawire.plan.fleet.stores import StoreKind, store_named
from deltawire.store import Bucket, open_bucket
from deltawire.sync.follow.blob_cache import LIMIT_BYTES

MAX_BYTES = 1 << 20
Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=1e-6, le=1e7)]
Bandwidth = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model]``: a name of the catalogue or a config.json; the share of values a step changes.

    ``changed`` may be left out if ``learn_from`` names a run to learn it from.
    ``bits_per_change`` replaces the measured size of a delta.

    Example::

        ModelSection(config="qwen3-8b", precision="bf16", changed=0.011)
    """

    config: str
    precision: Precision
    changed: Share | None = None
    learn_from: str = ""
    bits_per_change: Annotated[float, msgspec.Meta(gt=0, le=128)] | None = None


class TrainerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[trainer]``: accelerators, each a rank that publishes its part; the time of a step.

    ``link_gb_s`` is a host's to its store, ``cores_per_host`` the cores that encode. Every
    ``anchor_every``-th version is also stored whole (0: none); every ``checkpoint_every``-th has a
    state of the trainer, of which the newest ``checkpoints`` stay. ``proofs`` is the run's
    ``retain.proofs``. ``evaluators`` is how many processes measure held-out accuracy.

    Example::

        TrainerSection(accelerator="h200", accelerators=256, step_s=300)
    """

    accelerator: str
    accelerators: Count
    step_s: Seconds
    store: str = "s3"
    link_gb_s: Bandwidth = 12.5
    cores_per_host: Count = 96
    anchor_every: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 50
    checkpoint_every: Count = 20
    checkpoints: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 2
    evaluators: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    proofs: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class RolloutSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[rollouts]``: the completions that a step consumes, and how workers make them.

    ``seconds`` is the mean of one completion, ``tail`` the mean of a group's longest over that,
    ``per_engine`` how many an engine has under way, ``queue`` the batches that wait.
    ``max_staleness`` is the run's bound. ``tokens`` are those of a completion with its prompt, of
    which ``group_size`` are stored as one object.

    Example::

        RolloutSection(batch=512, seconds=120, tail=2.5, per_engine=64)
    """

    batch: Count
    seconds: Seconds
    tail: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0
    per_engine: Count = 64
    queue: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    max_staleness: Count = 8
    group_size: Count = 8
    tokens: Count = 2048


class RegionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[regions]]``: engines of one region, and the store that they read.

    Every accelerator is a reader of its shard: ``tensor_parallel`` ranks divide all matrices,
    ``expert_parallel`` ranks the experts (1: as tensor parallelism). A region that is not
    the trainer's (``away``) has a relay, which pulls each version once over ``cross_gb_s``, unless
    ``relay`` is false: then every reader does. ``total_gb_s`` limits the region's readers together.
    With ``blob_cache``, the readers of a host fetch each blob of a delta once between them, if two
    deltas fit into the cache's ``blob_cache_gb``. Without ``rollouts`` its engines only serve: they
    follow the run and are none of its workers.

    Example::

        RegionSection(name="eu", accelerator="h200", accelerators=200, tensor_parallel=8, away=True)
    """

    name: Name
    accelerator: str
    accelerators: Count
    tensor_parallel: Count = 8
    expert_parallel: Count = 1
    store: str = "s3"
    away: bool = False
    relay: bool = True
    link_gb_s: Bandwidth = 12.5
    cross_gb_s: Bandwidth = 1.25
    total_gb_s: Bandwidth = 1000.0
    cores_per_host: Count = 96
    poll_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 0.5
    rollouts: bool = True
    blob_cache: bool = False
    blob_cache_gb: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = LIMIT_BYTES / 1e9


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[faults]`` of a simulation: deaths and lag.

    An engine dies after ``mean_life_s`` on average (0: never), is back after ``restart_s``, and
    then gets a whole model. A share ``slow_share`` of readers works ``slowness`` times slower.

    Example::

        Faults(mean_life_s=86400, restart_s=120, slow_share=0.01, slowness=3)
    """

    mean_life_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    restart_s: Seconds = 60.0
    slow_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    slowness: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole PLAN.toml. ``prices`` replace figures of stores, by name and field.

    Example::

        read_request(Path("examples/plans/100-gpus-15s.toml")).regions[0].name
    """

    name: Name
    model: ModelSection
    trainer: TrainerSection
    rollouts: RolloutSection
    regions: Annotated[list[RegionSection], msgspec.Meta(min_length=1, max_length=256)]
    goal_s: Seconds | None = None
    """Seconds in which the last reader should have a version."""
    kept_days: Annotated[float, msgspec.Meta(ge=0, le=36_500)] = 30.0
    """Days of which everything is kept, in the dollars of a day."""
    faults: Faults = Faults()
    prices: dict[str, dict[str, float]] = {}
    accelerator_hour: dict[str, float] = {}
    """Dollars of an accelerator for an hour, by name."""

    def check(self) -> None:
        """Raises `InputError` for what no single field shows."""
        for where, section in (("trainer", self.trainer), *((r.name, r) for r in self.regions)):
            for field in ("link_gb_s", "cross_gb_s", "total_gb_s"):
                if getattr(section, field, 1.0) == 0:
                    raise InputError(
                        f"{where}: {field} is 0, so nothing would ever arrive",
                        hint="give the link's rate in gigabytes a second",
                    )
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names):
            raise InputError("two regions have the same name")
        if self.model.changed is None and not self.model.learn_from:
            raise InputError(
                "[model] says neither changed nor learn_from",
                hint="give the share of values that a step changes, or a run to learn it from",
            )
        if not any(region.rollouts for region in self.regions):
            raise InputError("no region makes rollouts", hint="leave rollouts = false out of one")
        for region in self.regions:
            if region.accelerators % region.tensor_parallel:
                raise InputError(
                    f"{region.name}: {region.accelerators} accelerators are not divisible into "
                    f"engines of {region.tensor_parallel}"
                )

    def accelerator(self, name: str) -> Accelerator:
        """Returns an accelerator of the shipped table; raises `InputError` for an unknown one."""
        return accelerator_named(name, shipped_accelerators())

    def store(self, name: str) -> StoreKind:
        """Returns a store with this plan's prices; raises `InputError` for an unknown one."""
        return store_named(name, self.prices)

    def changed(self, rates: Rates, *, open_run: Callable[[str], Bucket] = open_bucket) -> float:
        """Returns the share of values that a step changes, learned from the run if one is named,
        which ``open_run`` opens.

        Raises `InputError` for a run that has no deltas.
        """
        if self.model.learn_from:
            return learn_share(open_run(self.model.learn_from), rates.codec(self.model.precision))
        assert self.model.changed is not None
        return self.model.changed

    def architecture(self, folder: Path = Path()) -> Model:
        """Describes the model, whose config.json may lie relative to ``folder``.

        Raises `InputError` if there is none, or if experts are divided that it does not have.
        """
        name = self.model.config
        local = folder / name
        model, _ = find_model(str(local) if local.exists() else name)
        for region in self.regions:
            if region.expert_parallel > 1 and not model.expert_parameters:
                raise InputError(
                    f"{region.name}: expert_parallel = {region.expert_parallel}, but {model.name} "
                    "has no experts",
                    hint="leave expert_parallel out, or give the config.json of another model",
                )
        return model


def read_request(path: Path, changes: dict[str, str] | None = None) -> PlanRequest:
    """Reads a PLAN.toml, with ``changes`` of keys such as ``trainer.step_s`` to values in TOML.

    Keys of regions are ``regions.NAME.KEY``, or ``regions.*.KEY`` for all of them. Raises
    `InputError` if the file cannot be read, or for an unknown key or a value out of range.
    """
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES:,} bytes, so it is no plan")
    try:
        plan: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as failure:
        raise InputError(f"{path} is not TOML: {failure}") from None
    for key, value in (changes or {}).items():
        _change(plan, key, value)
    try:
        request = msgspec.convert(plan, PlanRequest)
    except msgspec.ValidationError as failure:
        raise InputError(
            f"{path} is not a plan: {failure}", hint="docs/PLANNING.md lists the keys"
        ) from None
    request.check()
    return request


def _change(plan: dict[str, Any], key: str, value: str) -> None:
    """Sets one key of a decoded plan."""
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value
    parts = key.split(".")
    tables: list[Any] = [plan]
    if parts[0] == "regions" and len(parts) == 3:
        regions = plan.get("regions", [])
        tables = [one for one in regions if parts[1] in ("*", one.get("name"))]
        if not tables:
            raise InputError(f"--what-if {key}: there is no region {parts[1]!r}")
    else:
        for part in parts[:-1]:
            tables = [table.setdefault(part, {}) for table in tables]
    for table in tables:
        if not isinstance(table, dict):
            raise InputError(f"--what-if {key}: no such key", hint="docs/PLANNING.md lists them")
        table[parts[-1]] = parsed
