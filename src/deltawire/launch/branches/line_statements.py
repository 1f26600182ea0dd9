"""States how the versions of a run's further precisions were made: derived, not declared.

Such a version is made again from the run's version of the same number, and compared bit by bit
(`deltawire.rl.trainer.derived_lines`), before anything is stated about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from deltawire.export.lines import open_policy
from deltawire.export.models import fetch_model_files
from deltawire.launch.branches.statements import (
    DERIVED_TYPE,
    Digests,
    Made,
    digests_of,
    step_name,
    text_hash,
    version_name,
)
from deltawire.rl.trainer.derived_lines import DerivedLine
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import Mirror, read_manifest
from deltawire.wire.run import Run

LISTED = "lines"
"""The parameter of a version's statement that lists the lines stated with it. Proofs of earlier
versions of deltawire have none."""


class LineStatements:
    """The statements of the lines that a run publishes (``train.also_publish``), in step with those
    of its versions. ``counts`` has the number of versions stated of each line.

    Example::

        lines = LineStatements(bucket, run)
        steps = lines.statements(mirror, digests_of(mirror, run))
    """

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.counts: dict[str, int] = {}
        self._run = run
        self._lines: list[DerivedLine] = []
        self._known: dict[str, tuple[int, Digests]] = {}
        config = config_of(run, url=bucket.url) if run.config else None
        if config is None or not config.train.also_publish:
            return
        with fetch_model_files(bucket, run) as folder:
            model = open_policy(
                bucket, config, Path(folder), adapter=config.train.served_adapter, seed=config.seed
            )
        self._lines = [DerivedLine(bucket, one, model) for one in config.train.also_publish]

    def statements(self, upper: Mirror, digests: Digests) -> list[Made]:
        """Returns the step of each line's version of the number of ``upper``, whose digests these
        are. A line that lacks its newest version has none.

        Raises `CorruptError` for a version that does not follow.
        """
        return [
            self._step(line, line.require(upper), upper.version, digests)
            for line in self._lines
            if upper.version in line.versions
        ]

    def listed(self, made: Made, further: Sequence[Made]) -> Made:
        """Returns the step of the run's version with the names of the lines that are stated with
        it, so that a statement that is taken away is missed."""
        if not self._lines:
            return made
        names = [name for one in further for name in one.parameters["layers"]]
        return msgspec.structs.replace(made, parameters={**made.parameters, LISTED: names})

    @property
    def names(self) -> list[str]:
        """Returns the lines' exporters."""
        return [line.exporter for line in self._lines]

    def remember(self, exporter: str, version: int, digests: Digests) -> None:
        """Takes the digests of a line's version as they are stated, so that the next version's step
        names them."""
        self._known[exporter] = version, digests

    def _step(self, line: DerivedLine, mirror: Mirror, version: int, digests: Digests) -> Made:
        name = line.exporter
        own = digests_of(mirror, line.run)
        materials = {version_name(version): digests}
        before = [step_name(version)]
        if name in self._known:
            earlier, theirs = self._known[name]
            materials[line_name(name, earlier)] = theirs
            before.append(line_step(name, earlier))
        self._known[name] = version, own
        self.counts[name] = self.counts.get(name, 0) + 1
        manifest = read_manifest(line.bucket, line.run, version)
        assert manifest is not None  # Its mirror was loaded.
        return Made(
            name=line_step(name, version),
            kind=DERIVED_TYPE,
            products={line_name(name, version): own},
            materials={**materials, "configuration": text_hash("line", name)},
            before=before,
            parameters={"run": self._run.id, "version": version, "kind": "line", "layers": [name]},
            build=manifest.build,
            finished_at=manifest.created_at,
        )


def line_name(exporter: str, version: int) -> str:
    """Returns the name of a line's version as an artifact."""
    return f"line/{exporter}/{version}"


def line_step(exporter: str, version: int) -> str:
    """Returns the name of the step that made a line's version."""
    return f"line-{exporter}-{step_name(version)}"
