"""Starts a run: stores the model's tensor table, its files and version 0 in the bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltawire.config import RunConfig, require_same
from deltawire.config.lines import line_config, publication_config
from deltawire.engines.registry import check_tensors
from deltawire.envs import open_tasks
from deltawire.export.models import check_directory, load_tokenizer
from deltawire.export.new_run import load_line, load_start, publish_start
from deltawire.export.source import WeightSource, digest_of, is_lossy, open_source
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.needs import config_of
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import find_run, newest_version, read_run
from deltawire.sync.chain.objects import another_model, check_signer
from deltawire.train.checkpoint import save_checkpoint
from deltawire.train.checkpoint_folders import checkpoint_versions, keep_checkpoint
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel import device_of, whole_mesh
from deltawire.wire.ledger import Ledger
from deltawire.wire.roles import run_of_line
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


def start_run(
    bucket: Bucket,
    config: RunConfig,
    model_directory: Path,
    *,
    signer: Signer | None = None,
    run_id: str = "",
    start: tuple[Any, WeightSource] | None = None,
) -> Run:
    """Create the run, or check that the one in the bucket is this one; commit version 0.

    With ``signer``, the run is signed by its key; ``run_id`` is the new run's id, if it is chosen.
    ``start`` is what `load_start` returned for these arguments, if the caller has called it.

    Raises `InputError` if the bucket holds a run with another model or, but for the keys that may
    change, another configuration, and if its engine cannot serve the model's tensors.
    """
    check_directory(model_directory)
    load_tokenizer(model_directory)
    if config.midtrain is None:
        open_tasks(config.task, seed=config.seed).draw("check", 0)
    start = start or load_start(config, model_directory, to_publish=True)
    publications = {one: open_source(one, start[0]) for one in config.train.also_publish}
    served = publications.get(config.rollout.weights, start[1])
    check_tensors(config.rollout.engine, served.specs())
    if newest_version(bucket) is None:
        if find_run(bucket) is not None:  # An earlier start ended before it committed version 0.
            check_same(bucket, config)
        publish_start(bucket, config, model_directory, start, signer=signer, run_id=run_id)
    run = read_run(bucket, public_key=signer.public_key if signer else "")
    check_signer(bucket, run, signer)
    keep_start(bucket, config, start)
    for exporter, publication in publications.items():
        place = line_bucket(bucket, exporter, create=True)
        if newest_version(place) is None:
            own = publication_config(config, exporter)
            publish_start(
                place, own, model_directory, (start[0], publication),
                signer=signer, run_id=run_of_line(run.id, exporter) if signer else "",
            )  # fmt: skip
    _, source = start
    if run.tensors != (specs := source.specs()) or run.digest != digest_of(source).hex():
        raise another_model(bucket, run.tensors, specs)
    check_same(bucket, config)
    return run


def keep_start(bucket: Bucket, config: RunConfig, start: tuple[Any, WeightSource]) -> None:
    """Stores and keeps a checkpoint at version 0 if that version does not hold the model's own
    weights: training begins with it, and verification computes from it."""
    model, source = start
    if not is_lossy(source) or newest_version(bucket) != 0:
        return
    run = read_run(bucket)
    if checkpoint_versions(bucket):
        return
    keep_checkpoint(bucket, 0)
    # Rank 0 does this before the others have joined, on the whole model.
    mesh = whole_mesh(device_of(model))
    masters = MasterWeights(model, config.train, source=source, mesh=mesh, seed=config.seed)
    masters.dither()
    digest = masters.digest().hex()
    save_checkpoint(bucket, masters.state(), Ledger(), version=0, digest=digest, run=run.id)


def start_lines(
    bucket: Bucket,
    config: RunConfig,
    model_directory: Path,
    *,
    signer: Signer | None = None,
    run_id: str = "",
) -> Run:
    """Create a run of several adapters: its base, and each adapter's line. Returns the base's run.

    With ``signer``, the run and its lines are signed by its key.

    Raises as `start_run` does.
    """
    base, source = load_start(config, model_directory)
    run = start_run(
        bucket, config, model_directory, signer=signer, run_id=run_id, start=(base, source)
    )
    for one in config.train.adapters:
        own = line_config(config, one.name, base=run.digest)
        place = line_bucket(bucket, one.name, create=True)
        start_run(
            place, own, model_directory, signer=signer,
            run_id=run_of_line(run.id, one.name) if signer else "", start=load_line(base, own),
        )  # fmt: skip
    return run


def check_same(bucket: Bucket, config: RunConfig) -> None:
    """Raises `InputError` if the run in the bucket was started with another configuration."""
    run, _ = open_run(bucket, role="trainer")
    require_same(config, config_of(run, url=bucket.url, role="trainer"), url=bucket.url)
